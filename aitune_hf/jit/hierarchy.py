"""The call hierarchy: who called whom, by what name, and how it is printed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from aitune_hf.jit.module_state import ModuleState

if TYPE_CHECKING:
    from aitune_hf.jit.patched_module import PatchedModule
    from aitune_hf.jit.session import TuningSession

__all__ = [
    "PRINT_HIERARCHY_HEADER",
    "PRINT_HIERARCHY_NO_MODULES_HEADER",
    "print_hierarchy",
    "runs_inside_unseen",
    "unique_name",
    "walk",
]

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


def runs_inside_unseen(module: nn.Module, session: TuningSession) -> bool:
    """True if ``module`` is being called by the forward of a patched module that is not on the stack.

    That happens when another thread looks at the tree without any proxy just when a call begins. Such a module must not
    be taken for a top of the hierarchy.
    """
    patched = {id(other) for other in (one._module() for one in session.modules) if other is not None}
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if owner is not module and id(owner) in patched and isinstance(owner, nn.Module):
            return True
    return False


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
