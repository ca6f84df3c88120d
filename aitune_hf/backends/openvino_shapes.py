"""Models compiled for one combination of sizes, beside the one that takes all.

OpenVINO works out the sizes inside a model anew at every call where they may vary, which takes as long as computing where
the model is small: a UNet of 0.7 M parameters takes 2.8 ms with sizes that vary and 1.4 ms without. So sizes that come
again and again get a model of their own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from aitune_hf.backends.output_check import first_difference

__all__ = ["AT_CALL", "ROOM", "Runnable", "ShapedModels"]

logger = logging.getLogger("aitune_hf")

Sizes = tuple[torch.Size, ...]
#: At which call of the same sizes a model of their own is made.
AT_CALL = 3
#: How many an engine may have.
MAX_MODELS = 16
#: How much memory those of all engines together may take for their copies of the weights, in bytes.
MAX_BYTES = 1 << 30
#: Combinations of sizes that are counted.
_MAX_COUNTED = 256
#: A count that does not reach :data:`AT_CALL`.
_NEVER = -(1 << 62)


class Runnable(Protocol):
    """A compiled model."""

    def run(self, place: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call; ``place`` tells it from others that run at the same time."""
        ...


class Room:
    """Memory that is rented by the byte, up to :data:`MAX_BYTES`."""

    def __init__(self) -> None:
        # A finaliser may run in any thread at any place, within `rent` too.
        self._changing = threading.RLock()
        self.used = 0

    def rent(self, size: int, rented: list[int]) -> bool:
        """Note ``size`` in ``rented`` if there is so much left; tell whether."""
        with self._changing:
            if self.used + size > MAX_BYTES:
                return False
            self.used += size
            rented.append(size)
            return True

    def give_back(self, rented: list[int]) -> None:
        """Let go of all of these."""
        with self._changing:
            self.used -= sum(rented)
            rented.clear()


#: What models for certain sizes take in this process.
ROOM = Room()


class ShapedModels:
    """Which model answers a call: the one that takes all sizes, or one for just these.

    A new one is compared with the one for all, which was checked against eager, on the call that it is made in. If it
    cannot be made, or gives anything else, the one for all goes on.

    Args:
        whole: takes all sizes.
        make: compiles one for these sizes of the inputs.
        weight_bytes: memory that each takes for its weights.
        tolerance: how far apart the two may be, as a part of the largest value.
        where: the module's path, for messages.
    """

    def __init__(
        self, whole: Runnable, make: Callable[[Sizes], Runnable], weight_bytes: int, tolerance: float, where: str
    ) -> None:
        self._whole = whole
        self._make = make
        self._tolerance = tolerance
        self._where = where
        self._bytes = weight_bytes
        self._rented: list[int] = []
        weakref.finalize(self, ROOM.give_back, self._rented)
        self._own: dict[Sizes, Runnable] = {}
        self._counts: dict[Sizes, int] = {}
        self._making = threading.Lock()

    def run(self, place: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call."""
        sizes = tuple([tensor.shape for tensor in inputs])
        own = self._own.get(sizes)
        if own is not None:
            return own.run(place, inputs)
        outputs = self._whole.run(place, inputs)
        if len(self._own) < MAX_MODELS and self._is_due(sizes) and self._making.acquire(blocking=False):
            try:
                if sizes not in self._own:  # Another call of these sizes may have made it meanwhile.
                    self._try(sizes, place, inputs, outputs)
            finally:
                self._making.release()
        return outputs

    def _is_due(self, sizes: Sizes) -> bool:
        if len(self._counts) >= _MAX_COUNTED:
            self._counts = {}
        count = self._counts.get(sizes, 0) + 1
        self._counts[sizes] = count
        return count >= AT_CALL

    def _try(self, sizes: Sizes, place: int, inputs: Sequence[torch.Tensor], expected: list[torch.Tensor]) -> None:
        self._counts[sizes] = _NEVER  # It is tried once, whatever comes of it.
        if not ROOM.rent(self._bytes, self._rented):
            return
        try:
            own = self._make(sizes)
            problem = first_difference(own.run(place, inputs), expected, self._tolerance, exact_integers=True)
            if problem is None:
                self._own[sizes] = own
        except Exception as error:  # noqa: BLE001 - native code may raise anything; the one for all goes on.
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            if sizes not in self._own:
                ROOM.give_back([self._rented.pop()])
        if problem is not None:
            logger.info("%s: no model of its own for the sizes %s: %s", self._where, list(map(list, sizes)), problem)
