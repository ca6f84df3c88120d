"""ONNX Runtime engines: equal to eager for any weights, without weights in their files, safe from several threads."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import json
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aitune_hf.backends.base import AxisRange, Backend, BuildRequest, BuildResult
from aitune_hf.backends.build_message import pack_request, unpack_request
from aitune_hf.backends.onnxruntime import OnnxRuntimeBackend
from aitune_hf.backends.probes import values_of, with_probes
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

BATCH = AxisRange(min=1, max=8)
LENGTH = AxisRange(min=1, max=16)


class Stack(nn.Module):
    """Weights that have the same values while they are new: norms, biases, a copy of a matrix; and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(3))
        self.twin = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        for layer in self.layers:
            nn.init.zeros_(layer[0].bias)
        self.twin.load_state_dict(self.layers[0][0].state_dict())
        self.tied.weight = self.layers[1][0].weight
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.gain
        return self.tied(self.twin(x) + x)


def stack_call(batch: int, seed: int = 0) -> dict[str, Any]:
    return {"x": torch.randn(batch, 8, generator=torch.Generator().manual_seed(seed))}


class Vision(nn.Module):
    """Convolutions and what follows them; some of its weights lie in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.batch_norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.first(x)))
        y = F.gelu(self.batch_norm(self.second(y)), approximate="tanh")
        y = F.avg_pool2d(F.interpolate(y, scale_factor=2.0, mode="nearest"), 2)
        return self.up(F.leaky_relu(y)).clamp(-3, 3)


def vision_call(batch: int, seed: int = 0) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))}


class Text(nn.Module):
    """Embeddings, attention with a mask, tables; inputs and outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.projection = nn.Linear(16, 48)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("positions", torch.arange(16))
        self.register_buffer("angles", torch.arange(16.0).unsqueeze(1) * torch.linspace(1, 0.01, 16), persistent=False)

    def forward(
        self, ids: torch.Tensor, keep: torch.Tensor, scale: torch.Tensor, flag: torch.Tensor, step: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        length = ids.shape[1]
        x = self.words(ids) + self.angles[:length].sin() * scale
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.projection(x).chunk(3, dim=-1))
        mask = keep[:, None, None, :] & (self.positions[:length, None] >= self.positions[None, :length])
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        logits = torch.where(flag, self.head(x), -self.head(x))
        return {"logits": logits, "best": logits.argmax(-1), "kept": keep & flag, "next": step + 1}


def text_call(batch: int, length: int = 5, seed: int = 0) -> dict[str, Any]:
    keep = torch.ones(batch, length, dtype=torch.bool)
    keep[0, length // 2 + 1 :] = False
    return {
        "ids": torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed)),
        "keep": keep,
        "scale": torch.tensor(0.5 + seed),
        "flag": torch.tensor(seed % 2 == 0),
        "step": torch.tensor(seed, dtype=torch.int32),
    }


