"""Puts modules under observation, and takes them out again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.forward_seat import ForwardSeat
from aitune_hf.jit.patch_policy import patchable
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.session import TuningSession, current_session

__all__ = ["Patcher", "patched_modules", "patched_of", "unpatch_tree"]


def patched_of(module: nn.Module) -> PatchedModule | None:
    """The :class:`PatchedModule` of a module, or None if it is not patched."""
    forward = ForwardSeat.find(module).read()
    return forward._patched if isinstance(forward, ForwardProxy) else None


def patched_modules(root: nn.Module) -> Iterator[PatchedModule]:
    """Every patched module of a tree."""
    for module in root.modules():
        patched = patched_of(module)
        if patched is not None:
            yield patched


def unpatch_tree(root: nn.Module) -> None:
    """Leave a module tree as it was before anything of it was patched."""
    for patched in list(patched_modules(root)):
        patched._unpatch()


class Patcher:
    """Patches modules for one session.

    Modules stay patched after the patcher is gone; :func:`unpatch_tree` undoes it.
    """

    def __init__(self, session: TuningSession | None = None) -> None:
        self.session = session or current_session()

    def patch(self, module: nn.Module, path: str = "") -> PatchedModule:
        """Patch one module, whatever its class. One that is patched already keeps its patch and session."""
        patched = patched_of(module)
        return patched if patched is not None else PatchedModule(module, self.session, path)

    def patch_tree(self, root: nn.Module, path: str = "") -> list[PatchedModule]:
        """Patch ``root`` and all modules below it that the configuration does not exclude."""
        return [self.patch(module, name) for name, module in patchable(root, self.session.config, path)]

    def patch_all(self, roots: Iterable[tuple[str, nn.Module]]) -> list[PatchedModule]:
        """:meth:`patch_tree` for several named roots."""
        return [patched for path, root in roots for patched in self.patch_tree(root, path)]
