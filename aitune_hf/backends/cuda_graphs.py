"""An engine for fixed shapes, replayed as one CUDA graph: no launch of a kernel costs time on the CPU any more."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from aitune_hf.backends.base import Engine

__all__ = ["GraphedEngine"]

#: Runs on a side stream before the capture, as PyTorch's notes on CUDA graphs ask for.
_WARM_UP = 3


class GraphedEngine:
    """Captures ``engine`` at its first call, and again after its weights have moved.

    Calls take turns, on the CPU and on the device: a graph has one set of buffers, and the outputs are copied out of
    them. So a call on another stream waits until the one before it has read them.

    Args:
        engine: takes one combination of shapes.
        device: a CUDA device.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._turn = threading.Lock()
        #: After all that the last call has queued. Made with the first one.
        self._done: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        with self._turn, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            if self._done is None:
                event: Any = torch.cuda.Event  # Without types of its own.
                self._done = event()
            self._done.wait(current)  # Does nothing where none was recorded.
            try:
                if self._graph is None:
                    self._capture(inputs)
                for mine, given in zip(self._inputs, inputs, strict=True):
                    mine.copy_(given)
                assert self._graph is not None
                self._graph.replay()
                return [leaf.clone() for leaf in self._outputs]
            finally:
                self._done.record(current)  # After a failure too: what was queued until then goes on running.

    def rebind(self) -> None:
        """Take up the weights again; the graph holds their old addresses, so it is dropped."""
        with self._turn:
            self._drop()
            self._engine.rebind()

    def close(self) -> None:
        """Let go of the graph and of the engine."""
        with self._turn:
            self._drop()
            self._engine.close()

    def _capture(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = [leaf.clone() for leaf in inputs]
        current = torch.cuda.current_stream(self._device)
        stream: Any = torch.cuda.Stream  # Without types of its own.
        side = stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._engine(list(self._inputs))
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = list(self._engine(list(self._inputs)))
        self._graph = graph

    def _drop(self) -> None:
        if self._done is not None:
            self._done.synchronize()  # The last call may still read the buffers.
        self._graph = None
        self._inputs, self._outputs = [], []