class Passing(nn.Module):
    """Hands on what it was given and what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.arange(300))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, self.weight, self.table, torch.tensor([1.0, 2.0]), x[:0], x + 1


def passing_call(batch: int, seed: int = 0) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, generator=torch.Generator().manual_seed(seed)), "unused": torch.ones(2)}


@dataclasses.dataclass
class Built:
    """A module, the request for one of its graphs, and what was built for it."""

    module: nn.Module
    request: BuildRequest
    result: BuildResult
    call: Callable[..., dict[str, Any]]

    def load(self, module: nn.Module | None = None) -> Any:
        return OnnxRuntimeBackend().load(recorded().load_request(self.request, self.result, module or self.module))

    def run(self, engine: Any, call: dict[str, Any]) -> list[torch.Tensor]:
        leaves: list[torch.Tensor] = recorded().flatten(recorded().run(engine, self.request, call))[1]
        return leaves

    def difference(self, engine: Any, module: nn.Module, call: dict[str, Any]) -> float:
        """Largest difference between the engine and eager."""
        got, want = self.run(engine, call), recorded().eager(module, call)
        assert [(leaf.shape, leaf.dtype) for leaf in got] == [(leaf.shape, leaf.dtype) for leaf in want]
        return max(
            float((a.double() - b.detach().double()).abs().max()) if a.numel() else 0.0
            for a, b in zip(got, want, strict=True)
        )

    def content(self) -> bytes:
        return (self.request.workdir / "model.onnx").read_bytes()


def recorded() -> Any:
    return importlib.import_module("backends_recorded")  # Registered by the conftest of this folder.


def request_of(
    module: nn.Module, calls: Sequence[Any], folder: Path, ranges: Any = None, weights: Any = "filled", **options: Any
) -> BuildRequest:
    return dataclasses.replace(recorded().request_for(module, calls, folder, ranges, **options), weights=weights)


def build(module: nn.Module, call: Callable[..., Any], folder: Path, ranges: Any = None, **options: Any) -> Built:
    request = request_of(module.eval(), [call(3)], folder, ranges, **options)
    return Built(module, request, OnnxRuntimeBackend().build(request), call)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch.manual_seed(0)
    return build(Stack(), stack_call, tmp_path_factory.mktemp("stack"), {("x", 0): BATCH})


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch.manual_seed(0)
    return build(Vision(), vision_call, tmp_path_factory.mktemp("vision"), {("x", 0): BATCH})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch.manual_seed(0)
    ranges = {(name, axis): (BATCH, LENGTH)[axis] for name in ("ids", "keep") for axis in (0, 1)}
    return build(Text(), text_call, tmp_path_factory.mktemp("text"), ranges)


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch.manual_seed(0)
    return build(Passing(), passing_call, tmp_path_factory.mktemp("passing"), {("x", 0): BATCH})


# -- the backend ------------------------------------------------------------------------------------------------------


def test_it_is_a_backend() -> None:
    backend = OnnxRuntimeBackend()
    assert isinstance(backend, Backend)
    assert (backend.name, backend.native, backend.isolated) == ("onnxruntime", False, True)
    assert importlib.import_module("onnxruntime").__version__.startswith(backend.version())
    assert backend.available() is None


def test_recipes() -> None:
    first, *others = OnnxRuntimeBackend().recipes(torch.device("cpu"))
    assert (first.weights, first.lossy, first.effort, first.options["opset"]) == ("filled", False, "fast", 23)
    assert [recipe.effort for recipe in others if not recipe.lossy] == ["max"]
    assert [recipe.weights for recipe in others if recipe.lossy] == ["baked"]
    assert not OnnxRuntimeBackend().recipes(torch.device("meta"))


@pytest.mark.parametrize("library", ["onnxruntime", "onnxscript"])
def test_a_missing_library_is_named_with_the_extra(library: str, stack: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    backend = OnnxRuntimeBackend()
    assert backend.available() == f"{library} not found: pip install aitune-hf[onnx]"
    with pytest.raises(BuildError, match=f"{library} not found"):
        backend.build(stack.request)
    if library == "onnxruntime":
        assert not backend.recipes(torch.device("cpu"))
        with pytest.raises(EngineLoadError, match=r"^model: onnxruntime not found"):
            stack.load()


@pytest.mark.parametrize(
    ("options", "weights", "message"),
    [
        ({"opsett": 23}, "filled", "no option opsett"),
        ({"opset": 17}, "filled", "from 18 on"),
        ({"precision": "int4"}, "filled", "one of strict, int8"),
        ({"precision": "int8"}, "filled", "has baked weights"),
        ({}, "bound", "has filled weights"),
    ],
)
def test_options_are_checked(options: Any, weights: Any, message: str, stack: Built) -> None:
    request = dataclasses.replace(stack.request, options=options, weights=weights)
    with pytest.raises(ConfigError, match=message):
        OnnxRuntimeBackend().build(request)


def test_what_is_declined(stack: Built) -> None:
    backend = OnnxRuntimeBackend()
    assert backend.supports(stack.request) is None
    module = copy.deepcopy(stack.module).train()
    assert "training mode" in str(backend.supports(dataclasses.replace(stack.request, module=module)))


def test_inputs_on_several_devices_are_declined(text: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data stand for those of another device; what other backends ask for is left out of it."""
    monkeypatch.setattr("aitune_hf.backends.onnxruntime.unmet_requirement", lambda request: None)
    backend, example = OnnxRuntimeBackend(), text.request.example
    assert backend.supports(text.request) is None
    inputs = [*example.inputs[:-1], example.inputs[-1].to("meta")]
    request = dataclasses.replace(text.request, example=dataclasses.replace(example, inputs=inputs))
    assert backend.supports(request) == "input step is on meta, and has to be on cpu"


