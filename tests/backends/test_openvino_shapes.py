"""Sizes that come again and again get a model of their own, which must give what the one for all gives."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf.backends import openvino_sdk
from aitune_hf.backends.openvino_shapes import AT_CALL, MAX_BYTES, MAX_MODELS, ROOM, ShapedModels


class Doubling:
    """A compiled model, as far as these tests need one."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        self.change = change
        self.calls = 0

    def run(self, place: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        return [self.change(inputs[0] * 2)]


class Maker:
    """Makes models for certain sizes, and notes for which."""

    def __init__(self, model: Callable[[], Any] = Doubling) -> None:
        self.model = model
        self.made: list[list[int]] = []
        self.models: list[Any] = []

    def __call__(self, sizes: Sequence[torch.Size]) -> Any:
        self.made.append(list(sizes[0]))
        self.models.append(self.model())
        return self.models[-1]


def shaped(maker: Maker, whole: Doubling | None = None, weight_bytes: int = 1) -> ShapedModels:
    return ShapedModels(whole or Doubling(), maker, weight_bytes, 1e-4, "model")


def call(models: ShapedModels, size: int, times: int = 1) -> None:
    for _ in range(times):
        x = torch.randn(size)
        torch.testing.assert_close(models.run(0, [x])[0], x * 2)


def test_sizes_that_come_often_get_a_model_of_their_own() -> None:
    whole, maker = Doubling(), Maker()
    models = shaped(maker, whole)
    call(models, 3, AT_CALL - 1)
    call(models, 4, AT_CALL - 1)
    assert maker.made == []
    call(models, 3)
    assert maker.made == [[3]]
    before = whole.calls
    call(models, 3, 5)
    assert whole.calls == before
    assert maker.models[0].calls == 6  # One to compare.
    call(models, 4, 5)
    assert maker.made == [[3], [4]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x + 0.01,
        lambda x: x * float("nan"),
        lambda x: x[:1],
        lambda x: x.double(),
        lambda x: torch.full_like(x, float("inf")),
    ],
    ids=["off", "nan", "shape", "dtype", "inf"],
)
def test_a_model_that_gives_anything_else_is_not_used(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    maker = Maker(lambda: Doubling(spoil))
    call(shaped(maker), 3, 4 * AT_CALL)
    assert maker.made == [[3]], "it is not tried again"


def test_integers_must_be_equal() -> None:
    class Integers(Doubling):
        def run(self, place: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [super().run(place, inputs)[0].to(torch.int64)]

    maker = Maker(lambda: Integers(lambda x: x + 1))
    models = ShapedModels(Integers(), maker, 1, 1e-4, "model")
    for _ in range(2 * AT_CALL):
        assert torch.equal(models.run(0, [torch.ones(3)])[0], torch.full((3,), 2))


def test_a_model_that_cannot_be_made_is_done_without() -> None:
    def failing() -> Any:
        raise RuntimeError("cannot reshape\nand more")

    maker = Maker(failing)
    call(shaped(maker), 3, 4 * AT_CALL)
    assert maker.made == [[3]]


def test_there_are_only_so_many() -> None:
    maker = Maker()
    models = shaped(maker)
    for size in range(1, MAX_MODELS + 4):
        call(models, size, AT_CALL + 1)
    assert len(maker.made) == MAX_MODELS


def test_all_engines_together_take_only_so_much_memory() -> None:
    gc.collect()
    before = ROOM.used
    each = (MAX_BYTES - before) // 3
    many, makers = [], []
    for _ in range(2):
        makers.append(Maker())
        many.append(shaped(makers[-1], weight_bytes=each))
        for size in range(1, 6):
            call(many[-1], size, 2 * AT_CALL)
    assert [len(maker.made) for maker in makers] == [3, 0]
    assert ROOM.used == before + 3 * each
    del many[0]
    gc.collect()
    assert ROOM.used == before, "what engines had is free once they are gone"
    call(many[0], 7, AT_CALL)
    assert makers[1].made == [[7]]


def test_an_interrupt_while_one_is_made_costs_no_memory() -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    gc.collect()
    before = ROOM.used
    models = shaped(Maker(interrupted), weight_bytes=1000)
    call(models, 3, AT_CALL - 1)
    with pytest.raises(KeyboardInterrupt):
        call(models, 3)
    assert ROOM.used == before
    call(models, 3, AT_CALL)


def test_a_model_that_is_not_used_takes_no_memory() -> None:
    gc.collect()
    before = ROOM.used
    models = shaped(Maker(lambda: Doubling(lambda x: x + 1)), weight_bytes=1000)
    call(models, 3, 2 * AT_CALL)
    assert ROOM.used == before


def test_a_model_is_made_once_however_many_ask_for_it() -> None:
    class Slow(Doubling):
        """The one for all; holds up one call until others have made a model."""

        def run(self, place: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if place == 1:
                begun.set()
                assert go_on.wait(20)
            return super().run(place, inputs)

    begun, go_on, maker = threading.Event(), threading.Event(), Maker()
    models = shaped(maker, Slow())
    call(models, 3, AT_CALL - 1)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(models.run, 1, [torch.ones(3)])
        assert begun.wait(20)
        call(models, 3)
        go_on.set()
        late.result(20)
    assert maker.made == [[3]]


def test_others_go_on_while_one_is_made() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly() -> Any:
        begun.set()
        assert go_on.wait(20)
        return Doubling()

    maker = Maker(slowly)
    models = shaped(maker)
    call(models, 3, AT_CALL - 1)
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(call, models, 3)
        assert begun.wait(20)
        call(models, 3, 3)
        call(models, 4, 2 * AT_CALL)  # Due meanwhile; it has its turn later.
        go_on.set()
        making.result(20)
    call(models, 4)
    assert maker.made == [[3], [4]]


# -- with OpenVINO -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.inner(x))) + x.mean(0)


@pytest.mark.skipif(bool(openvino_sdk.missing_openvino()), reason=str(openvino_sdk.missing_openvino()))
def test_the_weights_of_a_model_are_counted_whether_it_holds_them_or_not(monkeypatch: Any) -> None:
    from aitune_hf.backends import openvino_engine

    ov = openvino_sdk.load_openvino()
    x = ov.op.Parameter(ov.Type.f32, ov.PartialShape([-1, 64]))
    product = ov.opset13.matmul(x, ov.op.Constant(torch.randn(64, 64).numpy()), False, False)
    counted: list[int] = []
    monkeypatch.setattr(
        openvino_engine,
        "ShapedModels",
        lambda *args: counted.append(args[2]) or ShapedModels(*args),  # type: ignore[func-returns-value]
    )
    openvino_engine.CompiledGraph(ov.Model([product], [x]), [], "f32", 1, "model")
    assert counted == [64 * 64 * 4]


@pytest.mark.skipif(bool(openvino_sdk.missing_openvino()), reason=str(openvino_sdk.missing_openvino()))
def test_engines_answer_right_at_every_size_and_follow_their_weights(tmp_path: Any, monkeypatch: Any) -> None:
    from aitune_hf import TuneConfig, stats, tune
    from aitune_hf.backends import openvino_engine

    made: list[list[list[int]]] = []
    original = openvino_engine._for_sizes

    def noted(model: Any, precision: str, requests: int, sizes: Sequence[torch.Size]) -> Any:
        made.append([list(size) for size in sizes])
        return original(model, precision, requests, sizes)

    monkeypatch.setattr(openvino_engine, "_for_sizes", noted)
    torch.manual_seed(0)
    net = Net().eval()
    config = TuneConfig(
        cache_dir=tmp_path, backends=("openvino",), strategy="first_working", progress=False, min_share=0
    )
    with torch.no_grad():
        tune(net, [torch.randn(2, 8), torch.randn(5, 8)], config)
        answers_by_engine = stats(net).engine_calls
        for batch in (2, 5, 3, 2, 5, 3, 2, 5, 3):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(net(x), Net.forward(net, x), atol=1e-5, rtol=1e-4)
        assert sorted(made) == [[[2, 8]], [[3, 8]], [[5, 8]]]
        net.inner.weight.mul_(3)
        for _ in range(2 * AT_CALL):
            x = torch.randn(3, 8)
            torch.testing.assert_close(net(x), Net.forward(net, x), atol=1e-5, rtol=1e-4)
    assert len(made) == 4, "with other weights it is made anew"
    assert stats(net).engine_calls - answers_by_engine == 9 + 2 * AT_CALL
