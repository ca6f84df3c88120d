"""What a call does besides computing its output. An engine does none of it, so such a call must stay eager."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aitune_hf.jit.guards import ModuleGuard, inner_hook

__all__ = ["SideEffect", "SideEffectWatch", "same_values"]


@dataclass(frozen=True)
class SideEffect:
    """What was found; a call that is not ``repeatable`` leaves other traces when it is run once more."""

    reason: str
    repeatable: bool = False


class SideEffectWatch:
    """Made before a call; looks afterwards at what changed."""

    def __init__(self, module: nn.Module, leaves: Sequence[torch.Tensor], clones: Sequence[torch.Tensor]) -> None:
        """Make one.

        Args:
            clones: copies of ``leaves`` as they were before the call.
        """
        self._guard = ModuleGuard(module)
        self._hook = inner_hook(module)
        self._pairs = list(zip(leaves, clones, strict=True))
        self._versions = [_version(leaf) for leaf in leaves]
        tensors = [*module.parameters(), *module.buffers()]
        self._weights = [tensor for tensor in tensors if not tensor.is_inference()]
        self._weight_versions = [tensor._version for tensor in self._weights]
        # In-place edits of tensors made in inference mode leave no trace but their values.
        self._copies = [(tensor, tensor.clone()) for tensor in module.buffers() if tensor.is_inference()]
        self._rng = _rng_states()

    def found(self) -> SideEffect | None:
        """The first thing that the call did besides, or None."""
        if self._hook:
            return SideEffect(f"{self._hook}, which would not fire inside an engine")
        leaves = [leaf for leaf, _ in self._pairs]
        if [_version(leaf) for leaf in leaves] != self._versions or not all(same_values(a, b) for a, b in self._pairs):
            return SideEffect("the forward changes one of its inputs in place")
        change = self._guard.structure_change()
        if change:
            return SideEffect(f"the forward keeps state on the module ({change.removesuffix(' after tuning')})")
        if self._guard.weights_moved():
            return SideEffect("the forward keeps state on the module (a parameter or buffer was replaced)")
        edited = [tensor._version for tensor in self._weights] != self._weight_versions
        if edited or not all(same_values(a, b) for a, b in self._copies):
            return SideEffect("the forward changes a parameter or buffer in place")
        if not _same_states(self._rng, _rng_states()):
            return SideEffect("the forward draws random numbers", repeatable=True)
        return None


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors hold equal values; nan equals nan."""
    try:
        if torch.equal(a, b):
            return True
        return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    except (RuntimeError, NotImplementedError):  # From torch, which compares no such tensors (sparse, quantised).
        return True  # They have their version.


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _rng_states() -> list[Any]:
    states: list[Any] = [torch.get_rng_state(), random.getstate()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states += [name, keys.tobytes(), rest]
    return states


def _same_states(before: list[Any], after: list[Any]) -> bool:
    if len(before) != len(after):
        return False
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b) for a, b in zip(before, after, strict=True)
    )
