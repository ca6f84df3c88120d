"""Where a leaf sits in a call or in an output."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Locator"]


@functools.total_ordering
@dataclass(frozen=True)
class Locator:
    """Path from the root of a nested structure to one leaf.

    In a call the first step is the parameter's name; then come dict keys (``str``) and positions (``int``):
    ``Locator(("added_cond_kwargs", "text_embeds"))``, ``Locator(("down_block_additional_residuals", 0))``.
    In an output the root is the output itself, so ``Locator(())`` is a bare tensor.
    """

    path: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        text = ""
        for step in self.path:
            if isinstance(step, int):
                text += f"[{step}]"
            elif step.isidentifier():
                text += f".{step}" if text else step
            else:
                text += f"[{step!r}]"
        return text or "<root>"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Locator):
            return NotImplemented
        return _order(self.path) < _order(other.path)

    def child(self, step: str | int) -> Locator:
        """The locator one step further down."""
        return Locator((*self.path, step))

    def get(self, tree: Any) -> Any:
        """Return the leaf of ``tree`` at this path.

        Raises:
            LookupError: if the path does not exist in ``tree``.
        """
        for step in self.path:
            fields = getattr(type(tree), "_fields", ()) if isinstance(tree, tuple) else ()
            indexable = isinstance(tree, Mapping) or (isinstance(tree, (tuple, list)) and isinstance(step, int))
            if indexable:
                tree = tree[step]
            elif step in fields:
                tree = getattr(tree, str(step))
            else:  # Never into a tensor or a string, which could be indexed too.
                raise LookupError(f"no {step!r} on the way to {self}")
        return tree

    def to_json(self) -> list[str | int]:
        """The path as a JSON list."""
        return list(self.path)

    @classmethod
    def from_json(cls, data: Sequence[str | int]) -> Locator:
        """Inverse of :meth:`to_json`."""
        return cls(tuple(data))


def _order(path: tuple[str | int, ...]) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, step, "") if isinstance(step, int) else (1, 0, step) for step in path)
