"""A ``device`` attribute that stays right when a module's real parameters are elsewhere."""

from __future__ import annotations

import torch
from torch import nn

from aitune_hf.jit.disguise import BASE_ATTRIBUTE, disguised

__all__ = ["patch_device_attribute", "unpatch_device_attribute"]

_MARK = "_aitune_device_patch"


def patch_device_attribute(module: nn.Module, device: torch.device) -> None:
    """Make ``module.device`` answer ``device``, on this instance only.

    The instance's class becomes a subclass that passes for it, so that ``type(m).__name__``, configs, ``isinstance``,
    copies and pickles stay as they were.
    """
    unpatch_device_attribute(module)
    namespace = {"device": property(lambda self: device), _MARK: True}
    # The instance's own class attribute is the only place where a property of the class can be overridden.
    module.__class__ = disguised(type(module), namespace)


def unpatch_device_attribute(module: nn.Module) -> None:
    """Undo :func:`patch_device_attribute`; nothing happens where it was not done."""
    own = type(module).__dict__
    if _MARK in own:
        # The inverse of the line above in patch_device_attribute: back to the class it was made with.
        module.__class__ = own[BASE_ATTRIBUTE]
