"""OpenVINO engines: equal to eager, filled from live weights, free of them on disk, refused where they do not fit."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from aitune_hf.backends import openvino_sdk
from aitune_hf.backends.base import AxisRange, Backend, BuildRequest, BuildResult, LoadRequest
from aitune_hf.backends.isolation import IsolatedBuilder
from aitune_hf.backends.openvino import OpenVINOBackend
from aitune_hf.backends.openvino_engine import OpenVINOEngine
from aitune_hf.backends.registry import get_backend
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError
from aitune_hf.graph.structure import flatten, unflattener

if openvino_sdk.missing_openvino():
    pytest.skip(str(openvino_sdk.missing_openvino()), allow_module_level=True)

Randomized = Callable[[nn.Module, int], nn.Module]
BATCH = AxisRange(min=1, max=8)


@dataclasses.dataclass
class Built:
    """A module, the request for its graph, and what was built."""

    module: Any
    request: BuildRequest
    result: BuildResult

    def load(self, module: nn.Module | None = None, threads: int = 1) -> OpenVINOEngine:
        return OpenVINOBackend().load(
            LoadRequest(
                path="model",
                module=module or self.module,
                folder=self.request.workdir,
                engine=json.loads(json.dumps(dict(self.result.engine))),
                device=torch.device("cpu"),
                threads=threads,
            )
        )

    def run(self, engine: OpenVINOEngine, call: dict[str, Any]) -> list[torch.Tensor]:
        leaves = flatten(self.request.graph.forward_signature.bind((), call))[1]
        outputs = list(engine([leaf.contiguous() for leaf in leaves]))
        unflattener(self.request.graph.output_spec.node)(outputs)
        return outputs

    def difference(self, engine: OpenVINOEngine, module: nn.Module, call: dict[str, Any]) -> float:
        """Largest difference from eager; shapes and types must be the same."""
        got, want = self.run(engine, call), eager(module, call)
        assert [(leaf.shape, leaf.dtype) for leaf in got] == [(leaf.shape, leaf.dtype) for leaf in want]
        return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True) if a.numel())


def eager(module: nn.Module, call: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        leaves: list[torch.Tensor] = flatten(module(**call))[1]
    return [leaf.detach() for leaf in leaves]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    import importlib

    recorded = importlib.import_module("backends_recorded")  # Registered by the conftest of this folder.

    def made(
        module: nn.Module, calls: Sequence[dict[str, Any]], ranges: Any = None, changes: Any = None, **options: Any
    ) -> Built:
        request = recorded.request_for(module, calls, tmp_path_factory.mktemp("model"), ranges, **options)
        request = dataclasses.replace(request, **(changes or {}))
        return Built(module, request, OpenVINOBackend().build(request))

    return made


class Blocks(nn.Module):
    """Norms, biases and duplicated weights that are equal, tied ones, convolutions, attention, embeddings, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.first, self.second, self.tied = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.second.load_state_dict(self.first.state_dict())
        self.tied.weight = self.first.weight
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.conv, self.depthwise = nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.group, self.batch = nn.GroupNorm(4, 16), nn.BatchNorm1d(16)
        self.register_buffer("table", torch.linspace(0, 1, 16 * 32).reshape(32, 16), persistent=False)
        self.register_buffer("order", torch.arange(15, -1, -1))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.embed(ids) + x + self.table[: x.shape[1]]
        y = self.tied(self.second(self.norms[1](self.first(self.norms[0](y)))))
        query = self.attention(y, y, y, need_weights=False)[0]
        z = self.depthwise(self.batch(self.group(self.conv(query.mT)))).mT
        return self.norms[2](z)[..., self.order], ids + 1


def blocks_call(batch: int, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, 11, (batch, 7), generator=draw), "x": torch.randn(batch, 7, 16, generator=draw)}


