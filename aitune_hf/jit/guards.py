"""Has the module changed since it was tuned?

An engine stands for the module as it was. Whatever can be switched on a live module without a trace in its call (a flag,
an attention processor, FreeU factors, tiling, a config entry, a hook on an inner module, a swapped child, weights on
another storage) must be seen before an engine answers. A guard keeps a shallow copy of every attribute dictionary in
the module tree and compares by identity first, so a check costs well under a microsecond per module.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from aitune_hf.graph.torch_state import global_module_hooks_active
from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.forward_seat import foreign_forward, has_forward_wrapper

__all__ = ["ModuleGuard", "inner_hook"]

#: Kept in a module's dictionary by us.
OWN_KEYS = frozenset({"forward", "__getstate__"})
#: Kept on the root by hook libraries: its hooks fire around the engine.
_ROOT_KEYS = OWN_KEYS | {"_hf_hook", "_old_forward", "_diffusers_hook"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HELPER_DEPTH = 3
_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type, types.ModuleType)


def inner_hook(module: nn.Module) -> str | None:
    """What would not fire any more if ``module`` became one engine: a sentence, or None.

    That is a hook, or a replaced forward, on any module below it.
    """
    for name, child in module.named_modules():
        if child is module:
            continue
        if any(child.__dict__.get(hooks) for hooks in _HOOKS):
            return f"the inner module {name} has a forward hook"
        if has_forward_wrapper(child):
            return f"the inner module {name} has an accelerate or diffusers hook"
        replaced = foreign_forward(child, ForwardProxy)
        if replaced:
            return f"the forward of the inner module {name} was replaced by {replaced}"
    return None


class _Cell:
    """One dictionary (or other container) and how it looked."""

    __slots__ = ("live", "path", "saved", "skip")

    def __init__(self, path: str, live: Any, skip: frozenset[str] = frozenset()) -> None:
        self.path = path
        self.live = live
        self.skip = skip
        self.saved = self._look()

    def _look(self) -> Any:
        if isinstance(self.live, dict):
            return {key: value for key, value in self.live.items() if key not in self.skip}
        return self.live.copy()

    def same(self) -> bool:
        """Compares by identity first, then by equality; what cannot be compared has changed."""
        try:
            if self.skip and not self.skip.isdisjoint(self.live):
                return bool(self._look() == self.saved)
            return bool(self.live == self.saved)
        except Exception:  # noqa: BLE001 - a foreign __eq__ may raise anything; unequal is the safe answer.
            return False

    def difference(self) -> str:
        now = self._look()
        if not isinstance(now, dict):
            return self.path
        for key in {**self.saved, **now}:
            if key not in now or key not in self.saved:
                return f"{self.path}.{key}"
            try:
                if now[key] is not self.saved[key] and now[key] != self.saved[key]:
                    return f"{self.path}.{key}"
            except Exception:  # noqa: BLE001
                return f"{self.path}.{key}"
        return self.path


class ModuleGuard:
    """The structure of a module tree and where its weights are, as they were when the guard was made."""

    def __init__(self, module: nn.Module) -> None:
        self._cells: list[_Cell] = []
        self._tensor_dicts: list[tuple[str, dict[str, Any], list[int]]] = []
        self._attribute_tensors: list[torch.Tensor] = []
        self._seen: set[int] = set()
        for name, child in module.named_modules():
            self._add_module(name, child, is_root=child is module)
        self._pointers = self._read_pointers()

    def _add_module(self, name: str, module: nn.Module, is_root: bool) -> None:
        state = module.__dict__
        here = name or "<module>"
        self._cells.append(_Cell(here, state, _ROOT_KEYS if is_root else OWN_KEYS))
        self._cells.append(_Cell(here, state["_modules"]))
        if not is_root:
            self._cells.extend(_Cell(f"{here}.{hooks}", state[hooks]) for hooks in _HOOKS)
        for kind in ("_parameters", "_buffers"):
            self._tensor_dicts.append((here, state[kind], [id(value) for value in state[kind].values()]))
        for key, value in state.items():
            if key not in _ROOT_KEYS and key not in _NN_INTERNALS:
                self._add_helper(f"{here}.{key}", value, _HELPER_DEPTH)

    def _add_helper(self, path: str, value: Any, depth: int) -> None:
        """Objects that hang on a module and can be changed in place: configs, processors, lists of flags."""
        if isinstance(value, torch.Tensor):
            self._attribute_tensors.append(value)
            return
        if depth == 0 or isinstance(value, (*_LEAVES, nn.Module, types.FunctionType)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict) or type(value) in (list, set):
            self._cells.append(_Cell(path, value))
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            self._cells.append(_Cell(path, state))
        for key, child in _children(value, state):
            self._add_helper(f"{path}.{key}", child, depth - 1)

    def _read_pointers(self) -> list[int]:
        tensors = [value for _, state, _ in self._tensor_dicts for value in state.values() if value is not None]
        return [tensor.data_ptr() for tensor in (*tensors, *self._attribute_tensors)]

    def structure_change(self) -> str | None:
        """None if all is as it was, else a sentence that names the first attribute that is not."""
        if global_module_hooks_active():
            return "a global module hook is registered"
        for cell in self._cells:
            if not cell.same():
                return f"{cell.difference()} changed after tuning"
        return None

    def weights_moved(self) -> bool:
        """True while a parameter or buffer lies on another storage than at the last :meth:`accept_weights`."""
        for _, state, ids in self._tensor_dicts:
            if [id(value) for value in state.values()] != ids:
                return True
        return self._read_pointers() != self._pointers

    def accept_weights(self) -> None:
        """Take the weights' present places as the known ones."""
        for _, state, ids in self._tensor_dicts:
            ids[:] = [id(value) for value in state.values()]
        self._pointers = self._read_pointers()

    def needs_grad(self) -> bool:
        """True if any parameter asks for a gradient."""
        return any(
            value is not None and value.requires_grad for _, state, _ in self._tensor_dicts for value in state.values()
        )


def _children(value: Any, state: dict[str, Any] | None) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    if state is not None:
        yield from state.items()


_NN_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
