"""How to answer calls of one key, and in which order an engine wants their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.locator import Locator

if TYPE_CHECKING:
    from aitune_hf.jit.dispatcher import InstalledEngine

__all__ = ["Plan", "gather_order"]


@dataclass(frozen=True)
class Plan:
    """By an engine, or by eager with a reason.

    Attributes:
        gather: for each input of the engine, its index among the call's tensors; None if they are in order already.
        copies: inputs that must be made contiguous.
    """

    engine: InstalledEngine | None
    reason: str = ""
    gather: tuple[int, ...] | None = None
    copies: tuple[int, ...] = ()

    def inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The engine's inputs from a call's tensors, which may be reused for it."""
        inputs = tensors if self.gather is None else [tensors[index] for index in self.gather]
        for index in self.copies:
            inputs[index] = inputs[index].contiguous()
        return inputs


def gather_order(
    signature: ForwardSignature, args: tuple[Any, ...], kwargs: Mapping[str, Any], places: Sequence[Locator]
) -> tuple[int, ...] | None:
    """For each of ``places`` in the bound call, the index of its tensor in the order of ``call_key``.

    Told by position, never by identity: a call that gives one tensor twice is planned like one that gives two.

    Returns:
        None if a place is none of the call's own tensors (it is a default).
    """
    slots = [_Slot(index) for index in range(len(args) + len(kwargs))]
    bound = signature.bind(tuple(slots[: len(args)]), dict(zip(kwargs, slots[len(args) :], strict=True)))
    roots: dict[int, Locator] = {}
    for name, value in bound.items():
        at = Locator().child(name)
        if isinstance(value, _Slot):
            roots[value.index] = at
        elif isinstance(value, tuple):
            roots |= {item.index: at.child(step) for step, item in enumerate(value) if isinstance(item, _Slot)}
        elif isinstance(value, dict):
            roots |= {item.index: at.child(step) for step, item in value.items() if isinstance(item, _Slot)}
    order: dict[Locator, int] = {}
    for index, value in enumerate((*args, *kwargs.values())):
        for place in _tensor_places(value, roots[index]):
            order[place] = len(order)
    try:
        return tuple(order[place] for place in places)
    except KeyError:
        return None


@dataclass(frozen=True)
class _Slot:
    """Stands for one argument."""

    index: int


def _tensor_places(value: Any, at: Locator) -> Iterator[Locator]:
    """Where the tensors in ``value`` are, in the order in which ``call_key`` meets them."""
    if isinstance(value, torch.Tensor):
        yield at
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _tensor_places(child, at.child(name))
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        names = getattr(type(value), "_fields", range(len(value)))
        for name, child in zip(names, value, strict=True):
            yield from _tensor_places(child, at.child(name))
