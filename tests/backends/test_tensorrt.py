"""TensorRT plans: real ones, built by TensorRT-RTX for GPUs that are not here, and what is refused without a driver."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aitune_hf.backends.base import AxisRange, Backend, BuildRequest, LoadRequest
from aitune_hf.backends.build_message import pack_request, unpack_request
from aitune_hf.backends.tensorrt import PLAN, TensorRTBackend, TensorRTRTXBackend
from aitune_hf.backends.tensorrt_sdk import driver_problem
from aitune_hf.backends.tensorrt_weights import PlanWeights
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

RequestFor = Callable[..., BuildRequest]
CUDA = torch.device("cuda")
BATCH = AxisRange(min=1, max=8)


class Attention(nn.Module):
    """A transformer's attention, with tables and tied weights beside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32, bias=False)
        self.register_buffer("table", torch.linspace(0, 1, 64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(part.shape[0], part.shape[1], 4, 8).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        position = self.table[: x.shape[1]].to(x.dtype)[None, :, None]
        return x + self.out(mixed) + position


class Convolutions(nn.Module):
    """What a UNet or VAE is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.group, self.batch = nn.GroupNorm(2, 8), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(self.down(self.batch(F.silu(self.group(self.first(x))))), scale_factor=2.0)


class Words(nn.Module):
    """Integers go in; the embedding is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "mlp": (_mlp, lambda batch: {"input": torch.randn(batch, 16)}),
    "attention": (Attention, lambda batch: {"x": torch.randn(batch, 7, 32)}),
    "convolutions": (Convolutions, lambda batch: {"x": torch.randn(batch, 4, 8, 8)}),
    "words": (Words, lambda batch: {"ids": torch.randint(0, 50, (batch, 5))}),
}


@pytest.fixture
def order(request_for: RequestFor, tmp_path: Path) -> Callable[..., BuildRequest]:
    """A request for one of ``MODULES``, with a batch that varies."""

    def make(
        kind: str, dtype: torch.dtype = torch.float32, folder: str = "a", seed: int = 0, **options: Any
    ) -> BuildRequest:
        torch.manual_seed(seed)
        make_module, make_call = MODULES[kind]
        module = make_module().eval().to(dtype)
        call = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in make_call(2).items()
        }
        name = next(iter(call))
        return request_for(module, [call], tmp_path / folder, {(name, 0): BATCH}, **{"target": "sm89", **options})

    return make


needs_rtx = pytest.mark.skipif(TensorRTRTXBackend().can_aim() is not None, reason=str(TensorRTRTXBackend().can_aim()))


@pytest.mark.parametrize("backend", [TensorRTBackend(), TensorRTRTXBackend()])
def test_they_are_backends(backend: Backend) -> None:
    assert isinstance(backend, Backend)
    assert backend.native
    assert backend.isolated
    assert backend.recipes(torch.device("cpu")) == []
    plain, *others = backend.recipes(CUDA)
    assert (plain.weights, plain.lossy, plain.options) == ("bound", False, {})
    assert {recipe.options.get("precision") for recipe in others if recipe.lossy} == {"float16", "bfloat16", "tf32"}
    assert not any(recipe.lossy for recipe in others if not recipe.options.get("precision"))
    assert backend.version()


@pytest.mark.skipif(driver_problem() is None, reason="there is a driver here")
def test_without_a_driver_it_says_what_is_missing() -> None:
    assert "no NVIDIA driver" in str(TensorRTRTXBackend().available()) or "pip install" in str(
        TensorRTRTXBackend().available()
    )


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise RuntimeError(f"lib{name}.so is damaged")

    monkeypatch.setattr("aitune_hf.backends.tensorrt_sdk.importlib.import_module", absent)
    for backend in (TensorRTBackend(), TensorRTRTXBackend()):
        assert "is damaged" in str(backend.available())
        assert "pip install 'aitune-hf[tensorrt" in str(backend.available())


@pytest.mark.parametrize(
    ("answers", "words"),
    [((100, 0), "does not start"), ((0, 0), "sees no GPU"), ((0, 2), "torch .* cannot use the GPU")],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_each_trouble_with_the_driver_is_told_apart(answers: tuple[int, int], words: str) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return answers[0]

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = answers[1]
            return 0

    assert re.search(words, str(driver_problem(lambda name: Driver())))


# -- real plans --------------------------------------------------------------------------------------------------------


@needs_rtx
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("mlp", torch.float32),
        ("attention", torch.float32),
        ("attention", torch.float16),
        ("attention", torch.bfloat16),
        ("convolutions", torch.float32),
        ("convolutions", torch.bfloat16),
        ("words", torch.float16),
    ],
)
def test_a_plan_is_built_for_a_gpu_that_is_not_here(
    kind: str, dtype: torch.dtype, order: Callable[..., BuildRequest]
) -> None:
    request = order(kind, dtype)
    result = TensorRTRTXBackend().build(request)
    assert result.files == [PLAN]
    assert (request.workdir / PLAN).stat().st_size > 10_000
    assert not result.envelope.is_static
    assert result.envelope.mismatch([(8, *leaf.shape[1:]) for leaf in request.example.inputs]) is None
    assert json.loads(json.dumps(result.engine)) == result.engine
    weights = PlanWeights.from_json(result.engine["weights"])
    assert not weights.copies
    assert set(weights.constants) == set(dict(request.module.state_dict())) - _integers(request.module) - {
        "embed.weight"
    }
    assert all(constant.device_type == "cuda" for constant in weights.constants.values())


