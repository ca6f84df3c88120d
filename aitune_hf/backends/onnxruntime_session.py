"""ONNX Runtime sessions over graphs whose weights lie in memory, quiet and with no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aitune_hf.backends.constant_map import ConstantMap
from aitune_hf.errors import EngineLoadError

if TYPE_CHECKING:
    import onnx
    import onnxruntime

__all__ = ["WEIGHTS", "Session", "check_model", "element_type", "missing_runtime", "providers_for"]

#: Where a graph says that its weights are. No file has this name: the values are handed over in memory.
WEIGHTS = "weights"
#: Operators of these domains only; others may read files, or are code of third parties.
_DOMAINS = frozenset({"", "ai.onnx"})
_SILENT = 4
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
#: ONNX's numbers for element types.
_ELEMENTS = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.uint16: 4, torch.int16: 5, torch.int32: 6, torch.int64: 7,
    torch.bool: 9, torch.float16: 10, torch.float64: 11, torch.uint32: 12, torch.uint64: 13, torch.bfloat16: 16,
}  # fmt: skip


def missing_runtime() -> str | None:
    """None if graphs can be run here, else what is missing and how to get it."""
    from importlib.util import find_spec

    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    return f"{' and '.join(missing)} not found: pip install aitune-hf[onnx]" if missing else None


def providers_for(device: torch.device) -> list[tuple[str, dict[str, Any]]]:
    """What is to run a graph on ``device``, the best first; empty if this build of ONNX Runtime serves no such device."""
    import onnxruntime

    name = _PROVIDERS.get(device.type, "")
    if name not in onnxruntime.get_available_providers():
        return []
    host: tuple[str, dict[str, Any]] = (_PROVIDERS["cpu"], {})
    return [host] if device.type == "cpu" else [(name, {"device_id": device.index or 0}), host]


def element_type(dtype: torch.dtype) -> int | None:
    """ONNX's number for a type, or None if it has none that is served here."""
    return _ELEMENTS.get(dtype)


class Session:
    """A graph with weights, ready to run. Calls may come from several threads at once.

    Args:
        model: the graph, see :func:`check_model`.
        weights: tells which of its constants are weights, and their types.
        live: the weights' tensors, by their names.
        device: where to run.
        threads: how many threads one call uses.

    Raises:
        EngineLoadError: if ONNX Runtime refuses the graph.
    """

    def __init__(
        self, model: bytes, weights: ConstantMap, live: Mapping[str, torch.Tensor], device: torch.device, threads: int
    ) -> None:
        # It may point into these and does not keep them alive. They are the live tensors' own memory, but for those that
        # do not lie row by row.
        self._values = weights.fill(live)
        self._session = _opened(model, weights, self._values, device, threads)
        self._device = device
        self._place = (device.type, device.index or 0)
        self._inputs = [value.name for value in self._session.get_inputs()]
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on contiguous tensors where they lie; the results are memory of their own."""
        binding = self._session.io_binding()
        for name, tensor in zip(self._inputs, inputs, strict=True):
            binding.bind_input(name, *self._place, _ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        for name in self._outputs:
            binding.bind_output(name, *self._place)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # The session has a stream of its own.
        self._session.run_with_iobinding(binding)
        return [_as_tensor(value) for value in binding.get_outputs()]


def _opened(
    model: bytes, weights: ConstantMap, values: Mapping[str, np.ndarray[Any, Any]], device: torch.device, threads: int
) -> onnxruntime.InferenceSession:
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Within a call threads wait for work by spinning, which makes it up to a fifth faster. Between calls they must not: they
    # would take the cores from torch, whose operators run then; measured on two cores, those took ten times as long.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # It keeps what the largest call ever needed, and makes none faster.
    options.enable_cpu_mem_arena = False
    given = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            value, _ELEMENTS[getattr(torch, weights.slots[name].dtype)]
        )
        for name, value in values.items()
    }
    options.add_external_initializers(list(given), list(given.values()))
    try:
        # Else it would print what failed, and run on another device without a word to the caller.
        return onnxruntime.InferenceSession(model, options, providers=providers_for(device), enable_fallback=0)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise EngineLoadError(f"ONNX Runtime refuses the graph: {lines[0][:300] if lines else error!r}") from error


def _as_tensor(value: onnxruntime.OrtValue) -> torch.Tensor:
    # The wrapper itself speaks this protocol only in later versions, and early ones give booleans as bytes.
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(value._get_c_value())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor


def check_model(model: bytes, weights: Sequence[str] | Mapping[str, Any]) -> None:
    """Check a graph that may come from anywhere: it takes ``weights`` from memory and nothing from elsewhere.

    Raises:
        EngineLoadError: if it names a file, has operators that ONNX does not define, or is no ONNX graph.
    """
    from google.protobuf.message import DecodeError
    from onnx import ModelProto, TensorProto

    proto = ModelProto()
    try:
        proto.ParseFromString(model)
    except DecodeError as error:
        raise EngineLoadError(f"the engine's file is no ONNX graph: {error}") from error
    if proto.functions or proto.training_info or not {item.domain for item in proto.opset_import} <= _DOMAINS:
        raise EngineLoadError("the engine's ONNX graph has functions or operators that ONNX itself does not define")
    outside = {tensor.name for tensor in proto.graph.initializer if _is_weight(tensor)}
    if outside != set(weights):
        raise EngineLoadError(
            f"the engine's ONNX graph and its description name different weights: {sorted(outside ^ set(weights))[:5]}"
        )
    external = [tensor for tensor in _tensors(proto.graph) if tensor.data_location == TensorProto.EXTERNAL]
    if len(external) != len(outside):
        raise EngineLoadError("the engine's ONNX graph takes constants from files, and must not")
    for node in _nodes(proto.graph):
        if node.domain not in _DOMAINS:
            raise EngineLoadError(f"the engine's ONNX graph has an operator of {node.domain!r}, and must not")


def _is_weight(tensor: onnx.TensorProto) -> bool:
    return [entry.value for entry in tensor.external_data if entry.key == "location"] == [WEIGHTS]


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in _nodes(graph, inner=False):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _nodes(graph: onnx.GraphProto, inner: bool = True) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        if inner:
            for attribute in node.attribute:
                for part in (attribute.g, *attribute.graphs):
                    yield from _nodes(part)