def test_an_operator_without_a_word_in_onnx_is_named(tmp_path: Path) -> None:
    class Eigen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvalsh(x @ x.T)

    request = request_of(Eigen().eval(), [{"x": torch.randn(3, 3)}], tmp_path)
    with pytest.raises(BuildError, match=r"^model: .*linalg_eigh"):
        OnnxRuntimeBackend().build(request)


def test_an_operator_that_the_runtime_lacks_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn_like(x)

    request = request_of(Noise().eval(), [{"x": torch.randn(3, 3)}], tmp_path)
    with pytest.raises(BuildError, match=r"^model: .*(RandomNormalLike|not the program's)"):
        OnnxRuntimeBackend().build(request)
    assert capfd.readouterr() == ("", "")


# -- equal to eager ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["stack", "vision", "text", "passing"])
def test_equal_to_eager_at_any_batch(kind: str, batch: int, request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(kind)
    engine = built.load()
    assert built.difference(engine, built.module, built.call(batch, seed=batch)) < 1e-4
    engine.close()


@pytest.mark.parametrize("length", [1, 2, 15, 16])
def test_equal_to_eager_at_any_length(text: Built, length: int) -> None:
    engine = text.load()
    assert text.result.envelope.mismatch([(2, length), (2, length), (), (), ()]) is None
    for seed in (1, 2):
        assert text.difference(engine, text.module, text.call(2, length, seed=seed)) < 1e-4


@pytest.mark.parametrize("kind", ["stack", "vision", "text", "passing"])
def test_any_weights_fill_it(kind: str, request: pytest.FixtureRequest, randomized: Any) -> None:
    """The recorded checkpoint had norms, biases and copies that no value could tell apart."""
    built: Built = request.getfixturevalue(kind)
    for seed in (1, 2):
        other = randomized(built.module, seed)
        for buffer in ("batch_norm.running_var",):
            if buffer in dict(other.named_buffers()):
                other.get_buffer(buffer).abs_().add_(0.1)
        for name in ("angles", "table", "positions"):  # Not weights: part of the structure.
            if name in dict(other.named_buffers()):
                other.get_buffer(name).copy_(built.module.get_buffer(name))
        engine = built.load(other)
        assert built.difference(engine, other, built.call(2, seed=2)) < 1e-4
        engine.close()


def test_older_operators(text: Built, tmp_path: Path) -> None:
    request = dataclasses.replace(text.request, workdir=tmp_path, options={"opset": 18})
    older = dataclasses.replace(text, request=request, result=OnnxRuntimeBackend().build(request))
    assert [item.version for item in onnx.load_from_string(older.content()).opset_import] == [18]
    engine = older.load()
    assert older.difference(engine, text.module, text.call(1, 7)) < 1e-4


def test_results_are_memory_of_their_own(passing: Built) -> None:
    """Neither the session's, nor the weights', nor the inputs'."""
    module: Any = copy.deepcopy(passing.module)
    engine = passing.load(module)
    call = passing.call(2)
    first = passing.run(engine, call)
    held = [*call.values(), *module.parameters(), *module.buffers()]
    assert not {leaf.data_ptr() for leaf in first if leaf.numel()} & {leaf.data_ptr() for leaf in held}
    before = [leaf.clone() for leaf in first]
    for leaf in passing.run(engine, call):
        leaf.fill_(9)
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))
    assert passing.difference(engine, module, call) == 0
    engine.close()
    del engine
    gc.collect()
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


