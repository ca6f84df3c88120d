"""A ``device`` attribute that stays right when a module's real parameters are elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["patch_device_attribute", "unpatch_device_attribute"]

#: Names the real class, for structural hashes; the second tells this class from others made on the fly.
_BASE = "_aitune_base_class"
_MARK = "__aitune_device__"


def patch_device_attribute(module: nn.Module, device: torch.device) -> None:
    """Make ``module.device`` answer ``device``, on this instance only.

    The instance's class becomes a subclass of the same name, qualified name and module, so that ``type(m).__name__``,
    configs and ``isinstance`` stay as they were; copies and pickles are of the original class.
    """
    unpatch_device_attribute(module)
    base = type(module)

    plain_reduce: Any = base.__reduce_ex__

    def reduce_to_base(self: nn.Module, protocol: Any) -> Any:
        function, arguments, *rest = plain_reduce(self, protocol)
        return (function, tuple(base if item is type(self) else item for item in arguments), *rest)

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce_to_base,
        "device": property(lambda self: device),
        _BASE: base,
        _MARK: True,
    }
    # The instance's own class attribute is the only place where a property of the class can be overridden.
    module.__class__ = type(base.__name__, (base,), namespace)


def unpatch_device_attribute(module: nn.Module) -> None:
    """Undo :func:`patch_device_attribute`; nothing happens where it was not done."""
    own = type(module).__dict__
    if _MARK in own:
        module.__class__ = own[_BASE]  # Back to the class it was made with.