def _integers(module: nn.Module) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not tensor.is_floating_point()}


@needs_rtx
def test_every_target_gets_a_plan_of_its_own(order: Callable[..., BuildRequest], tmp_path: Path) -> None:
    request = order("mlp", torch.float16)
    plans = set()
    targets = TensorRTRTXBackend().targets()
    assert {"sm75", "sm80", "sm86", "sm89", "sm120"} <= set(targets)
    for target in targets:
        (tmp_path / target).mkdir()
        aimed = dataclasses.replace(request, options={"target": target}, workdir=tmp_path / target)
        TensorRTRTXBackend().build(aimed)
        plans.add((aimed.workdir / PLAN).read_bytes())
    assert len(plans) == len(targets)


@needs_rtx
def test_a_plan_does_not_depend_on_the_weights(order: Callable[..., BuildRequest]) -> None:
    """So every fine-tune can use it, and nobody's weights travel with it."""
    first, second = order("convolutions"), order("convolutions", folder="b", seed=1)
    results = [TensorRTRTXBackend().build(request) for request in (first, second)]
    plans = [(request.workdir / PLAN).read_bytes() for request in (first, second)]
    assert plans[0] == plans[1]
    assert results[0].engine == results[1].engine


@needs_rtx
def test_it_is_built_the_same_from_what_a_child_process_gets(order: Callable[..., BuildRequest]) -> None:
    here, there = order("attention"), order("attention", folder="b")
    request = unpack_request(pack_request(there))
    results = [TensorRTRTXBackend().build(one) for one in (here, request)]
    assert (here.workdir / PLAN).read_bytes() == (there.workdir / PLAN).read_bytes()
    assert results[0].engine == results[1].engine


@needs_rtx
def test_baked_plans_hold_their_weights(order: Callable[..., BuildRequest]) -> None:
    plans = []
    for folder, seed in (("a", 0), ("b", 1)):
        request = dataclasses.replace(order("mlp", folder=folder, seed=seed), weights="baked")
        result = TensorRTRTXBackend().build(request)
        assert result.engine["weights"]["delivery"] == "plan"
        plans.append((request.workdir / PLAN).read_bytes())
    assert plans[0] != plans[1]


@needs_rtx
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "tf32"])
def test_lossy_plans_are_built_from_float32(precision: str, order: Callable[..., BuildRequest]) -> None:
    kind = "convolutions" if precision == "float16" else "attention"
    strict, lossy = order(kind), order(kind, folder="b", precision=precision)
    lossy = dataclasses.replace(lossy, weights="bound" if precision == "tf32" else "filled")
    assert TensorRTRTXBackend().supports(lossy) is None
    TensorRTRTXBackend().build(strict)
    weights = PlanWeights.from_json(TensorRTRTXBackend().build(lossy).engine["weights"])
    assert weights.copies is (precision != "tf32")
    assert (strict.workdir / PLAN).read_bytes() != (lossy.workdir / PLAN).read_bytes()


@needs_rtx
@pytest.mark.slow
def test_a_real_model(request_for: RequestFor, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=99, max_position_embeddings=64, **sizes)).eval()
    calls = [{"input_ids": torch.ones(2, n, dtype=torch.long), "attention_mask": torch.ones(2, n)} for n in (5, 17)]
    length = AxisRange(min=1, max=64)
    ranges = {(name, axis): (BATCH, length)[axis] for name in calls[0] for axis in (0, 1)}
    result = TensorRTRTXBackend().build(request_for(bert, calls, tmp_path, ranges, target="sm120"))
    assert result.envelope.mismatch([(1, 1)] * 2) is None
    assert result.envelope.mismatch([(8, 64)] * 2) is None
    assert result.envelope.mismatch([(2, 5), (2, 6)])
    assert (tmp_path / PLAN).stat().st_size > 10_000


# -- refused -----------------------------------------------------------------------------------------------------------


class Determinant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.det(x) + 1


