"""A loaded OpenVINO model that is filled from one module's weights."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.constant_map import ConstantMap, plain_array
from aitune_hf.backends.openvino_model import ModelFiles
from aitune_hf.backends.openvino_sdk import OV_TYPES, load_openvino
from aitune_hf.backends.weight_trace import WeightSample, trace_of
from aitune_hf.errors import EngineLoadError

__all__ = ["CompiledGraph", "OpenVINOEngine"]

_INT32 = 1 << 31
_TORCH_TYPES = {name: dtype for dtype, name in OV_TYPES.items()}


class CompiledGraph:
    """A model compiled for the CPU, with a number of requests, each for one call at a time.

    Args:
        model: an ``openvino.Model``.
        weights: the memory that it reads weights from.
        precision: ``f32`` or ``bf16``, what it computes in. Always stated: OpenVINO's own choice is bf16 where the CPU
            has it.
        requests: how many.
    """

    def __init__(self, model: Any, weights: Sequence[Any], precision: str, requests: int) -> None:
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,  # One call uses all threads; others wait for it rather than take its cores.
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,
        }
        self._weights = weights  # OpenVINO has their addresses only.
        compiled = load_openvino().Core().compile_model(model, "CPU", settings)
        self.requests = [compiled.create_infer_request() for _ in range(requests)]
        self._outputs = [_TORCH_TYPES[port.get_element_type().get_type_name()] for port in compiled.outputs]

    def run(self, request: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call. Inputs are read where they are; outputs are copies, which nothing overwrites."""
        for place, tensor in enumerate(inputs):
            request.set_input_tensor(place, _shared(tensor))
        request.infer()
        return [_copied(request.get_output_tensor(place).data, kind) for place, kind in enumerate(self._outputs)]


class OpenVINOEngine:
    """A model compiled with one module's weights.

    OpenVINO repacks most of them for the CPU and reads the others (embeddings, for one) from the module's memory. So an
    edit in place shows in a part of the model until :meth:`rebind` has compiled it anew, and must be followed by that.
    As not every edit can be seen from outside, each call looks at a sample of the weights too.

    A call takes one of ``threads`` requests, and :meth:`rebind` takes all of them: so it waits for the calls that run
    and holds back new ones.
    """

    def __init__(self, request: LoadRequest) -> None:
        self._path = request.path
        # The module owns its engines; a strong reference back would keep both alive in a cycle.
        self._module = weakref.ref(request.module)
        self._files = ModelFiles.read(request.folder, request.path)
        try:
            self._precision = str(request.engine["precision"])
            self._map = ConstantMap.from_json(request.engine)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineLoadError(f"{self._path}: the engine's description cannot be read: {error!r}") from error
        self._threads = max(1, request.threads)
        self._rebinding = threading.Lock()
        self._closed = False
        # Requests; None in place of each while there is nothing that may answer.
        self._tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._take, self._give = self._tokens.get, self._tokens.put
        live = self._resolve()
        self._trace = trace_of(live)
        self._sample: WeightSample | None = WeightSample(live.values())
        self._graph: CompiledGraph | None = self._compiled(live)
        self._refill()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        sample = self._sample
        if sample is not None and sample.changed():
            self.rebind()
        request = self._take()
        try:
            graph = self._graph
            if graph is None:
                raise EngineLoadError(
                    f"{self._path}: the engine was closed"
                    if self._closed
                    else f"{self._path}: the engine has no weights"
                )
            return graph.run(request, inputs)
        finally:
            self._give(request)

    def rebind(self) -> None:
        """Take up the module's weights again; does nothing where all are where and what they were."""
        with self._rebinding:
            if self._closed:
                raise EngineLoadError(f"{self._path}: the engine is closed")
            live = self._resolve()
            trace = trace_of(live)
            if trace == self._trace and self._graph is not None:
                return
            self._drain()
            try:
                self._graph = self._sample = None  # Two sets of weights at once may not fit into memory.
                sample = WeightSample(live.values())
                self._graph = self._compiled(live)
                self._trace, self._sample = trace, sample
            finally:
                self._refill()

    def close(self) -> None:
        """Wait for running calls, then let go of the model and its weights."""
        with self._rebinding:
            if self._closed:
                return
            self._drain()
            self._closed, self._graph, self._sample = True, None, None
            self._refill()

    def _resolve(self) -> dict[str, torch.Tensor]:
        module = self._module()
        if module is None:
            raise EngineLoadError(f"{self._path}: the module of this engine no longer exists")
        return self._map.resolve(module, self._path, torch.device("cpu"))

    def _compiled(self, live: Mapping[str, torch.Tensor]) -> CompiledGraph:
        model, weights = self._files.model(self._map, live, self._path)
        try:
            return CompiledGraph(model, weights, self._precision, self._threads)
        except RuntimeError as error:
            raise EngineLoadError(f"{self._path}: OpenVINO cannot compile the model: {error}") from error

    def _drain(self) -> None:
        for _ in range(self._threads):
            self._take()

    def _refill(self) -> None:
        requests: Sequence[Any] = [None] * self._threads if self._graph is None else self._graph.requests
        for request in requests:
            self._give(request)


def _shared(tensor: torch.Tensor) -> Any:
    """An OpenVINO tensor over the memory of a contiguous one.

    Raises:
        ValueError: for integers of more than 32 bits: OpenVINO would cut them off without a word.
    """
    ov = load_openvino()
    array = plain_array(tensor.detach())
    if tensor.dtype is torch.int64 and array.size and not -_INT32 <= array.min() <= array.max() < _INT32:
        raise ValueError(
            "an input holds integers of more than 32 bits, which OpenVINO does not compute with on the CPU"
        )
    return ov.Tensor(array, ov.Shape(tensor.shape), getattr(ov.Type, OV_TYPES[tensor.dtype]))


def _copied(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        array = array.view(np.int16)
    plain = torch.from_numpy(array).clone()
    return plain.view(dtype) if dtype is torch.bfloat16 else plain
