"""A graph without weights, run by ONNX Runtime with the weights of one module."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.call_gate import ONCE, CallGate
from aitune_hf.backends.constant_map import ConstantMap
from aitune_hf.backends.onnxruntime_session import Session
from aitune_hf.backends.weight_trace import WeightSample, trace_of
from aitune_hf.errors import EngineLoadError

__all__ = ["OnnxRuntimeEngine"]

#: How many calls may run in one session at once.
_CALLS = 64


class OnnxRuntimeEngine:
    """A graph filled with the weights of one module.

    ONNX Runtime copies all weights when it opens a session, most of them into a layout of its own. So while the module
    keeps its weights too they take their room twice. An edit of a whole weight is seen at the next call, one of a few of
    its numbers at the next :meth:`rebind`; then all are copied again, after the first copy was let go of.

    Calls run side by side in one session. :meth:`rebind` waits for those that run and holds back new ones, so each
    answer is that of one set of weights. While it has not succeeded, because the weights do not fit or it was
    interrupted, the engine holds none, and each call tries again.

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
        self._gate = CallGate(_CALLS)
        self._take, self._give = self._gate.take, self._gate.give
        self._rebinding = threading.Lock()
        self._session: Session | None = None
        self._trace: dict[str, Any] = {}
        self._sample: WeightSample | None = None
        self._closed = False
        self._rebind()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        sample = self._sample
        if sample is None or sample.changed():
            self._follow(sample)
        held: list[int] = []
        try:
            held += map(self._take, ONCE)
            if self._session is None:
                raise EngineLoadError(f"{self._path}: the engine {'was closed' if self._closed else 'has no weights'}")
            return self._session.run(inputs)
        finally:
            if held:
                self._give(held[0])

    def rebind(self) -> None:
        """Take up the module's weights again; does nothing where none has changed."""
        with self._rebinding:
            self._rebind()

    def close(self) -> None:
        """Wait for running calls, then let go of the session and the weights."""
        with self._rebinding:
            self._gate.alone(self._end)

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
            self._gate.alone(self._empty)  # The weights that it had must not stay in memory because they once fitted.
            raise
        # As they are before the weights are read: what changes meanwhile is seen at the next call or rebind.
        sample, trace = WeightSample(live.values()), trace_of(live)
        if trace == self._trace and self._session is not None:
            self._sample = sample
        else:
            self._gate.alone(partial(self._fill, live, trace, sample))

    def _resolve(self) -> dict[str, torch.Tensor]:
        module = self._module()
        if module is None:
            raise EngineLoadError(f"{self._path}: the module of this engine no longer exists")
        return self._weights.resolve(module, self._path, self._device)

    def _end(self) -> None:
        self._closed = True
        self._empty()

    def _empty(self) -> None:
        self._session, self._sample, self._trace = None, None, {}

    def _fill(self, live: Mapping[str, torch.Tensor], trace: dict[str, Any], sample: WeightSample) -> None:
        self._empty()  # First: its copies of weights are not needed beside those of the next one.
        try:
            self._session = Session(self._model, self._weights, live, self._device, self._threads)
        except EngineLoadError as error:
            raise EngineLoadError(f"{self._path}: {error}") from error
        self._trace, self._sample = trace, sample
