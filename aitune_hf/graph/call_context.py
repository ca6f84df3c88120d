"""What surrounds a call and changes what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CallContext", "autocast_state"]


def autocast_state(device_type: str) -> str | None:
    """The dtype that autocast uses on ``device_type`` in this thread, by name, or None where it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """Part of a graph's identity beside its inputs.

    Attributes:
        training: the module's own mode. The modes of its descendants are in the hierarchy hash.
        needs_grad: autograd was on and would have recorded the call.
        autocast: dtype name of autocast, or None.
    """

    training: bool = False
    needs_grad: bool = False
    autocast: str | None = None

    def enter(self, device_type: str) -> AbstractContextManager[object]:
        """A context manager that brings the autocast part about."""
        if self.autocast is None:
            if not torch.is_autocast_enabled(device_type):
                return nullcontext()
            return torch.autocast(device_type, enabled=False)
        return torch.autocast(device_type, dtype=getattr(torch, self.autocast), cache_enabled=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"training": self.training, "needs_grad": self.needs_grad, "autocast": self.autocast}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CallContext:
        """Inverse of :meth:`to_dict`."""
        return cls(**data)
