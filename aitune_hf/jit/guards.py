"""Has the module changed since it was tuned?

An engine stands for the module as it was. Whatever can be switched on a live module without a trace in its call (a flag,
an attention processor, FreeU factors, tiling, a config entry, a hook on an inner module, a swapped child or forward,
weights of another layout) must be seen before an engine answers. A guard remembers what every attribute dictionary in the
module tree holds and compares by identity, so a check costs about a microsecond per module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain, compress
from typing import Any

import torch
from torch import nn

from aitune_hf.graph.torch_state import global_module_hooks_active
from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.forward_seat import foreign_forward, has_forward_wrapper
from aitune_hf.jit.helpers_seen import Cell, HelperWalk, ModuleCell

__all__ = ["ModuleGuard", "inner_hook"]

#: Kept on the root by hook libraries: its hooks fire around the engine.
_ROOT_KEYS = frozenset({"_hf_hook", "_old_forward", "_diffusers_hook", "_forward_hooks", "_forward_pre_hooks"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_class_forward = operator.attrgetter("forward")
_get_default_dtype = torch.get_default_dtype
_functions_active: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


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


class ModuleGuard:
    """The structure of a module tree and where its weights are, as they were when the guard was made.

    Weights themselves are not kept alive: a module that is offloaded must be able to let go of them.
    """

    def __init__(self, module: nn.Module, *, watch_versions: bool = False) -> None:
        """Make one.

        Args:
            watch_versions: an in-place edit of a weight counts as a move (for engines that hold a copy).
        """
        self._cells: list[Cell] = []
        self._hooks: list[tuple[str, dict[Any, Any], int]] = []
        self._tables: list[tuple[str, dict[str, torch.Tensor | None]]] = []
        self._helper_tensors: list[tuple[str, torch.Tensor]] = []
        self._kinds: list[type] = []
        self._watch_versions = watch_versions
        self._walk = HelperWalk(self._cells, self._helper_tensors, self._add_tree)
        self._add_tree("", module, is_root=True)
        self._forwards = list(map(_class_forward, self._kinds))
        self._values = [table for _, table in self._tables]
        self._layout = self._read_layout()
        self._helper_state = self._read_helpers()
        self._default_dtype = _get_default_dtype()
        self._default_device = _default_device()
        self.accept_weights()
        del self._walk  # It knows the modules themselves, and a guard must not keep its module alive.

    def _add_tree(self, prefix: str, root: nn.Module, is_root: bool = False) -> None:
        for name, child in root.named_modules():
            if self._walk.enters(child):
                path = ".".join(part for part in (prefix, name) if part)
                self._add_module(path, child, is_root=is_root and child is root)

    def _add_module(self, name: str, module: nn.Module, is_root: bool) -> None:
        state = module.__dict__
        here = name or "<module>"
        if type(module) not in self._kinds:
            self._kinds.append(type(module))
        self._cells.append(ModuleCell(here, state, type(module), _ROOT_KEYS if is_root else frozenset()))
        self._cells.append(Cell(here, state["_modules"]))
        if not is_root:
            self._hooks += [(f"{here}.{hooks}", state[hooks], len(state[hooks])) for hooks in _HOOKS]
        self._tables += [(here, state["_parameters"]), (here, state["_buffers"])]
        for key, value in state.items():
            if key not in ModuleCell.SKIPPED | _ROOT_KEYS | _NN_INTERNALS:
                self._walk.add(f"{here}.{key}", value)

    # -- structure -----------------------------------------------------------------------------------------------------

    def structure_change(self) -> str | None:
        """None if all is as it was, else a sentence that names the first thing that is not."""
        if global_module_hooks_active():
            return "a global module hook is registered"
        for cell in self._cells:
            if not cell.same():
                return f"{cell.difference()} changed after tuning"
        for path, hooks, count in self._hooks:
            if len(hooks) != count:
                return f"{path} changed after tuning"
        if not all(map(operator.is_, map(_class_forward, self._kinds), self._forwards)):
            return "the forward of a class changed after tuning"
        return self._tensor_change() or self._default_change()

    def _tensor_change(self) -> str | None:
        if self._read_layout() != self._layout:
            return f"{self._changed_layout()} changed its shape, strides or dtype after tuning"
        if self._helper_tensors and self._read_helpers() != self._helper_state:
            return "a tensor that is an attribute, no parameter or buffer, changed after tuning"
        return None

    def _default_change(self) -> str | None:
        if _get_default_dtype() is not self._default_dtype:
            return "torch's default dtype is another than while tuning"
        if _functions_active() and _default_device() != self._default_device:
            return "torch's default device is another than while tuning"
        if self._default_device is not None and not _functions_active():
            return "torch's default device is another than while tuning"
        return None

    def _read_layout(self) -> list[Any]:
        found: list[Any] = []
        for table in self._values:
            for name, value in table.items():
                found.append(name if value is None else (name, value.shape, value.stride(), value.dtype))
        return found

    def _changed_layout(self) -> str:
        names = [f"{path}.{name}" for path, table in self._tables for name in table]
        pairs = zip(names, self._read_layout(), self._layout, strict=False)
        return next((name for name, now, then in pairs if now != then), "a parameter or buffer")

    def _read_helpers(self) -> list[Any]:
        return [(tensor.data_ptr(), tensor.shape, _version(tensor)) for _, tensor in self._helper_tensors]

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights_moved(self) -> bool:
        """True while a parameter or buffer lies on another storage than at the last :meth:`accept_weights`."""
        values = list(chain.from_iterable([table.values() for table in self._values]))
        if list(map(id, values)) != self._ids:
            return True
        tensors: Any = compress(values, self._present)
        if not self._watch_versions:
            return list(map(_data_ptr, tensors)) != self._places
        return [(_data_ptr(tensor), _version(tensor)) for tensor in tensors] != self._places

    def accept_weights(self) -> None:
        """Take the weights' present places as the known ones."""
        values = list(chain.from_iterable([table.values() for table in self._values]))
        tensors = [value for value in values if value is not None]
        self._present = [value is not None for value in values]
        self._places: list[Any] = (
            [(_data_ptr(tensor), _version(tensor)) for tensor in tensors]
            if self._watch_versions
            else list(map(_data_ptr, tensors))
        )
        self._ids = list(map(id, values))

    def unwatchable(self) -> bool:
        """True if a weight's in-place edits leave no trace (it was made in inference mode)."""
        return any(value is not None and value.is_inference() for table in self._values for value in table.values())

    def needs_grad(self) -> bool:
        """True if any parameter, buffer or tensor attribute asks for a gradient."""
        values = chain.from_iterable([table.values() for table in self._values])
        if any(value is not None and value.requires_grad for value in values):
            return True
        return any(tensor.requires_grad for _, tensor in self._helper_tensors)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _default_device() -> str | None:
    """The device that ``torch.set_default_device`` or a ``with torch.device(...)`` has set, or None."""
    return str(torch.get_default_device()) if _functions_active() else None


_NN_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
