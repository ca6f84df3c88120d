"""Containers and helper objects that hang on modules, and how they looked.

A :class:`Cell` remembers what one dictionary, list or set holds; :class:`HelperWalk` finds those that hang on a module
and can be changed in place: configs, attention processors, lists of flags, modules held outside the tree.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from aitune_hf.graph.attribute_names import is_identity
from aitune_hf.jit.forward_proxy import ForwardProxy, PlainCopy, PlainState

__all__ = ["Cell", "HelperWalk", "ModuleCell", "QuickLook"]

#: Equal values of these types are interchangeable, or identical.
_STRICT = (str, bytes, type(None), dict, list, set, nn.Module, type, types.FunctionType, torch.dtype)

#: As deep as the hierarchy hash looks.
_DEPTH = 6
_LEAVES = (
    str, bytes, int, float, complex, bool, type(None), enum.Enum, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip
#: torch types that hold settings of a computation; the others hold handles, ids and counters.
_TORCH_SETTINGS = ("torch.nn.", "torch.distributions.", "torch.ao.")


class Cell:
    """One dictionary, list, set or deque and what it held. Compared by identity first, then by equality and type."""

    __slots__ = ("_keys", "_raw", "_saved", "live", "path")

    def __init__(self, path: str, live: Any) -> None:
        self.path = path
        self.live = live
        self._saved = self._look()
        self._keys: list[Any] | None = None
        self._raw: list[Any] = []
        self._remember()

    def _look(self) -> Any:
        return self.live.copy()

    def _remember(self) -> None:
        live = self.live
        if isinstance(live, dict):
            self._keys, self._raw = list(live), list(live.values())
        else:
            self._raw = list(live)

    def same(self) -> bool:
        """True while it holds what it held. What cannot be compared has changed."""
        live, raw, keys = self.live, self._raw, self._keys
        try:
            if len(live) == len(raw):
                if keys is None:
                    if all(map(is_, live, raw)):
                        return True
                elif all(map(is_, live.values(), raw)) and list(live) == keys:
                    return True
            if not _equal(self._look(), self._saved):
                return False
            self._remember()  # Equal but not identical: be quick again next time.
        except Exception:  # noqa: BLE001 - a foreign __eq__ may raise anything; "changed" is the safe answer.
            return False
        return True

    def difference(self) -> str:
        """Where it first differs from what it held."""
        now, then = self._look(), self._saved
        if not isinstance(now, dict):
            return self.path
        for key in {**then, **now}:
            try:
                if key not in now or key not in then or not _equal(now[key], then[key]):
                    return f"{self.path}.{key}"
            except Exception:  # noqa: BLE001 - as above.
                return f"{self.path}.{key}"
        return self.path


class ModuleCell(Cell):
    """The attribute dictionary of a module, without what this package and, on the root, hook libraries keep there."""

    #: Ours, and what tells only how a model is called by others.
    SKIPPED = frozenset(
        {
            "forward", "__getstate__", "__deepcopy__", "_aitune_config", "generation_config", "hf_device_map",
            "_is_torch_compile", "_compiled_call_impl", "_output_capturing_hooks_installed",
        }
    )  # fmt: skip
    __slots__ = ("_class", "_skip")

    def __init__(self, path: str, live: dict[str, Any], cls: type, skip: frozenset[str]) -> None:
        self._class = cls
        self._skip = skip
        super().__init__(path, live)

    def _look(self) -> dict[str, Any]:
        skipped = self.SKIPPED | self._skip
        looked = {key: value for key, value in self.live.items() if key not in skipped}
        forward = self.live.get("forward")
        if isinstance(forward, ForwardProxy):
            forward = forward.foreign
        elif getattr(forward, "__func__", None) is getattr(self._class, "forward", None):
            forward = None  # Hook libraries give the class's own method back by writing it to the instance.
        if forward is not None and not self._skip:  # On the root it is the seat's business.
            looked["forward"] = forward
        return looked


class ConfigCell(Cell):
    """A config's dictionary, without what only names or documents the model (saving it writes such entries)."""

    __slots__ = ()

    def _look(self) -> dict[Any, Any]:
        items = self.live.items()
        return {key: value for key, value in items if not (isinstance(key, str) and is_identity(key, config=True))}


class SlotCell(Cell):
    """An object that keeps its attributes in slots."""

    __slots__ = ()

    def _look(self) -> dict[str, Any]:
        return {name: getattr(self.live, name) for name in slots_of(type(self.live)) if hasattr(self.live, name)}

    def _remember(self) -> None:
        self._keys, self._raw = None, []

    def same(self) -> bool:
        """True while every slot holds what it held."""
        try:
            return _equal(self._look(), self._saved)
        except Exception:  # noqa: BLE001 - as in Cell.same.
            return False


