"""The few private torch calls that deciding on a call needs, each with an answer for a torch that lacks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module

__all__ = ["any_autocast_enabled", "global_module_hooks_active", "interceptor_active"]


def _private(name: str, default: Any) -> Callable[[], Any]:
    found: Any = torch._C
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else lambda: default


_global_hooks: Any = getattr(nn_module, "_global_forward_hooks", {})
_global_pre_hooks: Any = getattr(nn_module, "_global_forward_pre_hooks", {})
_function_modes = _private("_len_torch_function_stack", 0)
_tracing: Any = getattr(torch.jit, "is_tracing", bool)
_dispatch_modes = _private("_len_torch_dispatch_stack", 0)
_functorch_level = _private("_functorch.peek_interpreter_stack", None)

#: True while autocast is on for some device type in this thread; a torch without the call makes us ask for each.
any_autocast_enabled: Callable[[], bool] = _private("_is_any_autocast_enabled", True)


def _only_default_device() -> bool:
    """``torch.set_default_device`` is a function mode too, but one that only touches factory functions."""
    stack = getattr(overrides, "_get_current_function_mode_stack", lambda: [None])()
    return all(type(mode).__name__ == "DeviceContext" for mode in stack)


def interceptor_active() -> bool:
    """True while something watches or rewrites each tensor operation of this thread.

    That is: a torch function or dispatch mode (FLOP counters, fake tensors), a functorch transform (``vmap``,
    ``grad``), forward-mode differentiation, or a trace by ``torch.compile``, ``torch.export`` or ``torch.jit``. An
    engine would bypass it.
    """
    return bool(
        _dispatch_modes()
        or (_function_modes() and not _only_default_device())
        or _functorch_level() is not None
        or getattr(forward_ad, "_current_level", -1) >= 0
        or torch.compiler.is_compiling()
        or _tracing()
    )


def global_module_hooks_active() -> bool:
    """True while a hook on *every* module is registered (``register_module_forward_hook`` and its pre-hook kin)."""
    return bool(_global_hooks or _global_pre_hooks)