@needs_rtx
def test_an_operator_that_it_lacks_is_named(request_for: RequestFor, tmp_path: Path) -> None:
    call = {"x": torch.eye(3)[None].repeat(2, 1, 1)}
    request = request_for(Determinant().eval(), [call], tmp_path, target="sm89")
    with pytest.raises(BuildError, match=r"^model: TensorRT-RTX does not take the operator Det \(node \w+\)"):
        TensorRTRTXBackend().build(request)


@needs_rtx
@pytest.mark.parametrize("target", ["sm90", "sm10000", "avx2"])
def test_a_target_that_it_lacks_is_named(target: str, order: Callable[..., BuildRequest]) -> None:
    with pytest.raises(BuildError, match=f"cannot build for {target}: it can for sm75, sm80, "):
        TensorRTRTXBackend().build(order("mlp", target=target))


@needs_rtx
def test_what_the_builder_says_is_passed_on(order: Callable[..., BuildRequest]) -> None:
    with pytest.raises(BuildError, match=r"for sm75: .*FP32 GEMM is not supported"):
        TensorRTRTXBackend().build(order("mlp", target="sm75"))


def test_full_tensorrt_builds_for_the_gpu_at_hand_only(order: Callable[..., BuildRequest]) -> None:
    with pytest.raises(BuildError, match="GPU at hand only"):
        TensorRTBackend().build(order("mlp"))


@pytest.mark.skipif(driver_problem() is None, reason="there is a driver here")
def test_building_for_this_machine_needs_a_driver(order: Callable[..., BuildRequest]) -> None:
    with pytest.raises(BuildError, match="cannot build this graph: "):
        TensorRTRTXBackend().build(order("mlp", target=None))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aim": "sm89"}, "no option aim; it has precision, refit, target"),
        ({"precision": "int3"}, "precision must be one of"),
        ({"refit": True, "target": "sm89"}, "cannot be built for another GPU"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str, order: Callable[..., BuildRequest]) -> None:
    with pytest.raises(ConfigError, match=words):
        TensorRTRTXBackend().build(order("mlp", **options))


def test_it_declines_what_it_cannot_serve(order: Callable[..., BuildRequest]) -> None:
    backend = TensorRTRTXBackend()
    assert backend.supports(order("mlp")) is None
    assert "it runs on cpu" in str(backend.supports(order("mlp", target=None)))
    assert "float64" in str(backend.supports(order("mlp", torch.float64)))
    assert "nothing in it is float32" in str(backend.supports(order("mlp", torch.float16, precision="tf32")))
    training = order("mlp")
    training.module.train()
    assert "training mode" in str(backend.supports(training))


@needs_rtx
def test_weights_that_cannot_be_read_in_place_are_named(order: Callable[..., BuildRequest]) -> None:
    request = order("convolutions")
    request.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(BuildError, match=r"the weight \w+\.weight is not contiguous"):
        TensorRTRTXBackend().build(request)


def _load_request(module: nn.Module, folder: Path, engine: Any, device: torch.device) -> LoadRequest:
    return LoadRequest(path="model", module=module, folder=folder, engine=engine, device=device)


@needs_rtx
@pytest.mark.skipif(driver_problem() is None, reason="there is a driver here")
def test_nothing_native_is_touched_without_a_driver(
    order: Callable[..., BuildRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = order("mlp")
    result = TensorRTRTXBackend().build(request)
    monkeypatch.setattr("aitune_hf.backends.tensorrt_engine.Sdk.load", lambda sdk: pytest.fail("the SDK was reached"))
    for device in (CUDA, torch.device("cpu")):
        with pytest.raises(EngineLoadError, match=r"^model: a TensorRT-RTX engine cannot be loaded: .*driver"):
            TensorRTRTXBackend().load(_load_request(request.module, request.workdir, result.engine, device))


def test_another_format_is_refused(order: Callable[..., BuildRequest], tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match="format is unknown: 99"):
        TensorRTRTXBackend().load(_load_request(nn.Identity(), tmp_path, {"format": 99}, CUDA))


def test_a_table_with_other_values_is_refused(order: Callable[..., BuildRequest]) -> None:
    """The values of ``table`` are part of the plan; those of weights are not."""
    if TensorRTRTXBackend().can_aim():
        pytest.skip(str(TensorRTRTXBackend().can_aim()))
    request = order("attention")
    data = dict(TensorRTRTXBackend().build(request).engine["weights"])
    for constant in data["constants"].values():
        constant["device"] = "cpu"
    weights, here = PlanWeights.from_json(data), torch.device("cpu")
    assert [table is request.module.table for table, _ in weights.tables(request.module, "model")] == [True]
    live = weights.live(request.module, "model", here)
    assert live["qkv.weight"].data_ptr() == request.module.qkv.weight.data_ptr()  # type: ignore[union-attr]
    request.module.table += 1  # type: ignore[operator]
    with pytest.raises(EngineLoadError, match="table has other values"):
        weights.tables(request.module, "model")
