"""A loaded OpenVINO model that is filled from one module's weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.call_gate import ONCE, CallGate
from aitune_hf.backends.constant_map import ConstantMap, plain_array
from aitune_hf.backends.openvino_model import ModelFiles
from aitune_hf.backends.openvino_sdk import OV_TYPES, load_openvino
from aitune_hf.backends.openvino_shapes import ShapedModels
from aitune_hf.backends.weight_trace import WeightSample, trace_of
from aitune_hf.errors import EngineLoadError, UnfitInputError

__all__ = ["CompiledGraph", "OpenVINOEngine"]

_INT32 = 1 << 31
#: How far a model for certain sizes may be from the one for all, as a part of the largest value: where they compute in f32
#: throughout, and where values are rounded more than that.
_ALIKE, _ALIKE_ROUNDED = 1e-4, 0.05
_TORCH_TYPES = {name: dtype for dtype, name in OV_TYPES.items()}


class CompiledGraph:
    """A model compiled for the CPU, with a number of requests, each for one call at a time.

    Where its sizes vary, those that come often get a compiled model of their own.

    Args:
        model: an ``openvino.Model``.
        weights: the memory that it reads weights from.
        precision: ``f32`` or ``bf16``, what it computes in. Always stated: OpenVINO's own choice is bf16 where the CPU
            has it.
        requests: how many.
        where: the module's path, for messages.
        rounds: it computes some of it in less than f32.

    Attributes:
        run: makes one call: the number of the request, and the inputs. Calls at the same time need different numbers.
    """

    def __init__(
        self, model: Any, weights: Sequence[Any], precision: str, requests: int, where: str, *, rounds: bool = False
    ) -> None:
        self._weights = weights  # OpenVINO has their addresses only.
        whole = _Requests(model, precision, requests)
        self.run: Callable[[int, Sequence[torch.Tensor]], list[torch.Tensor]] = whole.run
        if model.is_dynamic():
            size = sum(int(weight.nbytes) for weight in weights)
            tolerance = _ALIKE_ROUNDED if rounds else _ALIKE
            self.run = ShapedModels(whole, partial(_for_sizes, model, precision, requests), size, tolerance, where).run


class _Requests:
    """One compiled model."""

    def __init__(self, model: Any, precision: str, requests: int) -> None:
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,  # One call uses all threads; others wait for it rather than take its cores.
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,
        }
        compiled = load_openvino().Core().compile_model(model, "CPU", settings)
        self._requests = [compiled.create_infer_request() for _ in range(requests)]
        self._outputs = [_TORCH_TYPES[port.get_element_type().get_type_name()] for port in compiled.outputs]

    def run(self, place: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call. Inputs are read where they are; outputs are copies, which nothing overwrites."""
        request = self._requests[place]
        for index, tensor in enumerate(inputs):
            request.set_input_tensor(index, _shared(tensor))
        request.infer()
        return [_copied(request.get_output_tensor(index).data, kind) for index, kind in enumerate(self._outputs)]


def _for_sizes(model: Any, precision: str, requests: int, sizes: Sequence[torch.Size]) -> _Requests:
    fixed = model.clone()
    fixed.reshape({port: list(size) for port, size in zip(fixed.inputs, sizes, strict=True)})
    return _Requests(fixed, precision, requests)


