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
from aitune_hf.jit.dormant_hooks import collecting, is_dormant
from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.forward_seat import foreign_forward, has_forward_wrapper
from aitune_hf.jit.helpers_seen import Cell, HelperWalk, ModuleCell, QuickLook

__all__ = ["ModuleGuard", "inner_hook"]

Values = list["torch.Tensor | None"]
#: Identities of all parameters and buffers, which of them are not None, the memory of those, and the first one's device.
Places = tuple[list[int], list[bool], list[Any], "torch.device | None"]

#: Kept on the root by hook libraries: its hooks fire around the engine.
_ROOT_KEYS = frozenset({"_hf_hook", "_old_forward", "_diffusers_hook", "_forward_hooks", "_forward_pre_hooks"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_dict_values: Callable[[Any], Any] = dict.values
_hooks, _pre_hooks = operator.itemgetter("_forward_hooks"), operator.itemgetter("_forward_pre_hooks")
_size: Callable[[torch.Tensor], Any] = torch.Tensor.size
_dtype = operator.attrgetter("dtype")
_stride: Callable[[torch.Tensor], Any] = torch.Tensor.stride
_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
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
        if any(_foreign_count(child.__dict__[hooks]) for hooks in _HOOKS):
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
        self._states: list[tuple[str, dict[str, Any]]] = []
        self._hookable: list[dict[str, Any]] = []
        self._helper_tensors: list[tuple[str, torch.Tensor]] = []
        self._kinds: list[type] = []
        self._watch_versions = watch_versions
        self._walk = HelperWalk(self._cells, self._helper_tensors, self._add_tree)
        self._add_tree("", module, is_root=True)
        del self._walk  # It knows the modules themselves, and a guard must not keep its module alive.
        self._quick = QuickLook(self._cells)
        self._hook_counts, self._foreign_counts = self._count_hooks(len), self._count_hooks(_foreign_count)
        self._unhooked = not any(self._hook_counts)
        self._may_collect = any(kind.__module__.partition(".")[0] == "transformers" for kind in self._kinds)
        self._forwards = list(map(_class_forward, self._kinds))
        # Tables that are empty now are watched by their length alone.
        self._tables = [(path, name) for path, name, table in self._all_tables() if table]
        self._filled = [table for _, _, table in self._all_tables() if table]
        self._empty = [table for _, _, table in self._all_tables() if not table]
        self._names = list(chain.from_iterable(self._filled))
        values = self.values()
        self._layout = self._read_layout(values)
        self._absent = [index for index, value in enumerate(values) if value is None]
        self._layout_check = _layout_check(values)
        self._helper_state = self._read_helpers()
        self._default_dtype = _get_default_dtype()
        self._default_device = _default_device()
        self.accept_weights(self.weights_now())

    def _all_tables(self) -> list[tuple[str, str, dict[str, Any]]]:
        return [(path, kind, state[kind]) for path, state in self._states for kind in ("_parameters", "_buffers")]

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
        self._states.append((here, state))
        if not is_root:
            self._hookable.append(state)
        for key, value in state.items():
            if key not in ModuleCell.SKIPPED | _ROOT_KEYS | _NN_INTERNALS:
                self._walk.add(f"{here}.{key}", value)

    # -- structure -----------------------------------------------------------------------------------------------------

    def structure_change(self, values: Values | None = None) -> str | None:
        """None if all is as it was, else a sentence that names the first thing that is not.

        Args:
            values: what :meth:`values` gives, to save asking twice.
        """
        values = self.values() if values is None else values
        if global_module_hooks_active():
            return "a global module hook is registered"
        if not self._quick.same():
            change = self._cell_change()
            if change is not None:
                return change
        if not self._has_hooks_as_before():
            if self._count_hooks(_foreign_count) != self._foreign_counts:
                return f"{self._changed_hooks()} changed after tuning"
            self._hook_counts = self._count_hooks(len)
            self._unhooked = not any(self._hook_counts)
        if not all(map(operator.is_, map(_class_forward, self._kinds), self._forwards)):
            return "the forward of a class changed after tuning"
        return self._tensor_change(values) or self._default_change()

    def _cell_change(self) -> str | None:
        """The first container that does not hold what it held; None if all are equal, though not identical."""
        for cell in self._cells:
            if not cell.same():
                return f"{cell.difference()} changed after tuning"
        self._quick.take()
        return None

    def collecting(self) -> bool:
        """True while somebody around wants what inner modules compute. To be asked at every call."""
        return self._may_collect and collecting()

    def _count_hooks(self, count: Callable[[dict[Any, Any]], int]) -> list[int]:
        states = self._hookable
        return [*map(count, map(_hooks, states)), *map(count, map(_pre_hooks, states))]

    def _has_hooks_as_before(self) -> bool:
        states = self._hookable
        if self._unhooked:
            return not (any(map(_hooks, states)) or any(map(_pre_hooks, states)))
        return self._count_hooks(len) == self._hook_counts

    def _changed_hooks(self) -> str:
        paths = [path for path, state in self._states if any(state is other for other in self._hookable)]
        names = [f"{path}.{kind}" for kind in _HOOKS for path in paths]
        pairs = zip(names, self._count_hooks(_foreign_count), self._foreign_counts, strict=True)
        return next((name for name, now, then in pairs if now != then), "a hook")

    def _tensor_change(self, values: Values) -> str | None:
        if any(self._empty) or list(chain.from_iterable(self._filled)) != self._names:
            return "the names of parameters or buffers changed after tuning"
        if not self._has_layout(values):
            if self._read_layout(values) != self._layout:
                return f"{self._changed_layout(values)} changed its shape, strides or dtype after tuning"
            self._layout_check = _layout_check(values)  # It was made in another mode.
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

    def _has_layout(self, values: Values) -> bool:
        """A quick yes; False says nothing."""
        check = self._layout_check
        if check is None or (self._absent and any(values[index] is not None for index in self._absent)):
            return False
        try:
            return check(*filter(_is_present, values)) if self._absent else check(*values)
        except (TypeError, RuntimeError):  # None where a tensor was, or a number of tensors that does not fit.
            return False

    def _read_layout(self, values: Values) -> tuple[list[Any], ...]:
        tensors = [value for value in values if value is not None]
        shapes, strides, dtypes = map(_size, tensors), map(_stride, tensors), map(_dtype, tensors)
        return [value is None for value in values], list(shapes), list(strides), list(dtypes)

    def _changed_layout(self, values: Values) -> str:
        now, then = self._read_layout(values), self._layout
        if now[0] != then[0]:
            return "a parameter or buffer that is None, or was,"
        paths = [path for (path, _), table in zip(self._tables, self._filled, strict=True) for _ in table]
        named = zip(paths, self._names, values, strict=True)
        names = [f"{path}.{name}" for path, name, value in named if value is not None]
        pairs = zip(names, zip(*now[1:], strict=True), zip(*then[1:], strict=True), strict=True)
        return next((name for name, new, old in pairs if new != old), "a parameter or buffer")

    def _read_helpers(self) -> list[Any]:
        return [(tensor.data_ptr(), tensor.shape, _version(tensor)) for _, tensor in self._helper_tensors]

    # -- weights -------------------------------------------------------------------------------------------------------

    def values(self) -> Values:
        """The parameters and buffers of the tree, as they are now."""
        return list(chain.from_iterable(map(_dict_values, self._filled)))

    def weights_moved(self, values: Values | None = None) -> bool:
        """True while a parameter or buffer lies on another storage than at the last :meth:`accept_weights`."""
        values = self.values() if values is None else values
        ids, present, places, _ = self._accepted  # Read once: another thread may replace it.
        if list(map(id, values)) != ids:
            return True
        tensors: Any = compress(values, present)
        if not self._watch_versions:  # Most engines; the quickest way.
            return list(map(_data_ptr, tensors)) != places
        return self._places_of(list(tensors)) != places

    def weights_now(self) -> Places:
        """Where the weights are, for :meth:`accept_weights`."""
        values = self.values()
        places = self._places_of([value for value in values if value is not None])
        return list(map(id, values)), [value is not None for value in values], places, self._device()

    def _places_of(self, tensors: list[Any]) -> list[Any]:
        pointers = list(map(_data_ptr, tensors))
        if not self._watch_versions:
            return pointers
        try:
            return [pointers, list(map(_version_of, tensors))]
        except RuntimeError:  # Made in inference mode, some of them.
            return [pointers, list(map(_version, tensors))]

    def accept_weights(self, places: Places) -> None:
        """Take these places of the weights as the known ones."""
        self._accepted = places

    def weights_left(self) -> bool:
        """True while the first of the weights is on another device than at the last :meth:`accept_weights`.

        Costs next to nothing, and whoever moves a module moves all of it.
        """
        return self._device() != self._accepted[3]

    def _device(self) -> torch.device | None:
        weights = chain.from_iterable(map(_dict_values, self._filled))
        return next((value.device for value in weights if value is not None), None)

    def unwatchable(self) -> bool:
        """True if a weight's in-place edits leave no trace (it was made in inference mode)."""
        return any(value is not None and value.is_inference() for value in self.values())

    def needs_grad(self) -> bool:
        """True if any parameter, buffer or tensor attribute asks for a gradient."""
        if any(value is not None and value.requires_grad for value in self.values()):
            return True
        return any(tensor.requires_grad for _, tensor in self._helper_tensors)


def _is_present(value: torch.Tensor | None) -> bool:
    return value is not None


def _layout_check(values: Values) -> Callable[..., bool] | None:
    """Torch's own check of shapes, strides and dtypes in one call, where this torch has it. Keeps no tensor alive.

    It also compares what modes do to a tensor, so it may say no where nothing has changed, but never yes where
    something has.
    """
    tensors = [value for value in values if value is not None]
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        sizes = [list(tensor.size()) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except Exception:  # noqa: BLE001 - a private part of torch; the check in Python gives the same answer.
        return None
    return check


def _foreign_count(hooks: dict[Any, Any]) -> int:
    return sum(not is_dormant(hook) for hook in hooks.values())


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _default_device() -> str | None:
    """The device that ``torch.set_default_device`` or a ``with torch.device(...)`` has set, or None."""
    return str(torch.get_default_device()) if _functions_active() else None


_NN_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
