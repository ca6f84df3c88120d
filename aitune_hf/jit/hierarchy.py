"""The call hierarchy: who called whom, by what name, and how it is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from aitune_hf.jit.module_state import ModuleState

if TYPE_CHECKING:
    from aitune_hf.jit.patched_module import PatchedModule

__all__ = ["PRINT_HIERARCHY_HEADER", "PRINT_HIERARCHY_NO_MODULES_HEADER", "print_hierarchy", "unique_name", "walk"]

PRINT_HIERARCHY_HEADER = "JIT Tuning Hierarchy:"
PRINT_HIERARCHY_NO_MODULES_HEADER = "No modules in hierarchy"

#: How a state is shown. The name is the reference system's; this package prints plain text.
_emoji_state = {
    ModuleState.INIT: "...",
    ModuleState.RECORDING: "rec",
    ModuleState.TUNED: "on ",
    ModuleState.EAGER: "off",
    ModuleState.SKIPPED: "skp",
    ModuleState.DETACHED: " - ",
}


def unique_name(name: str, parent: str | None, taken: Counter[str]) -> str:
    """``parent.name``, with ``#1``, ``#2``… from the second use of the same path on."""
    path = f"{parent}.{name}" if parent else name
    count = taken[path]
    taken[path] += 1
    return path if count == 0 else f"{path}#{count}"


def walk(heads: Iterable[PatchedModule]) -> Iterator[PatchedModule]:
    """Every module of the hierarchy once, callers before callees."""
    seen: set[int] = set()
    stack = list(reversed(list(heads)))
    while stack:
        patched = stack.pop()
        if id(patched) not in seen:
            seen.add(id(patched))
            yield patched
            stack.extend(reversed(patched.children))


def print_hierarchy(heads: Iterable[PatchedModule], sink: Callable[[str], object] = print) -> None:
    """Print each module of the hierarchy, indented by level."""
    heads = list(heads)
    if not heads:
        sink(PRINT_HIERARCHY_NO_MODULES_HEADER)
        return
    sink(PRINT_HIERARCHY_HEADER)
    for patched in walk(heads):
        sink(f"[{_emoji_state[patched.state]}] {'  ' * max(patched.level, 0)}{patched}")
