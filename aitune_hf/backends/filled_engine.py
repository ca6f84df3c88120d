"""Engines that are filled from one module's weights: a runtime that keeps copies of them, and so must follow edits."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.call_gate import ONCE, CallGate
from aitune_hf.backends.constant_map import ConstantMap
from aitune_hf.backends.weight_trace import WeightSample, trace_of
from aitune_hf.errors import EngineLoadError

__all__ = ["FilledEngine"]

Opened = TypeVar("Opened")


class FilledEngine(ABC, Generic[Opened]):
    """A graph filled with the weights of one module; see :class:`aitune_hf.backends.base.Engine`.

    The runtime copies weights, most of them into a layout of its own, and may read others from the module's memory. So an
    edit in place shows nowhere, or in a part of the graph, until :meth:`rebind` has opened it anew. As not every edit can
    be seen from outside, each call looks at a sample of the weights: an edit of a whole weight is seen at the next call,
    one of a few of its numbers at the next :meth:`rebind`.

    :meth:`rebind` waits for the calls that run and holds back new ones, so each answer is that of one set of weights.
    While it has not succeeded, because the weights do not fit or it was interrupted, the engine holds none, and each call
    tries again.

    Args:
        request: the request to load.
        weights: which of the module's tensors the graph's weights are.
        device: where they must be.
        calls: how many may run at once.
    """

    def __init__(self, request: LoadRequest, weights: ConstantMap, device: torch.device, calls: int) -> None:
        self._path = request.path
        # The module owns its engines; a strong reference back would keep both alive in a cycle.
        self._module = weakref.ref(request.module)
        self._weights = weights
        self._device = device
        self._gate = CallGate(calls)
        self._take, self._give = self._gate.take, self._gate.give
        self._rebinding = threading.Lock()
        self._opened: Opened | None = None
        self._sample: WeightSample | None = None
        self._trace: dict[str, Any] = {}
        self._closed = False
        self._rebind()

    @abstractmethod
    def _open(self, live: Mapping[str, torch.Tensor]) -> Opened:
        """The graph with these weights, ready to run.

        Raises:
            EngineLoadError: if it cannot be.
        """

    @abstractmethod
    def _run(self, opened: Opened, place: int, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One call; ``place`` is below the number of calls, and another one for each that runs at the same time."""

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        sample = self._sample
        if sample is None or sample.changed():
            self._follow(sample)
        held: list[int] = []
        try:
            held += map(self._take, ONCE)
            opened = self._opened
            if opened is None:
                raise EngineLoadError(f"{self._path}: the engine {'was closed' if self._closed else 'has no weights'}")
            return self._run(opened, held[0], inputs)
        finally:
            if held:
                self._give(held[0])

    def rebind(self) -> None:
        """Take up the module's weights again; does nothing where all are where and what they were."""
        with self._rebinding:
            self._rebind()

    def close(self) -> None:
        """Wait for running calls, then let go of the graph and its weights."""
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
        if trace == self._trace and self._opened is not None:
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
        self._opened, self._sample, self._trace = None, None, {}

    def _fill(self, live: Mapping[str, torch.Tensor], trace: dict[str, Any], sample: WeightSample) -> None:
        self._empty()  # First: two sets of weights at once may not fit into memory.
        self._opened = self._open(live)
        self._trace, self._sample = trace, sample
