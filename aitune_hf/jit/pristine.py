"""A module tree with all our proxies lifted, for as long as a backend looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from aitune_hf.jit.forward_proxy import ForwardProxy, PlainCopy, PlainState
from aitune_hf.jit.forward_seat import ForwardSeat

__all__ = ["install_proxy", "lift_proxy", "pristine"]


def install_proxy(module: nn.Module, proxy: ForwardProxy) -> None:
    """Put a proxy into the module's forward seat."""
    ForwardSeat.find(module).put(proxy)
    module.__dict__["__getstate__"] = PlainState(module)
    if hasattr(type(module), "__deepcopy__"):
        module.__dict__["__deepcopy__"] = PlainCopy(module, pristine)


def lift_proxy(module: nn.Module, proxy: ForwardProxy) -> bool:
    """Give the seat back to the forward that the proxy stands for.

    Returns:
        False if the proxy was in no seat any more (somebody has put another forward there since; it is left).
    """
    for name, kind in (("__getstate__", PlainState), ("__deepcopy__", PlainCopy)):
        if isinstance(module.__dict__.get(name), kind):
            del module.__dict__[name]
    seat = ForwardSeat.holding(module, proxy)
    if seat is not None:
        seat.put(proxy.__wrapped__)
    return seat is not None


def _proxy_of(module: nn.Module) -> ForwardProxy | None:
    forward = ForwardSeat.find(module).read()
    return forward if isinstance(forward, ForwardProxy) else None


@contextmanager
def pristine(root: nn.Module) -> Iterator[None]:
    """Lift every proxy in the tree, those of descendants that were never called too, and put them back after."""
    lifted = [
        (module, proxy) for module in root.modules() if (proxy := _proxy_of(module)) and lift_proxy(module, proxy)
    ]
    try:
        yield
    finally:
        for module, proxy in lifted:
            install_proxy(module, proxy)