def test_int8(text: Built, tmp_path: Path) -> None:
    module = copy.deepcopy(text.module)
    request = dataclasses.replace(
        text.request, workdir=tmp_path, weights="baked", options={"opset": 23, "precision": "int8"}
    )
    short = dataclasses.replace(text, request=request, result=OnnxRuntimeBackend().build(request))
    assert "MatMulInteger" in [node.op_type for node in onnx.load_from_string(short.content()).graph.node]
    engine = short.load(module)
    got, want = short.run(engine, text.call(2))[0], recorded().eager(text.module, text.call(2))[0]
    assert 0 < float((got - want).abs().max()) < 0.05 * float(want.abs().max())
    engine.rebind()


class Scaled(nn.Module):
    """Has a number that is neither a parameter nor a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.scale = torch.full((64,), scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_int8_holds_all_it_was_made_of(tmp_path: Path) -> None:
    """A plain attribute of the module too: an engine of 8 bits is good for no other."""
    torch.manual_seed(0)
    module = Scaled(2.0).eval()
    request = request_of(module, [{"x": torch.randn(4, 64)}], tmp_path, weights="baked", opset=23, precision="int8")
    short = Built(module, request, OnnxRuntimeBackend().build(request), stack_call)
    engine = short.load(copy.deepcopy(module))
    engine.close()
    for spoil in (lambda m: m.scale.mul_(1.05), lambda m: m.linear.weight.data.mul_(1.05)):
        other = copy.deepcopy(module)
        spoil(other)
        with pytest.raises(EngineLoadError, match="has other values than when the engine was built"):
            short.load(other)


# -- the artefact -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stack", "vision", "text", "passing"])
def test_the_artefact_holds_no_weights(kind: str, request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(kind)
    assert [file.name for file in built.request.workdir.iterdir()] == ["model.onnx"]
    content = built.content() + json.dumps(built.result.engine).encode()
    graph = built.request.capture()
    programs = [graph, *(with_probes(graph, seed) for seed in range(4))]
    for values in (values_of(graph.program) for graph in programs):
        for name, value in values.items():
            if isinstance(value, nn.Parameter):
                raw = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                assert len(set(raw)) <= 8 or raw[:24] not in content, name


def test_the_artefact_tells_nothing_of_this_machine(text: Built) -> None:
    content = text.content() + json.dumps(text.result.engine).encode()
    for path in (sys.prefix, Path.home(), Path.cwd(), tempfile.gettempdir() + "/", "site-packages", "Text", ".py"):
        assert str(path).encode() not in content, path


def test_built_where_the_module_is_not(text: Built, tmp_path: Path) -> None:
    """From what crosses over to a child process."""
    request = unpack_request(pack_request(dataclasses.replace(text.request, workdir=tmp_path)))
    result = OnnxRuntimeBackend().build(request)
    assert result == text.result
    assert json.loads(json.dumps(result.engine)) == result.engine
    other = dataclasses.replace(text, request=dataclasses.replace(text.request, workdir=tmp_path), result=result)
    assert other.difference(other.load(), text.module, text.call(2)) < 1e-4


def test_building_again_gives_the_same(stack: Built, tmp_path: Path) -> None:
    result = OnnxRuntimeBackend().build(dataclasses.replace(stack.request, workdir=tmp_path))
    assert (tmp_path / "model.onnx").read_bytes() == stack.content()
    assert result == stack.result


def _spoilt(stack: Built, tmp_path: Path, spoil: Callable[[Any], object]) -> Built:
    model = onnx.load_from_string(stack.content())
    spoil(model)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    return dataclasses.replace(stack, request=dataclasses.replace(stack.request, workdir=tmp_path))


def _other_file(model: Any) -> None:
    model.graph.initializer[-1].external_data[0].value = "/etc/passwd"


def _file_in_a_node(model: Any) -> None:
    tensor = onnx.TensorProto(name="inner", data_type=1, dims=[8], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights")
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["unseen"], value=tensor))


def _foreign_operator(model: Any) -> None:
    model.opset_import.add(domain="com.microsoft", version=1)


def _missing_weight(model: Any) -> None:
    del model.graph.initializer[-1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_other_file, "different weights"),
        (_file_in_a_node, "from files"),
        (_foreign_operator, "ONNX itself does not define"),
        (_missing_weight, "different weights"),
    ],
)
def test_a_graph_that_reaches_out_is_refused(
    spoil: Callable[[Any], object], message: str, stack: Built, tmp_path: Path
) -> None:
    with pytest.raises(EngineLoadError, match=f"^model: .*{message}"):
        _spoilt(stack, tmp_path, spoil).load()


def test_bytes_that_are_no_graph(stack: Built, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08 nothing of the kind")
    with pytest.raises(EngineLoadError, match=r"^model: "):
        dataclasses.replace(stack, request=dataclasses.replace(stack.request, workdir=tmp_path)).load()


# -- weights ----------------------------------------------------------------------------------------------------------


def test_edits_in_place_are_taken_up(vision: Built) -> None:
    module = copy.deepcopy(vision.module)
    engine = vision.load(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5).add_(0.1)
    assert vision.difference(engine, module, vision.call(2)) < 1e-4  # Seen by the call itself.
    weight = next(module.parameters())
    with torch.no_grad():
        weight[0].mul_(3.0)  # A part of one weight is seen by rebind.
    engine.rebind()
    assert vision.difference(engine, module, vision.call(2)) < 1e-4


def test_an_adapter_fused_and_unfused(stack: Built) -> None:
    module: Any = copy.deepcopy(stack.module)
    engine = stack.load(module)
    call, update = stack.call(3), torch.randn(8, 2) @ torch.randn(2, 8)
    before = stack.run(engine, call)[0]
    for change in (update, -update):
        with torch.no_grad():
            module.layers[1][0].weight += change
        engine.rebind()
        assert stack.difference(engine, module, call) < 1e-4
    torch.testing.assert_close(stack.run(engine, call)[0], before, rtol=1e-4, atol=1e-4)


def test_new_storage_is_taken_up_by_rebind(text: Built, randomized: Any) -> None:
    module = copy.deepcopy(text.module)
    engine = text.load(module)
    state = randomized(module, 3).state_dict()
    state["positions"] = module.get_buffer("positions")
    module.load_state_dict(state, assign=True)
    module.head.weight = module.words.weight  # type: ignore[union-attr]
    engine.rebind()
    assert text.difference(engine, module, text.call(2)) < 1e-4


def test_rebind_fills_only_what_has_changed(stack: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = copy.deepcopy(stack.module)
    module.elsewhere = nn.Linear(2, 2)
    engine = stack.load(module)
    opened: list[Any] = []
    actual = importlib.import_module("aitune_hf.backends.onnxruntime_engine").Session
    monkeypatch.setattr(
        "aitune_hf.backends.onnxruntime_engine.Session", lambda *args: opened.append(args) or actual(*args)
    )
    engine.rebind()
    module.elsewhere.weight.data.zero_()
    engine.rebind()
    assert not opened
    with torch.no_grad():
        module.twin.bias.add_(1)
    engine.rebind()
    engine.rebind()
    assert len(opened) == 1


def test_to_another_type_and_back(stack: Built) -> None:
    module = copy.deepcopy(stack.module)
    engine = stack.load(module)
    with pytest.raises(EngineLoadError, match=r"^model: the engine's constant .*dtype is"):
        module.to(torch.bfloat16) and engine.rebind()
    module.to(torch.float32)
    engine.rebind()
    assert stack.difference(engine, module, stack.call(2)) < 1e-4
    assert stack.difference(engine, stack.module, stack.call(2)) > 1e-4  # Rounded on the way.


def test_another_table_is_refused(text: Built) -> None:
    """Positions and angles are part of the graph: folded there, and right for these values only."""
    for name in ("positions", "angles"):
        module = copy.deepcopy(text.module)
        module.get_buffer(name).add_(1)
        with pytest.raises(EngineLoadError, match=f"^model: {name} has other values"):
            text.load(module)


def test_weights_that_were_tied_must_stay_tied(stack: Built) -> None:
    module: Any = copy.deepcopy(stack.module)
    module.tied.weight = nn.Parameter(module.tied.weight.detach().clone())
    with pytest.raises(EngineLoadError, match="was tied to"):
        stack.load(module)


def test_an_unfit_module_is_refused_before_native_code(stack: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = copy.deepcopy(stack.module)
    module.twin.weight = nn.Parameter(torch.randn(8, 4))
    monkeypatch.setattr(
        "aitune_hf.backends.onnxruntime_engine.Session", lambda *args: pytest.fail("native code was reached")
    )
    with pytest.raises(EngineLoadError, match=r"^model: the engine's constant 'twin\.weight' .*shape is"):
        stack.load(module)


def test_weights_and_module_are_freed(stack: Built) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    module: Any = copy.deepcopy(stack.module)
    engine = stack.load(module)
    old = StorageWeakRef(module.twin.bias.untyped_storage())
    module.twin.bias.data = torch.randn(8)
    engine.rebind()
    assert old.expired()
    weights = [StorageWeakRef(tensor.untyped_storage()) for tensor in module.parameters()]
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    with pytest.raises(EngineLoadError, match="no longer exists"):
        engine.rebind()
    engine.close()
    assert all(weight.expired() for weight in weights)


# -- life and threads -------------------------------------------------------------------------------------------------


def test_close(stack: Built, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())
    engine = stack.load()
    stack.run(engine, stack.call(2))
    engine.close()
    engine.close()
    with pytest.raises(EngineLoadError, match="closed"):
        stack.run(engine, stack.call(2))
    with pytest.raises(EngineLoadError, match="closed"):
        engine.rebind()
    assert not {path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if "onnx" in path.name.lower()}
    assert capfd.readouterr() == ("", "")


def test_many_threads(stack: Built) -> None:
    engine = stack.load()
    calls = [stack.call(1 + i, seed=i) for i in range(8)]
    expected = [recorded().eager(stack.module, call)[0] for call in calls]

    def work(i: int) -> bool:
        return all(torch.allclose(stack.run(engine, calls[i])[0], expected[i], atol=1e-5) for _ in range(400))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    engine.close()


def test_rebind_amid_calls(stack: Built, randomized: Any) -> None:
    """Each answer is that of one set of weights or the other, never of a mixture."""
    module = copy.deepcopy(stack.module)
    states = [randomized(module, seed).state_dict() for seed in (5, 6)]
    call, expected = stack.call(2), []
    engine = stack.load(module)
    for state in states:
        module.load_state_dict(state)
        engine.rebind()
        expected.append(stack.run(engine, call)[0])
    stop, wrong = threading.Event(), []

    def caller() -> None:
        while not stop.is_set():
            got = stack.run(engine, call)[0]
            error = min(float((got - want).abs().max()) for want in expected)
            if error > 1e-4:
                wrong.append(error)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(40):
        # Not in place: calls look at the tensors that the engine holds, and would take up what is half written.
        module.load_state_dict({name: value.clone() for name, value in states[turn % 2].items()}, assign=True)
        module.tied.weight = module.layers[1][0].weight
        engine.rebind()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert stack.difference(engine, module, call) < 1e-4