def checkpoint(seed: int) -> Blocks:
    """Another set of weights, in which nothing equals anything; variances are positive, tables as they are."""
    module = Blocks().eval()
    draw = torch.Generator().manual_seed(seed)
    saved = [*module.parameters(), *(b for n, b in module.named_buffers() if b.is_floating_point() and n != "table")]
    with torch.no_grad():
        for tensor in saved:
            tensor.copy_(torch.rand(tensor.shape, generator=draw) + 0.1 if tensor.dim() < 2 else tensor * 3)
    return module


@pytest.fixture(scope="module")
def blocks(build: Callable[..., Built]) -> Built:
    torch.manual_seed(0)
    return build(Blocks().eval(), [blocks_call(2), blocks_call(1)], {("ids", 0): BATCH, ("x", 0): BATCH})


def test_it_is_a_backend() -> None:
    openvino = openvino_sdk.load_openvino()
    backend = OpenVINOBackend()
    assert isinstance(backend, Backend)
    assert (backend.name, backend.native, backend.isolated) == ("openvino", False, True)
    assert openvino.__version__.startswith(backend.version())
    assert backend.available() is None
    assert isinstance(get_backend("openvino"), OpenVINOBackend)


# -- equal to eager ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_one_artefact_serves_all_weights(blocks: Built, batch: int) -> None:
    """Those it was built beside, where norms, biases and copies are equal, and those where nothing is."""
    for module in (blocks.module, checkpoint(1)):
        engine = blocks.load(module)
        assert blocks.difference(engine, module, blocks_call(batch, batch)) < 1e-5
        engine.close()


def test_the_envelope(blocks: Built) -> None:
    assert blocks.result.envelope.mismatch([(1, 7), (1, 7, 16)]) is None
    assert blocks.result.envelope.mismatch([(9, 7), (9, 7, 16)])
    assert blocks.result.envelope.mismatch([(2, 6), (2, 6, 16)])


