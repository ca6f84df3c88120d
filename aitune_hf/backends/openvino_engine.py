"""A loaded OpenVINO model that is filled from one module's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.constant_map import ConstantMap, plain_array
from aitune_hf.backends.filled_engine import FilledEngine
from aitune_hf.backends.openvino_convert import constant_nodes
from aitune_hf.backends.openvino_model import ModelFiles
from aitune_hf.backends.openvino_sdk import OV_TYPES, load_openvino
from aitune_hf.backends.openvino_shapes import ShapedModels
from aitune_hf.errors import EngineLoadError, UnfitInputError

__all__ = ["CompiledGraph", "OpenVINOEngine"]

_INT32 = 1 << 31
#: How far a model for certain sizes may be from the one for all, as a part of the largest value: where they compute in f32
#: throughout, and where values are rounded more than that.
_ALIKE, _ALIKE_ROUNDED = 1e-4, 0.01
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
            size = sum(int(node.get_byte_size()) for node in constant_nodes(model).values())
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


class OpenVINOEngine(FilledEngine[CompiledGraph]):
    """A model compiled with one module's weights.

    OpenVINO repacks most of them for the CPU and reads the others (embeddings, for one) from the module's memory. A call
    takes one of ``threads`` requests.
    """

    def __init__(self, request: LoadRequest) -> None:
        self._files = ModelFiles.read(request.folder, request.path)
        try:
            self._precision = str(request.engine["precision"])
            self._rounds = bool(request.engine["rounds"])
            weights = ConstantMap.from_json(request.engine)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineLoadError(f"{request.path}: the engine's description cannot be read: {error!r}") from error
        self._threads = max(1, request.threads)
        super().__init__(request, weights, torch.device("cpu"), self._threads)

    def _open(self, live: Mapping[str, torch.Tensor]) -> CompiledGraph:
        model, weights = self._files.model(self._weights, live, self._path)
        try:
            return CompiledGraph(model, weights, self._precision, self._threads, self._path, rounds=self._rounds)
        except RuntimeError as error:
            raise EngineLoadError(f"{self._path}: OpenVINO cannot compile the model: {error}") from error

    def _run(self, opened: CompiledGraph, place: int, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return opened.run(place, inputs)


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
    # Not copied by torch: for that it may start threads, which then spin on the cores that OpenVINO's next call wants.
    plain = torch.from_numpy(array.copy())
    return plain.view(dtype) if dtype is torch.bfloat16 else plain