class OpenVINOEngine:
    """A model compiled with one module's weights.

    OpenVINO repacks most of them for the CPU and reads the others (embeddings, for one) from the module's memory. So an
    edit in place shows in a part of the model until :meth:`rebind` has compiled it anew, and must be followed by that.
    As not every edit can be seen from outside, each call looks at a sample of the weights too.

    A call takes one of ``threads`` requests. :meth:`rebind` waits for the calls that run and holds back new ones. While
    it has not succeeded, because the weights do not fit or it was interrupted, the engine holds none, and each call tries
    again.
    """

    def __init__(self, request: LoadRequest) -> None:
        self._path = request.path
        # The module owns its engines; a strong reference back would keep both alive in a cycle.
        self._module = weakref.ref(request.module)
        self._files = ModelFiles.read(request.folder, request.path)
        try:
            self._precision = str(request.engine["precision"])
            self._rounds = bool(request.engine["rounds"])
            self._map = ConstantMap.from_json(request.engine)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineLoadError(f"{self._path}: the engine's description cannot be read: {error!r}") from error
        self._threads = max(1, request.threads)
        self._rebinding = threading.Lock()
        self._closed = False
        self._gate = CallGate(self._threads)
        self._take, self._give = self._gate.take, self._gate.give
        self._graph: CompiledGraph | None = None
        self._sample: WeightSample | None = None
        self._trace: dict[str, Any] = {}
        self._rebind()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        sample = self._sample
        if sample is None or sample.changed():
            self._follow(sample)
        held: list[int] = []
        try:
            held += map(self._take, ONCE)
            graph = self._graph
            if graph is None:
                raise EngineLoadError(f"{self._path}: the engine {'was closed' if self._closed else 'has no weights'}")
            return graph.run(held[0], inputs)
        finally:
            if held:
                self._give(held[0])

    def rebind(self) -> None:
        """Take up the module's weights again; does nothing where all are where and what they were."""
        with self._rebinding:
            self._rebind()

    def _follow(self, seen: WeightSample | None) -> None:
        """As :meth:`rebind`, unless another thread has done it since."""
        with self._rebinding:
            if self._sample is seen:
                self._rebind()

    def _rebind(self) -> None:
        if self._closed:
            raise EngineLoadError(f"{self._path}: the engine was closed")
        try:
            live = self._resolve()
        except EngineLoadError:
            self._gate.alone(self._empty)  # What it reads must not stay in memory because it once fitted.
            raise
        # Before the trace is taken: what changes meanwhile is seen at the next call.
        sample, trace = WeightSample(live.values()), trace_of(live)
        if trace == self._trace and self._graph is not None:
            self._sample = sample
        else:
            self._gate.alone(partial(self._fill, live, trace, sample))

    def close(self) -> None:
        """Wait for running calls, then let go of the model and its weights."""
        with self._rebinding:
            self._gate.alone(self._end)

    def _resolve(self) -> dict[str, torch.Tensor]:
        module = self._module()
        if module is None:
            raise EngineLoadError(f"{self._path}: the module of this engine no longer exists")
        return self._map.resolve(module, self._path, torch.device("cpu"))

    def _end(self) -> None:
        self._closed = True
        self._empty()

    def _empty(self) -> None:
        self._graph, self._sample, self._trace = None, None, {}

    def _fill(self, live: Mapping[str, torch.Tensor], trace: dict[str, Any], sample: WeightSample) -> None:
        self._empty()  # Two sets of weights at once may not fit into memory.
        model, weights = self._files.model(self._map, live, self._path)
        try:
            self._graph = CompiledGraph(model, weights, self._precision, self._threads, self._path, rounds=self._rounds)
        except RuntimeError as error:
            raise EngineLoadError(f"{self._path}: OpenVINO cannot compile the model: {error}") from error
        self._trace, self._sample = trace, sample


def _shared(tensor: torch.Tensor) -> Any:
    """An OpenVINO tensor over the memory of a contiguous one.

    Raises:
        UnfitInputError: for integers of more than 32 bits: OpenVINO would cut them off without a word.
    """
    ov = load_openvino()
    array = plain_array(tensor.detach())
    if tensor.dtype is torch.int64 and array.size and not -_INT32 <= array.min() <= array.max() < _INT32:
        raise UnfitInputError(
            "an input holds integers of more than 32 bits, which OpenVINO does not compute with on the CPU"
        )
    return ov.Tensor(array, ov.Shape(tensor.shape), getattr(ov.Type, OV_TYPES[tensor.dtype]))


def _copied(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        array = array.view(np.int16)
    plain = torch.from_numpy(array).clone()
    return plain.view(dtype) if dtype is torch.bfloat16 else plain
