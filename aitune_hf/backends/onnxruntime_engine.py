"""A graph without weights, run by ONNX Runtime with the weights of one module."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.constant_map import ConstantMap
from aitune_hf.backends.onnxruntime_session import Session
from aitune_hf.backends.weight_trace import WeightSample, trace_of
from aitune_hf.errors import EngineLoadError

__all__ = ["OnnxRuntimeEngine"]


class OnnxRuntimeEngine:
    """A graph filled with the weights of one module.

    ONNX Runtime copies all weights when it opens a session, most of them into a layout of its own. So while the module
    keeps its weights too they take their room twice. An edit of a whole weight is seen at the next call, one of a few of
    its numbers at the next :meth:`rebind`; then all are copied again, after the first copy was let go of.

    Calls run side by side in one session. :meth:`rebind` waits for those that run and holds back new ones, so each
    answer is that of one set of weights.

    Args:
        request: the request to load.
        model: the graph, checked.
        weights: which of the module's tensors the graph's weights are.
    """

    def __init__(self, request: LoadRequest, model: bytes, weights: ConstantMap) -> None:
        self._path = request.path
        # The module owns its engines; a strong reference back would keep both alive in a cycle.
        self._module = weakref.ref(request.module)
        self._device = request.device
        self._model = model
        self._weights = weights
        # As many as torch uses: more would fight over the cores.
        self._threads = torch.get_num_threads()
        self._gate = _Gate()
        self._session: Session | None = None
        self._trace: dict[str, Any] = {}
        self._sample: WeightSample | None = None
        self._closed = False
        self._fill(self._resolve())

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        sample = self._sample
        if sample is not None and sample.changed():
            self.rebind()
        self._gate.enter()
        try:
            if self._session is None:
                raise EngineLoadError(f"{self._path}: the engine {'was closed' if self._closed else 'has no weights'}")
            return self._session.run(inputs)
        finally:
            self._gate.leave()

    def rebind(self) -> None:
        """Take up the module's weights again; does nothing where none has changed."""
        with self._gate:
            if self._closed:
                raise EngineLoadError(f"{self._path}: the engine is closed")
            live = self._resolve()
            if self._session is None or trace_of(live) != self._trace:
                self._fill(live)

    def close(self) -> None:
        """Wait for running calls, then let go of the session and the weights."""
        with self._gate:
            self._closed = True
            self._session = self._sample = None

    def _resolve(self) -> dict[str, torch.Tensor]:
        module = self._module()
        if module is None:
            raise EngineLoadError(f"{self._path}: the module of this engine no longer exists")
        return self._weights.resolve(module, self._path, self._device)

    def _fill(self, live: Mapping[str, torch.Tensor]) -> None:
        # First: its copies of weights are not needed beside those of the next one.
        self._session = self._sample = None
        # As they are before the weights are read: what changes meanwhile is seen at the next call or rebind.
        self._trace, sample = trace_of(live), WeightSample(live.values())
        try:
            self._session = Session(self._model, self._weights, live, self._device, self._threads)
        except EngineLoadError as error:
            raise EngineLoadError(f"{self._path}: {error}") from error
        self._sample = sample


class _Gate:
    """Lets many calls through side by side, or one change alone."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._changing = threading.Lock()
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        """Begin a call, once no change is under way."""
        with self._state:
            while self._shut:
                self._state.wait()
            self._inside += 1

    def leave(self) -> None:
        """End a call."""
        with self._state:
            self._inside -= 1
            if self._shut and not self._inside:
                self._state.notify_all()

    def __enter__(self) -> None:
        self._changing.acquire()
        with self._state:
            self._shut = True
            while self._inside:
                self._state.wait()

    def __exit__(self, *error: object) -> None:
        with self._state:
            self._shut = False
            self._state.notify_all()
        self._changing.release()