class Leaves(nn.Module):
    """Outputs that are inputs, constants, views of each other; numbers, flags, empty tensors, an unused input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.short = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(
        self, x: torch.Tensor, n: torch.Tensor, flag: torch.Tensor, none: torch.Tensor, unused: torch.Tensor
    ) -> dict[str, Any]:
        half = x.half() * 2
        return {
            "same": x,
            "flag": ~flag,
            "view": x.reshape(-1),
            "weight": self.weight,
            "number": n * 2,
            "relu": functional.relu(x, inplace=False) * self.weight,
            "none": none * 2,
            "constant": torch.tensor([1.5, 2.5]),
            "sum": x.sum(),
            "half": half,
            "short": x.bfloat16() * self.short,
            "given": flag,
            "list": [x, 5, n],
        }


def leaves_call(seed: int = 0) -> dict[str, Any]:
    return {
        "x": torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)),
        "n": torch.tensor(7 + seed),
        "flag": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "unused": torch.zeros(2, dtype=torch.uint8),
    }


def test_all_sorts_of_leaves(build: Callable[..., Built]) -> None:
    built = build(Leaves().eval(), [leaves_call()])
    engine = built.load()
    first = built.run(engine, leaves_call(1))
    kept = [leaf.clone() for leaf in first]
    assert built.difference(engine, built.module, leaves_call(2)) < 1e-2  # bfloat16
    for leaf, copied in zip(first, kept, strict=True):
        assert torch.equal(leaf, copied)  # Later calls write elsewhere.
        leaf.zero_()
    assert built.difference(engine, built.module, leaves_call(1)) < 1e-2


def test_inputs_are_read_where_they_are_and_not_written_to(build: Callable[..., Built]) -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(x) + 1

    built = build(Plain().eval(), [{"x": torch.randn(3, 5)}])
    engine = built.load()
    for offset in range(4):
        x = torch.randn(15 + offset)[offset:].reshape(3, 5)  # Aligned to no more than an element.
        kept = x.clone()
        (y,) = engine([x])
        assert torch.equal(x, kept)
        assert torch.equal(y, functional.relu(kept) + 1)
        assert y.data_ptr() != x.data_ptr()
    with torch.inference_mode():
        (y,) = engine([torch.ones(3, 5, requires_grad=True)])
    assert float(y.sum()) == 30


def test_an_output_may_be_given_twice_or_handed_through(build: Callable[..., Built]) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = functional.relu(x * 2)
            return h, h, x, h + 1, h, x

    built = build(Twice().eval(), [{"x": torch.randn(2, 3)}])
    engine, call = built.load(), {"x": torch.randn(2, 3)}
    assert built.difference(engine, built.module, call) == 0
    first, second, *_ = built.run(engine, call)
    first.zero_()
    assert second.any()


def test_integers_that_would_be_cut_off_are_refused(blocks: Built) -> None:
    engine, call = blocks.load(), blocks_call(1)
    for number in (1 << 31, -(1 << 31) - 1):
        ids = call["ids"].clone()
        ids[0, 3] = number
        with pytest.raises(ValueError, match="computes right with those from"):
            blocks.run(engine, {**call, "ids": ids})
    assert blocks.difference(engine, blocks.module, call) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(build: Callable[..., Built], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype).eval()
    built = build(module, [{"input": torch.randn(3, 8, dtype=dtype)}])
    engine = built.load()
    for seed in range(3):
        call = {"input": torch.randn(3, 8, dtype=dtype, generator=torch.Generator().manual_seed(seed))}
        assert built.difference(engine, module, call) < (0.01 if dtype is torch.float16 else 0.06)


@pytest.mark.slow
def test_real_models(build: Callable[..., Built], randomized: Randomized) -> None:
    diffusers, transformers = pytest.importorskip("diffusers"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()

    def noisy(batch: int) -> dict[str, Any]:
        states = torch.randn(batch, 5, 8)
        return {"sample": torch.randn(batch, 4, 8, 8), "timestep": torch.tensor(3), "encoder_hidden_states": states}

    ranges: dict[Any, Any] = {("sample", 0): BATCH, ("encoder_hidden_states", 0): BATCH}
    built = build(unet, [noisy(2)], ranges)
    other = randomized(unet, 1)
    engine = built.load(other)
    assert max(built.difference(engine, other, noisy(batch)) for batch in (1, 2, 8)) < 1e-4

    clip = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=9,
        )
    ).eval()  # fmt: skip
    built = build(clip, [{"input_ids": torch.randint(0, 98, (2, 9))}], {("input_ids", 0): BATCH})
    other = randomized(clip, 1)
    engine = built.load(other)
    for batch in (1, 2, 8):
        assert built.difference(engine, other, {"input_ids": torch.randint(0, 98, (batch, 9))}) < 1e-4


# -- weights -----------------------------------------------------------------------------------------------------------


def test_edits_in_place_are_seen(blocks: Built) -> None:
    """A LoRA fused and unfused again, also in the way that leaves no trace in the tensor's version."""
    module = copy.deepcopy(blocks.module)
    engine, call, delta = blocks.load(module), blocks_call(2), torch.randn(16, 16)
    before = module.second.weight._version
    module.second.weight.data += delta
    assert module.second.weight._version == before
    assert blocks.difference(engine, module, call) < 1e-5
    with torch.no_grad():
        module.second.weight -= delta
    assert blocks.difference(engine, module, call) < 1e-5


def test_edits_of_a_part_are_taken_up_by_rebind(blocks: Built) -> None:
    module, call = copy.deepcopy(blocks.module), blocks_call(2)
    engine = blocks.load(module)
    module.second.weight.data[3:9, 7] += 1
    assert blocks.difference(engine, module, call) > 1e-3
    engine.rebind()
    assert blocks.difference(engine, module, call) < 1e-5


def test_new_storage_is_taken_up_by_rebind(blocks: Built) -> None:
    module, call = copy.deepcopy(blocks.module), blocks_call(2)
    engine = blocks.load(module)
    module.load_state_dict(checkpoint(3).state_dict())
    module.conv.weight = nn.Parameter(torch.randn(16, 16, 3))
    engine.rebind()
    assert blocks.difference(engine, module, call) < 1e-5


