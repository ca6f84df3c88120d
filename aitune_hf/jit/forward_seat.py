"""The slot that holds a module's innermost forward, under whatever other libraries have wrapped around it.

accelerate keeps the forward it wrapped in ``module._old_forward``; diffusers keeps a chain of function references in
``module._diffusers_hook``, whose first link holds it; otherwise it is ``module.forward``, from the class or set on the
instance. An engine takes the innermost place, so that hooks of any kind keep firing once per call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ForwardSeat", "foreign_forward", "has_forward_wrapper"]

Forward = Callable[..., Any]


class ForwardSeat:
    """One slot: where it is, and how to read and write it. ``module`` is not kept alive by it."""

    __slots__ = ("attribute", "holder")

    def __init__(self, holder: Any, attribute: str) -> None:
        self.holder = holder
        self.attribute = attribute

    @classmethod
    def find(cls, module: nn.Module) -> ForwardSeat:
        """The slot of ``module``'s innermost forward."""
        slots = [seat for seat in (_accelerate_slot(module), _diffusers_slot(module)) if seat is not None]
        for seat in slots:
            if not _wraps(seat.read()):
                return seat
        return slots[0] if slots else cls(module, "forward")

    @classmethod
    def holding(cls, module: nn.Module, forward: object) -> ForwardSeat | None:
        """The slot of ``module`` that holds ``forward``, or None when something has replaced it."""
        candidates = [cls(module, "forward"), _accelerate_slot(module), *_diffusers_slots(module)]
        for seat in candidates:
            if seat is not None and seat.holder.__dict__.get(seat.attribute) is forward:
                return seat
        return None

    def read(self) -> Forward:
        """The forward in the slot."""
        found: Forward = getattr(self.holder, self.attribute)
        return found

    def put(self, forward: Forward) -> None:
        """Put ``forward`` in. A method that the class gives by itself is not written to the instance."""
        own = isinstance(forward, types.MethodType) and forward.__self__ is self.holder
        if own and self.attribute == "forward" and _function_of(forward) is getattr(type(self.holder), "forward", None):
            self.holder.__dict__.pop(self.attribute, None)
        else:
            # Straight into the instance: nn.Module.__setattr__ has nothing to add for a callable.
            self.holder.__dict__[self.attribute] = forward


def _accelerate_slot(module: nn.Module) -> ForwardSeat | None:
    return ForwardSeat(module, "_old_forward") if "_old_forward" in module.__dict__ else None


def _diffusers_slots(module: nn.Module) -> list[ForwardSeat]:
    references = getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", None) or []
    return [
        ForwardSeat(reference, "original_forward" if reference.original_forward is not None else "forward")
        for reference in references
    ]


def _diffusers_slot(module: nn.Module) -> ForwardSeat | None:
    return next(iter(_diffusers_slots(module)), None)


def _wraps(forward: object) -> bool:
    """A wrapper as both libraries make them: a partial over the module, updated from what it wraps."""
    return isinstance(forward, functools.partial) and hasattr(forward, "__wrapped__")


def has_forward_wrapper(module: nn.Module) -> bool:
    """True when accelerate or diffusers hooks sit on the module itself."""
    return "_old_forward" in module.__dict__ or bool(_diffusers_slots(module))


def foreign_forward(module: nn.Module, own: type) -> str | None:
    """Name of a replacement of the innermost forward that is neither the class's nor an ``own`` proxy, else None."""
    forward = ForwardSeat.find(module).read()
    if isinstance(forward, own):
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    function = getattr(forward, "__func__", None)
    if function is not None and function is getattr(type(module), "forward", None):
        return None
    return getattr(forward, "__qualname__", None) or repr(forward)


def _function_of(method: Any) -> object:
    return getattr(method, "__func__", None)
