"""A graph without weights, run by ONNX Runtime with the weights of one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.constant_map import ConstantMap
from aitune_hf.backends.filled_engine import FilledEngine
from aitune_hf.backends.onnxruntime_session import Session
from aitune_hf.errors import EngineLoadError

__all__ = ["OnnxRuntimeEngine"]

#: How many calls may run in one session at once.
_CALLS = 64


class OnnxRuntimeEngine(FilledEngine[Session]):
    """A graph filled with the weights of one module.

    ONNX Runtime copies all weights when it opens a session. So while the module keeps its weights too they take their room
    twice. Calls run side by side in one session.

    Args:
        request: the request to load.
        model: the graph, checked.
        weights: which of the module's tensors the graph's weights are.
    """

    def __init__(self, request: LoadRequest, model: bytes, weights: ConstantMap) -> None:
        self._model = model
        # As many as torch uses: more would fight over the cores.
        self._threads = torch.get_num_threads()
        super().__init__(request, weights, request.device, _CALLS)

    def _open(self, live: Mapping[str, torch.Tensor]) -> Session:
        try:
            return Session(self._model, self._weights, live, self._device, self._threads)
        except EngineLoadError as error:
            raise EngineLoadError(f"{self._path}: {error}") from error

    def _run(self, opened: Session, place: int, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return opened.run(inputs)
