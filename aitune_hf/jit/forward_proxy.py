"""The one callable that stands in a module's forward seat for as long as the module is patched."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from aitune_hf.jit.patched_module import PatchedModule

__all__ = ["ForwardProxy", "PlainState"]


class ForwardProxy:
    """Routes calls of a module's forward to its :class:`PatchedModule`.

    It looks like the forward it stands for (signature, docstring, name, ``__self__``, ``__func__``) and never changes, so
    that references to it held elsewhere stay right. Copies and pickles of it are the plain forward of the copied module.
    It does not keep the module alive: the module owns the proxy, the proxy owns the :class:`PatchedModule`.
    """

    def __init__(self, patched: PatchedModule, module: nn.Module, original: Callable[..., Any]) -> None:
        self._patched = patched
        self._module = weakref.ref(module)
        # A method bound to the module is kept unbound: the bound one would keep the module alive in a cycle.
        bound_here = isinstance(original, types.MethodType) and original.__self__ is module
        self._function: Callable[..., Any] = original.__func__ if bound_here else original  # type: ignore[attr-defined]
        self._is_method = bound_here
        self.__doc__ = original.__doc__
        self.__name__ = getattr(original, "__name__", "forward")
        self.__qualname__ = getattr(original, "__qualname__", "forward")
        self.__module__ = getattr(original, "__module__", __name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the module."""
        patched = self._patched
        return patched._forward_routing(self.__wrapped__, self._module(), args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward this proxy stands for."""
        return types.MethodType(self._function, self._module()) if self._is_method else self._function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        if name in ("_function", "_module", "_is_method", "_patched"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"<tuned forward of {self.__wrapped__!r}>"


class PlainState:
    """Stands in a patched module's dictionary as ``__getstate__``: copies and pickles see the plain module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        """The module's state without what patching added."""
        module = self._module()
        own = getattr(type(module), "__getstate__", None)
        if own is None or own is getattr(object, "__getstate__", None):
            state: Any = dict(vars(module))
        else:
            state = own(module)
        if isinstance(state, dict):
            drop = {key for key, value in state.items() if isinstance(value, PlainState)}
            drop |= {"forward"} if isinstance(state.get("forward"), ForwardProxy) else set()
            state = {key: value for key, value in state.items() if key not in drop}
        return state
