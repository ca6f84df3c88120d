"""What surrounds a call and changes what it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from aitune_hf.graph.torch_state import any_autocast_enabled

__all__ = ["CallContext", "autocast_dtypes", "autocast_state"]

#: Device types that have an autocast of their own.
_DEVICE_TYPES = ("cpu", "cuda", "hpu", "maia", "mps", "mtia", "privateuseone", "xla", "xpu")


def autocast_dtypes() -> dict[str, torch.dtype]:
    """The device types that autocast is on for in this thread, each with the dtype it uses."""
    if not any_autocast_enabled():
        return {}
    return {kind: torch.get_autocast_dtype(kind) for kind in _DEVICE_TYPES if _autocast_enabled(kind)}


def _autocast_enabled(device_type: str) -> bool:
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # This torch does not know the device type.
        return False


def autocast_state(device_type: str) -> str | None:
    """What autocast does in this thread to a call whose inputs lie on ``device_type``; None where it is off.

    A dtype name. If autocast is on for other device types too, to which the forward may move its inputs, all of them:
    ``"cpu=bfloat16,cuda=float16"``.
    """
    names = {kind: str(dtype).removeprefix("torch.") for kind, dtype in autocast_dtypes().items()}
    if not names:
        return None
    if set(names) == {device_type}:
        return names[device_type]
    return ",".join(f"{kind}={name}" for kind, name in names.items())


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """Part of a graph's identity beside its inputs.

    Attributes:
        training: the module's own mode. The modes of its descendants are in the hierarchy hash.
        needs_grad: autograd was on and would have recorded the call.
        autocast: :func:`autocast_state` of the call.
    """

    training: bool = False
    needs_grad: bool = False
    autocast: str | None = None

    @contextmanager
    def enter(self, device_type: str) -> Iterator[None]:
        """A context manager that brings the autocast part about, for inputs on ``device_type``."""
        wanted: dict[str, str] = {}
        for item in (self.autocast or "").split(",") if self.autocast else ():
            kind, _, name = item.rpartition("=")
            wanted[kind or device_type] = name
        with ExitStack() as stack:
            for kind in autocast_dtypes():
                if kind not in wanted:
                    stack.enter_context(torch.autocast(kind, enabled=False))
            for kind, name in wanted.items():
                stack.enter_context(torch.autocast(kind, dtype=getattr(torch, name), cache_enabled=False))
            yield

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"training": self.training, "needs_grad": self.needs_grad, "autocast": self.autocast}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CallContext:
        """Inverse of :meth:`to_dict`."""
        return cls(**data)
