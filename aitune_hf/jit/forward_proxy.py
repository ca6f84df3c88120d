"""The one callable that stands in a module's forward seat for as long as the module is patched."""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from aitune_hf.jit.patched_module import PatchedModule

__all__ = ["ForwardProxy", "PlainCopy", "PlainState"]

_is_compiling = torch.compiler.is_compiling
_PRIVATE = ("_follows_class", "_function", "_is_method", "_module", "_patched")


class ForwardProxy:
    """Routes calls of a module's forward to its :class:`PatchedModule`.

    It looks like the forward it stands for (signature, docstring, name, ``__self__``, ``__func__``) and never changes, so
    that references to it held elsewhere stay right. Copies and pickles of it are the plain forward of the copied module.
    It does not keep the module alive: the module owns the proxy, the proxy owns the :class:`PatchedModule`.
    """

    # What is our own stays out of ``__dict__``, which ``functools.update_wrapper`` copies to other callables.
    __slots__ = (*_PRIVATE, "__dict__", "__weakref__")

    def __init__(self, patched: PatchedModule, module: nn.Module, original: Callable[..., Any]) -> None:
        self._patched = patched
        self._module = weakref.ref(module)
        # A method bound to the module is kept unbound: the bound one would keep the module alive in a cycle.
        self._is_method = isinstance(original, types.MethodType) and original.__self__ is module
        function: Any = getattr(original, "__func__", None) if self._is_method else original
        self._function: Callable[..., Any] = function
        # The class's own forward is looked up at each call: somebody may replace it there.
        self._follows_class = self._is_method and function is getattr(type(module), "forward", None)
        self.__doc__ = original.__doc__
        self.__name__ = getattr(original, "__name__", "forward")
        self.__qualname__ = getattr(original, "__qualname__", "forward")
        self.__module__ = getattr(original, "__module__", __name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the module."""
        if _is_compiling():  # torch.compile and torch.export see the plain forward, in words that they understand.
            module: Any = self._module()
            if self._follows_class:
                return type(module).forward(module, *args, **kwargs)
            return self._function(module, *args, **kwargs) if self._is_method else self._function(*args, **kwargs)
        wrapped = self.__wrapped__
        return self._patched._forward_router(wrapped, self._module(), args, kwargs)  # type: ignore[arg-type]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward this proxy stands for.

        Raises:
            ReferenceError: if the module does not exist any more.
        """
        if not self._is_method:
            return self._function
        module = self._module()
        if module is None:
            raise ReferenceError(f"the module of this {self.__qualname__} no longer exists; keep the module, not this")
        return types.MethodType(type(module).forward if self._follows_class else self._function, module)

    @property
    def foreign(self) -> Callable[..., Any] | None:
        """The forward it stands for, unless that is the class's own."""
        return None if self._follows_class else self._function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        if name in _PRIVATE:
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
        # Before Python 3.11 ``object`` has none, and the state of an object without one is its dictionary.
        state: Any = dict(vars(module)) if own is None else own(module)
        if isinstance(state, tuple) and state and isinstance(state[0], dict):
            return (_plain(state[0]), *state[1:])
        return _plain(state) if isinstance(state, dict) else state

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainState:
        # Reached where a copy takes over the dictionary as it is: it must not give the original's state.
        module = self._module()
        twin = memo.get(id(module), module)
        return PlainState(twin) if isinstance(twin, nn.Module) else self


class PlainCopy:
    """Stands in a patched module's dictionary as ``__deepcopy__`` where the class has its own way of being copied."""

    def __init__(self, module: nn.Module, lifted: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
        self._module = weakref.ref(module)
        self._lifted = lifted

    def __call__(self, memo: dict[int, Any]) -> Any:
        """The class's own copy of the plain module."""
        module: Any = self._module()
        with self._lifted(module):
            return type(module).__deepcopy__(module, memo)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    drop = {key for key, value in state.items() if isinstance(value, (PlainState, PlainCopy))}
    drop |= {"forward"} if isinstance(state.get("forward"), ForwardProxy) else set()
    return {key: value for key, value in state.items() if key not in drop}
