"""What surrounds TensorRT, without TensorRT's runtime: the graphs that plans are made from, run by ONNX Runtime.

The graphs are the real ones. Where an engine is put to work, a stand-in for the runtime runs its graph on the very
addresses that the engine hands out, so that what is bound, fed and given back is seen; streams and kernels are not.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aitune_hf.backends import tensorrt_engine
from aitune_hf.backends.base import AxisRange, BuildRequest, LoadRequest
from aitune_hf.backends.onnx_export import export_onnx, missing_exporter
from aitune_hf.backends.onnx_precision import shortened
from aitune_hf.backends.tensorrt_sdk import RTX, Sdk
from aitune_hf.backends.tensorrt_weights import weights_as_inputs, weights_of
from aitune_hf.errors import EngineLoadError, UnfitInputError

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(
    missing_exporter() is not None or RTX.missing() is not None, reason="ONNX or TensorRT-RTX is not installed"
)
CPU = torch.device("cpu")


class Net(nn.Module):
    """Attention, a convolution, a resize, a table, a mask, and numbers in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.conv, self.group = nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2)
        self.register_buffer("table", torch.linspace(-1, 1, 8), persistent=False)

    def forward(self, x: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mask = torch.full((8, 8), float("-inf"), dtype=x.dtype).triu(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        y = y * gain + self.table.to(x.dtype)[None, :, None]
        z = F.interpolate(F.silu(self.group(self.conv(y[:, None]))), scale_factor=2.0)
        return y, z.float().mean((2, 3))


def call(batch: int, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(batch, 8, 16, generator=draw), "gain": torch.tensor(0.5 + seed)}


@pytest.fixture
def order(request_for: Callable[..., BuildRequest], tmp_path: Path) -> BuildRequest:
    torch.manual_seed(0)
    return request_for(Net().eval(), [call(2)], tmp_path, {("x", 0): AxisRange(min=1, max=8)})


def eager(module: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return module(**given)


def session(model: Any) -> Any:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_the_graph_on_live_weights_gives_eagers_answers(order: BuildRequest) -> None:
    export = export_onnx(order.capture(), opset=RTX.opset)
    graph = session(weights_as_inputs(export))
    for batch, seed in ((1, 0), (5, 1)):
        module = Net().eval()  # Other weights: none is in the graph.
        weights = {name: module.state_dict()[name].numpy() for name in export.weights}
        given = call(batch, seed)
        feeds = {"in0": given["x"].numpy(), "in1": given["gain"].numpy()}
        for got, want in zip(graph.run(None, {**feeds, **weights}), eager(module, given), strict=True):
            assert np.abs(got - want.numpy()).max() < 1e-5


def test_the_shortened_graph_gives_nearly_the_same(order: BuildRequest) -> None:
    from onnx import TensorProto

    export = export_onnx(order.capture(), opset=RTX.opset)
    short = shortened(export.model, "float16")
    kinds = {tensor.name: tensor.data_type for tensor in short.graph.initializer}
    assert {kinds[name] for name in export.weights} == {TensorProto.FLOAT16}
    assert {value.type.tensor_type.elem_type for value in (*short.graph.input, *short.graph.output)} == {
        TensorProto.FLOAT
    }
    graph = session(weights_as_inputs(dataclasses.replace(export, model=short)))
    weights = {name: weight.detach().half().numpy() for name, weight in export.weights.items()}
    given = call(3, 1)
    got = graph.run(None, {"in0": given["x"].numpy(), "in1": given["gain"].numpy(), **weights})
    errors = [
        float(np.abs(ours - want.numpy()).max()) for ours, want in zip(got, eager(order.module, given), strict=True)
    ]
    assert 1e-6 < max(errors) < 2e-2


# -- an engine on a stand-in for the runtime ---------------------------------------------------------------------------


class Runtime:
    """TensorRT's runtime, engine and contexts, as far as an engine uses them; computes with ONNX Runtime."""

    contexts: list[Any]

    def __init__(self, model: Any) -> None:
        self.graph = session(model)
        self.kinds = {value.name: value.type for value in (*self.graph.get_inputs(), *self.graph.get_outputs())}
        self.names = list(self.kinds)
        self.num_io_tensors = len(self.names)
        self.contexts = []

    def deserialize_cuda_engine(self, content: bytes) -> Any:
        return self if content == b"plan" else None

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_location(self, name: str) -> Any:
        return RTX.load().TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        return {"tensor(float)": RTX.load().DataType.FLOAT}[self.kinds[name]]

    def create_execution_context(self) -> Context:
        self.contexts.append(Context(self))
        return self.contexts[-1]


class Context:
    """Runs the graph on raw addresses."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.at, self.shapes, self.thread = runtime, {}, {}, threading.get_ident()
        for value in runtime.graph.get_inputs():
            self.shapes[value.name] = tuple(value.shape)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return shape[:1] != (99,)

    def set_tensor_address(self, name: str, address: int) -> None:
        self.at[name] = address

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        batch = self.shapes["in0"][0]
        return {"out0": (batch, 8, 16), "out1": (batch, 2)}[name]

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        import ctypes

        count = int(np.prod(shape, dtype=int))
        return np.ctypeslib.as_array((ctypes.c_float * count).from_address(self.at[name])).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        assert threading.get_ident() == self.thread, "a context belongs to one thread"
        feeds = {
            value.name: self._array(value.name, self.shapes[value.name]) for value in self.runtime.graph.get_inputs()
        }
        for value, answer in zip(self.runtime.graph.get_outputs(), self.runtime.graph.run(None, feeds), strict=True):
            self._array(value.name, answer.shape)[...] = answer
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandIn(Sdk):
    """TensorRT-RTX with another runtime."""

    runtime: Runtime

    def load(self) -> Any:
        real = RTX.load()
        names = {name: getattr(real, name) for name in ("DataType", "TensorLocation", "ILogger")}
        return types.SimpleNamespace(Runtime=lambda log: self.runtime, **names)


@pytest.fixture
def engine_on(order: BuildRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An engine for a module of the same structure, and its runtime."""
    stream = types.SimpleNamespace(cuda_stream=7, wait_stream=lambda other: None)
    monkeypatch.setattr(tensorrt_engine, "driver_problem", lambda: None)
    monkeypatch.setattr(tensorrt_engine, "_new_stream", lambda device: stream)
    monkeypatch.setattr(tensorrt_engine, "_ALIGNMENT", 16)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    graph = order.capture()
    export = export_onnx(graph, opset=RTX.opset)

    def make(module: nn.Module, content: bytes = b"plan", dtype: str | None = None) -> tuple[Any, Runtime]:
        weights = weights_of(graph, export, "inputs", dtype, for_cuda=False, where="model")
        runtime = Runtime(weights_as_inputs(export))
        fields = {field.name: getattr(RTX, field.name) for field in dataclasses.fields(RTX)}
        description = {"weights": weights.to_json(), "inputs": ["in0", "in1"], "outputs": ["out0", "out1"]}
        request = LoadRequest(path="model", module=module, folder=Path(), engine=description, device=CPU)
        return tensorrt_engine.TensorRTEngine(StandIn(**fields, runtime=runtime), request, content), runtime

    return make


def worst(engine: Any, module: nn.Module, batch: int, seed: int = 0) -> float:
    given = call(batch, seed)
    got = engine(list(given.values()))
    pairs = list(zip(got, eager(module, given), strict=True))
    assert [ours.shape for ours, _ in pairs] == [theirs.shape for _, theirs in pairs]
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def test_it_reads_the_modules_weights_in_place(engine_on: Callable[..., Any]) -> None:
    module = Net().eval()
    engine, _ = engine_on(module)
    assert max(worst(engine, module, batch, seed=batch) for batch in (1, 2, 8)) < 1e-5
    with torch.no_grad():
        module.qkv.weight.mul_(2)
    assert worst(engine, module, 3) < 1e-5


def test_new_storage_is_taken_up_by_rebind_in_every_thread(engine_on: Callable[..., Any]) -> None:
    module = Net().eval()
    engine, runtime = engine_on(module)
    go, turn, found = threading.Event(), threading.Event(), []

    def work() -> None:
        found.append(worst(engine, module, 2))
        turn.set()
        go.wait(20)
        found.append(worst(engine, module, 2))

    thread = threading.Thread(target=work)
    thread.start()
    assert turn.wait(20)
    assert worst(engine, module, 2) < 1e-5
    module.load_state_dict({name: tensor + 0.5 for name, tensor in module.state_dict().items()}, assign=True)
    assert worst(engine, module, 2) > 1e-3
    engine.rebind()
    go.set()
    thread.join()
    assert worst(engine, module, 2) < 1e-5
    assert max(found) < 1e-5
    assert len(runtime.contexts) == 2


def test_an_edited_table_is_noticed_at_the_next_call(engine_on: Callable[..., Any]) -> None:
    """Its values are part of the plan, though the engine reads everything else in place."""
    module: Any = Net().eval()
    engine, _ = engine_on(module)
    assert worst(engine, module, 2) < 1e-5
    module.table.mul_(1.0)
    assert worst(engine, module, 2) < 1e-5, "the same values, written once more"
    module.table.add_(1)
    for _ in range(2):
        with pytest.raises(EngineLoadError, match="model: table has other values"):
            engine(list(call(2).values()))


def test_inputs_are_brought_into_the_form_it_takes(engine_on: Callable[..., Any]) -> None:
    module = Net().eval()
    engine, _ = engine_on(module)
    given = call(2)
    wide = torch.zeros(2 * 8 * 16 + 1)
    shifted = wide[1:].view(2, 8, 16).copy_(given["x"])  # No address that the device can read from.
    assert shifted.data_ptr() % 16
    got = engine([shifted, given["gain"].double()])
    assert float((got[0] - eager(module, given)[0]).abs().max()) < 1e-5


def test_what_does_not_fit_is_refused(engine_on: Callable[..., Any]) -> None:
    module = Net().eval()
    with pytest.raises(EngineLoadError, match="refuses the plan"):
        engine_on(module, b"another plan")
    with pytest.raises(EngineLoadError, match=r"\(parameter\) does not fit: its dtype is float16"):
        engine_on(copy.deepcopy(module).half())
    other: Any = Net().eval()
    other.table = other.table + 1
    with pytest.raises(EngineLoadError, match="table has other values"):
        engine_on(other)
    engine, _ = engine_on(module)
    with pytest.raises(UnfitInputError, match=r"does not take in0 of shape \[99, 8, 16\]"):
        engine(list(call(99).values()))
    assert worst(engine, module, 2) < 1e-5, "the next call is served"


def test_weights_that_fit_no_more_are_let_go_of(engine_on: Callable[..., Any]) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    module = Net().eval()
    engine, _ = engine_on(module)
    assert worst(engine, module, 2) < 1e-5
    kept = copy.deepcopy(module.state_dict())
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in module.qkv.parameters()]
    module.qkv.half()
    with pytest.raises(EngineLoadError, match="does not fit"):
        engine.rebind()
    gc.collect()
    assert all(one.expired() for one in memory)
    with pytest.raises(EngineLoadError, match="has no weights"):
        engine(list(call(2).values()))
    module.qkv.float()
    module.load_state_dict(kept)
    engine.rebind()
    assert worst(engine, module, 2) < 1e-5


def test_the_summary_names_layers() -> None:
    class Inspected:
        num_layers, device_memory_size_v2 = 3, 4096
        said = '{"Layers": ["conv + relu", {"Name": "gemm"}, "' + "x" * 500 + '"], "Bindings": []}'

        def create_engine_inspector(self) -> Any:
            return types.SimpleNamespace(get_engine_information=lambda form: self.said)

    package = types.SimpleNamespace(LayerInformationFormat=types.SimpleNamespace(JSON=1))
    summary = tensorrt_engine.engine_summary(package, Inspected())
    assert summary == {"layers": 3, "memory_bytes": 4096, "layer_names": ["conv + relu", "gemm", "x" * 120]}
    Inspected.said = "no JSON"
    assert tensorrt_engine.engine_summary(package, Inspected()) == {"layers": 3, "memory_bytes": 4096}


def test_it_is_closed_once(engine_on: Callable[..., Any]) -> None:
    module = Net().eval()
    engine, _ = engine_on(module)
    engine.close()
    engine.close()
    for use in (lambda: engine(list(call(2).values())), engine.rebind):
        with pytest.raises(EngineLoadError, match="closed"):
            use()