def test_a_round_trip_through_another_type(blocks: Built) -> None:
    module, call = copy.deepcopy(blocks.module), blocks_call(2)
    engine = blocks.load(module)
    module.bfloat16()
    with pytest.raises(EngineLoadError, match="dtype is bfloat16"):
        engine.rebind()
    module.float()
    module.table.copy_(blocks.module.table)
    engine.rebind()
    assert blocks.difference(engine, module, call) < 1e-5


def test_what_did_not_change_is_not_compiled_again(blocks: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    module = copy.deepcopy(blocks.module)
    engine = blocks.load(module)
    with torch.no_grad():
        module.first.weight.mul_(1)
        module.batch.num_batches_tracked.add_(1)  # Not used in a graph for inference.
    module.eval().float().to("cpu")
    monkeypatch.setattr("aitune_hf.backends.openvino_engine.CompiledGraph", lambda *a: pytest.fail("compiled"))
    engine.rebind()
    assert blocks.difference(engine, module, blocks_call(2)) < 1e-5


def test_weights_that_cannot_be_compiled_stop_the_engine(blocks: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = copy.deepcopy(blocks.module), blocks_call(2)
    engine = blocks.load(module)
    module.load_state_dict(checkpoint(3).state_dict())

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("aitune_hf.backends.openvino_engine.CompiledGraph", fails)
        with pytest.raises(EngineLoadError, match="OpenVINO cannot compile the model: out of memory"):
            engine.rebind()
        with pytest.raises(EngineLoadError, match="out of memory"):
            blocks.run(engine, call)
    assert blocks.difference(engine, module, call) < 1e-5


def test_a_table_with_other_values_is_refused(blocks: Built) -> None:
    module = copy.deepcopy(blocks.module)
    engine = blocks.load(module)
    module.order.copy_(torch.arange(16))
    with pytest.raises(EngineLoadError, match=r"^model: order has other values"):
        engine.rebind()
    with pytest.raises(EngineLoadError, match=r"^model: order has other values"):
        blocks.load(module)
    with pytest.raises(EngineLoadError, match=r"^model: order has other values"):
        blocks.run(engine, blocks_call(2))


@pytest.mark.parametrize(
    ("spoil", "difference"),
    [
        (lambda m: setattr(m.first, "bias", nn.Parameter(torch.zeros(3))), r"first\.bias.*shape is"),
        (lambda m: m.half(), "dtype is"),
        (lambda m: m.to("meta"), "meta device"),
        (lambda m: delattr(m, "conv"), r"conv\..*is not there"),
        (lambda m: setattr(m.tied, "weight", nn.Parameter(torch.zeros(16, 16))), "was tied to"),
    ],
)
def test_weights_that_do_not_fit_are_refused(blocks: Built, spoil: Callable[[Any], object], difference: str) -> None:
    module = copy.deepcopy(blocks.module)
    engine = blocks.load(module)
    spoil(module)
    with pytest.raises(EngineLoadError, match=difference):
        engine.rebind()
    with pytest.raises(EngineLoadError, match=difference):
        blocks.load(module)


def test_weights_that_are_folded_together_are_no_engine(build: Callable[..., Built], monkeypatch: Any) -> None:
    """A converter that folds is not what OpenVINO's is now; so one is made, around the real one."""
    from aitune_hf.backends import openvino as backend

    def folding(graph: Any, where: str) -> Any:
        from openvino import op

        model = convert(graph, where)
        node = next(n for n in model.get_ordered_ops() if n.get_type_name() == "Constant" and n.data.shape == (4, 8))
        folded = op.Constant(node.data * 2)
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(folded.output(0))
        return model

    convert = backend.convert
    monkeypatch.setattr(backend, "convert", folding)
    with pytest.raises(BuildError, match=r"folds weights together: its constant 'c\d+' \(float32\[4, 8\]\)"):
        build(nn.Linear(8, 4).eval(), [{"input": torch.randn(3, 8)}])


def test_a_wrong_model_is_no_engine(build: Callable[..., Built], monkeypatch: Any) -> None:
    from aitune_hf.backends import openvino as backend

    def wrong(graph: Any, where: str) -> Any:
        from openvino import opset13 as ops

        model = convert(graph, where)
        result = model.get_results()[0]
        result.input(0).replace_source_output(ops.negative(result.input_value(0)).output(0))
        return model

    convert = backend.convert
    monkeypatch.setattr(backend, "convert", wrong)
    with pytest.raises(BuildError, match=r"OpenVINO made a wrong model: output .* differs by"):
        build(nn.Linear(8, 4).eval(), [{"input": torch.randn(3, 8)}])


def test_memory_is_let_go(blocks: Built) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    module = copy.deepcopy(blocks.module)
    engine = blocks.load(module)
    x = torch.randn(2, 7, 16)
    engine([torch.zeros(2, 7, dtype=torch.long), x])
    used = StorageWeakRef(x.untyped_storage())
    old = StorageWeakRef(module.conv.weight.untyped_storage())
    module.conv.weight = nn.Parameter(torch.randn(16, 16, 3))
    engine.rebind()
    del x
    assert used.expired()
    assert old.expired()
    gone = weakref.ref(module)
    weights = [StorageWeakRef(tensor.untyped_storage()) for tensor in module.parameters()]
    del module
    gc.collect()
    assert gone() is None
    with pytest.raises(EngineLoadError, match="no longer exists"):
        engine.rebind()
    del engine
    gc.collect()
    assert all(weight.expired() for weight in weights)


def test_memory_that_was_freed_is_not_read(blocks: Built) -> None:
    """What is bound stays until it is let go of, whatever becomes of the module's tensors."""
    module = copy.deepcopy(blocks.module)
    engine = blocks.load(module)
    expected = eager(module, blocks_call(2))[0]
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 7)
    filler = [torch.full((16, 16), 9.0) for _ in range(200)]
    assert torch.allclose(blocks.run(engine, blocks_call(2))[0], expected, atol=1e-5)
    assert len(filler) == 200


# -- lossy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"compress": "int8"}, {"quantize": "int8"}])
def test_int8_is_baked(build: Callable[..., Built], options: dict[str, str], randomized: Randomized) -> None:
    if openvino_sdk.missing_nncf():
        pytest.skip("no NNCF")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    calls = [{"input": torch.randn(4, 64)}]
    example = build(module, calls).request.example
    built = build(module, calls, None, {"weights": "baked", "samples": [example]}, **options)
    engine = built.load()
    assert 0 < built.difference(engine, module, calls[0]) < 0.1
    engine.rebind()
    with pytest.raises(EngineLoadError, match="has other values than when the engine was built"):
        built.load(randomized(module, 1))
    assert (built.request.workdir / "model.bin").stat().st_size < 3 * 64 * 64
    with pytest.raises(ConfigError, match='weights="baked"'):
        build(module, calls, None, None, **options)


def test_int8_without_nncf(blocks: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitune_hf.backends.openvino_sdk.importlib.util.find_spec", lambda name: None)
    request = dataclasses.replace(blocks.request, options={"compress": "int8"}, weights="baked")
    assert "pip install nncf" in str(OpenVINOBackend().supports(request))
    assert "pip install openvino" in str(OpenVINOBackend().available())


def test_bfloat16_is_computed_where_the_cpu_has_it(
    build: Callable[..., Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = [recipe.options for recipe in OpenVINOBackend().recipes(torch.device("cpu")) if recipe.lossy]
    assert ({"precision": "bf16"} in offered) == openvino_sdk.runs_bf16()
    torch.manual_seed(0)
    module, call = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval(), {"input": torch.randn(4, 64)}
    if openvino_sdk.runs_bf16():
        built = build(module, [call], precision="bf16")
        assert 1e-5 < built.difference(built.load(), module, call) < 0.1
    monkeypatch.setattr("aitune_hf.backends.openvino.runs_bf16", lambda: False)
    with pytest.raises(BuildError, match="does not compute in bfloat16"):
        build(module, [call], precision="bf16")


def test_recipes() -> None:
    backend = OpenVINOBackend()
    first, *others = backend.recipes(torch.device("cpu"))
    assert (first.weights, first.lossy, first.effort) == ("filled", False, "fast")
    assert all(recipe.lossy for recipe in others)
    assert backend.recipes(torch.device("cuda")) == []


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_many_threads(blocks: Built, threads: int) -> None:
    engine = blocks.load(threads=threads)
    calls = [blocks_call(1 + i % 3, seed=i) for i in range(8)]
    expected = [eager(blocks.module, call)[0] for call in calls]

    def wrong(i: int) -> int:
        answers = (blocks.run(engine, calls[i])[0] for _ in range(400))
        return sum(not torch.allclose(answer, expected[i], atol=1e-5) for answer in answers)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(wrong, range(8))) == 0
    engine.close()


def test_rebind_amid_calls(blocks: Built) -> None:
    """Each answer is that of one set of weights or the other, never of a mixture."""
    module, call = copy.deepcopy(blocks.module), blocks_call(2)
    states = [checkpoint(seed).state_dict() for seed in (5, 6)]
    engine = blocks.load(module, threads=2)
    expected = []
    for state in states:
        module.load_state_dict(state)
        expected.append(eager(module, call)[0])
    stop, wrong = threading.Event(), []
    engine.rebind()

    def caller() -> None:
        while not stop.is_set():
            got = blocks.run(engine, call)[0]
            error = min(float((got - want).abs().max()) for want in expected)
            if error > 1e-4:
                wrong.append(error)

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for turn in range(10):
        # Copies: what was bound before is freed while calls go on.
        module.load_state_dict({k: v.clone() for k, v in states[turn % 2].items()}, assign=True)
        module.tied.weight = module.first.weight
        module.table = blocks.module.table
        engine.rebind()
    stop.set()
    for thread in callers:
        thread.join()
    assert not wrong
    assert blocks.difference(engine, module, call) < 1e-5


def test_close(blocks: Built) -> None:
    engine = blocks.load()
    engine.close()
    engine.close()
    with pytest.raises(EngineLoadError, match="closed"):
        blocks.run(engine, blocks_call(2))
    with pytest.raises(EngineLoadError, match="closed"):
        engine.rebind()


# -- the artefact ------------------------------------------------------------------------------------------------------


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if buffer.numel() > 16)


def test_the_artefact_holds_no_weights(blocks: Built, build: Callable[..., Built]) -> None:
    """Neither the user's nor those it was built with."""
    from aitune_hf.backends.probes import values_of, with_probes

    module = checkpoint(2)
    built = build(module, [blocks_call(2)])
    folder = built.request.workdir
    assert sorted(path.name for path in folder.iterdir()) == ["model.bin", "model.xml"] == sorted(built.result.files)
    content = b"".join(path.read_bytes() for path in folder.iterdir()) + json.dumps(dict(built.result.engine)).encode()
    weights = [*tensors_of(module)]
    weights += [
        item for seed in (1, 2) for item in values_of(with_probes(built.request.capture(), seed).program).items()
    ]
    for name, tensor in weights:
        if tensor.is_floating_point():
            assert tensor.detach().numpy().tobytes() not in content, name
    assert (folder / "model.bin").stat().st_size < 1000
    for path in (sys.prefix, Path.home(), Path.cwd(), "site-packages"):
        assert str(path).encode() not in content


def test_building_again_gives_the_same(blocks: Built, tmp_path: Path) -> None:
    state, environ = torch.get_rng_state(), dict(os.environ)
    request = dataclasses.replace(blocks.request, workdir=tmp_path)
    assert OpenVINOBackend().build(request) == blocks.result
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(os.environ) == environ
    for file in blocks.result.files:
        assert (tmp_path / file).read_bytes() == (blocks.request.workdir / file).read_bytes()


def test_a_build_in_a_child_process(blocks: Built, tmp_path: Path) -> None:
    request = dataclasses.replace(blocks.request, workdir=tmp_path)
    with IsolatedBuilder(120) as builder:
        result = builder.build(OpenVINOBackend(), request)
    assert result == blocks.result
    built = dataclasses.replace(blocks, request=request, result=result)
    module = checkpoint(4)
    assert built.difference(built.load(module), module, blocks_call(3)) < 1e-5


LOAD_AND_RUN = """
import json, sys
import torch
from pathlib import Path
from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.openvino import OpenVINOBackend
module = torch.nn.Linear(8, 4).eval()
request = LoadRequest(path="m", module=module, folder=Path(sys.argv[1]), engine=json.loads(sys.argv[2]),
                      device=torch.device("cpu"))
engine = OpenVINOBackend().load(request)
x = torch.randn(3, 8)
with torch.no_grad():
    error = float((engine([x])[0] - module(x)).abs().max())
slow = [name for name in ("torch.export._trace", "torch._inductor.codecache", "torch._dynamo", "sympy") if name in sys.modules]
print(json.dumps({"error": error, "slow": slow, "telemetry": "openvino_telemetry" in sys.modules}))
"""


def test_a_fresh_process_without_a_compiler(build: Callable[..., Built], tmp_path: Path) -> None:
    """It prints nothing, reports to nobody and leaves no file."""
    built = build(nn.Linear(8, 4).eval(), [{"input": torch.randn(3, 8)}])
    folder = tmp_path / "empty"
    folder.mkdir()
    env = {"PATH": "/nonexistent", "TMPDIR": str(folder), "HOME": str(folder)}
    arguments = [str(built.request.workdir), json.dumps(dict(built.result.engine))]
    run = subprocess.run(
        [sys.executable, "-c", LOAD_AND_RUN, *arguments],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    answer = json.loads(run.stdout)
    assert answer["error"] < 1e-5
    assert not answer["slow"]
    assert not answer["telemetry"]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("damage", ["xml", "bin", "format", "slots", "shape", "precision", "integers"])
def test_damaged_files_are_refused(blocks: Built, tmp_path: Path, damage: str) -> None:
    for file in blocks.result.files:
        (tmp_path / file).write_bytes((blocks.request.workdir / file).read_bytes())
    engine = dict(blocks.result.engine)
    if damage == "xml":
        (tmp_path / "model.xml").write_bytes((tmp_path / "model.xml").read_bytes()[:5000])
    elif damage == "bin":
        (tmp_path / "model.bin").write_bytes(b"")
    elif damage == "shape":
        slots = {name: {**slot, "shape": [slot["shape"][0] * 4096]} for name, slot in engine["slots"].items()}
        engine["slots"] = slots
    else:
        engine[damage] = 99
    built = Built(
        blocks.module,
        dataclasses.replace(blocks.request, workdir=tmp_path),
        dataclasses.replace(blocks.result, engine=engine),
    )
    with pytest.raises(EngineLoadError, match=r"^model: "):
        built.load()


# -- declined ----------------------------------------------------------------------------------------------------------


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)


def test_an_operator_that_openvino_does_not_have(build: Callable[..., Built]) -> None:
    with pytest.raises(
        BuildError, match=r"^model: OpenVINO cannot convert this graph: it has no aten\.special_bessel_j0"
    ):
        build(Unknown().eval(), [{"x": torch.randn(3)}])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.train(), "training mode"),
        (lambda m: m.first.to("meta"), "meta device"),
        (lambda m: m.first.register_buffer("phase", torch.ones(2, dtype=torch.complex64)), "complex64"),
        (lambda m: m.first.double(), "float64, which OpenVINO does not compute with"),
    ],
)
def test_what_is_declined(blocks: Built, change: Callable[[Any], object], reason: str) -> None:
    request = dataclasses.replace(blocks.request, module=copy.deepcopy(blocks.module))
    assert OpenVINOBackend().supports(request) is None
    change(request.module)
    assert reason in str(OpenVINOBackend().supports(request))


def test_options_are_checked(blocks: Built) -> None:
    for options, message in (({"precison": "f32"}, "no option precison"), ({"precision": "f8"}, "is one of f32, bf16")):
        with pytest.raises(ConfigError, match=message):
            OpenVINOBackend().build(dataclasses.replace(blocks.request, options=options))