class QuickLook:
    """All containers of a guard at once: what every call of a tuned module pays for."""

    def __init__(self, cells: list[Cell]) -> None:
        self._dicts = [cell.live for cell in cells if isinstance(cell.live, dict)]
        self._lists = [cell.live for cell in cells if isinstance(cell.live, (list, deque))]
        self._others = [cell for cell in cells if not isinstance(cell.live, (dict, list, deque))]
        self.take()

    def take(self) -> None:
        """Remember what the containers hold now."""
        self._copies = [dict(live) for live in self._dicts]
        # Equality of dictionaries is quick, as equal objects are mostly identical. Where a value is equal to one that
        # computes something else (1 to True and 1.0, a tensor of one element to another), it must be the same object.
        loose = [(live, [key for key, value in live.items() if not isinstance(value, _STRICT)]) for live in self._dicts]
        self._loose = [(itemgetter(*keys, keys[0]), live) for live, keys in loose if keys]
        self._loose_values = list(self._look_loose())
        self._items = [list(live) for live in self._lists]

    def _look_loose(self) -> Iterator[Any]:
        return chain.from_iterable([get(live) for get, live in self._loose])

    def same(self) -> bool:
        """True while all hold the very same things; False may also mean that they are merely equal."""
        try:
            if self._dicts != self._copies or not all(map(is_, self._look_loose(), self._loose_values)):
                return False
            for live, items in zip(self._lists, self._items, strict=True):
                if len(live) != len(items) or not all(map(is_, live, items)):
                    return False
            return all(cell.same() for cell in self._others)
        except Exception:  # noqa: BLE001 - changed by another thread under our eyes, or a foreign __eq__.
            return False


def slots_of(kind: type) -> list[str]:
    """Names of the slots of a class and of its bases."""
    found = []
    for cls in kind.__mro__:
        slots = cls.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _equal(a: Any, b: Any) -> bool:
    """Equality that tells ``1`` from ``True`` and ``1.0``, and takes tensors and modules by identity."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b) or isinstance(a, (torch.Tensor, nn.Module)):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(key in b and _equal(value, b[key]) for key, value in a.items())
    if kind in (list, tuple, deque):
        return len(a) == len(b) and all(map(_equal, a, b))
    if kind is float:
        return bool(a.hex() == b.hex())
    return bool(a == b)


class HelperWalk:
    """Finds what hangs on modules. Each object is entered once."""

    def __init__(
        self,
        cells: list[Cell],
        tensors: list[tuple[str, torch.Tensor]],
        on_module: Callable[[str, nn.Module], object],
    ) -> None:
        self._cells = cells
        self._tensors = tensors
        self._on_module = on_module
        # The objects are kept beside their ids for the time of the walk, so that nothing else takes an id.
        self._seen: dict[int, Any] = {}

    def enters(self, value: Any) -> bool:
        """True the first time it is asked about an object."""
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def add(self, path: str, value: Any, depth: int = _DEPTH, *, config: bool = False) -> None:
        """Take up ``value``, and what hangs on it.

        Args:
            config: it is part of a model's configuration.
        """
        if isinstance(value, _LEAVES) or not self.enters(value):
            return
        if isinstance(value, torch.Tensor):
            self._tensors.append((path, value))
        elif isinstance(value, nn.Module):
            # Held by the tree without being part of it: a list of modules, a processor's own module.
            del self._seen[id(value)]
            self._on_module(path, value)
        elif depth > 0:
            config = config or _is_config(path, value)
            for container in _containers(value):
                is_config = config and isinstance(container, dict)
                self._cells.append(ConfigCell(path, container) if is_config else Cell(path, container))
            if _is_helper(type(value)) and slots_of(type(value)):
                self._cells.append(SlotCell(path, value))
            for key, child in _children(value):
                self.add(f"{path}.{key}", child, depth - 1, config=config)


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, set, deque)):
        yield value
    if _is_helper(type(value)):
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            yield state


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    if _is_helper(type(value)):
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            yield from list(state.items())
        yield from ((slot, getattr(value, slot)) for slot in slots_of(type(value)) if hasattr(value, slot))


def _is_config(path: str, value: Any) -> bool:
    name = path.rpartition(".")[2]
    return name in ("config", "_internal_dict") or name.endswith("_config") or type(value).__name__.endswith("Config")


def _is_helper(kind: type) -> bool:
    """Whether objects of ``kind`` hold settings; loggers, locks, handles and hooks of libraries do not."""
    if kind is types.SimpleNamespace:
        return True
    if kind in (ForwardProxy, PlainCopy, PlainState):
        return False
    name = kind.__module__
    if name.partition(".")[0] == "torch":
        return name.startswith(_TORCH_SETTINGS)
    return name.partition(".")[0] not in sys.stdlib_module_names
