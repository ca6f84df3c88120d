"""Recipes that won elsewhere: plain JSON, worth a try and nothing more.

A cache that is not trusted, or was filled on another kind of machine, gives no engines; what it can still say is which
backend won, with which options. Such a hint decides what is built first here. What is built is checked and timed like
any other candidate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aitune_hf.backends.base import Backend, Recipe
from aitune_hf.cache import LocalStore, canonical_json
from aitune_hf.errors import AITuneError

__all__ = ["RecipeHint", "hint_record_name", "read_hints", "write_hints"]

logger = logging.getLogger("aitune_hf")

SCHEMA = 1
#: Hints beyond this many are not read: each may cost a build.
MAX_HINTS = 8
#: Set by the tuner of each machine itself.
_OWN_OPTIONS = frozenset({"portable"})


@dataclass(frozen=True, kw_only=True)
class RecipeHint:
    """One recipe that won somewhere.

    Attributes:
        backend: its name.
        options: of the backend; a hint whose options no recipe of the backend has is of no use.
        axes: the axes that the engine took in several sizes, as :func:`~aitune_hf.tuning.axes.axes_to_json` gives them, for
            people: which sizes an engine must take is decided by the calls recorded here.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: Any = None

    def names(self, backend: Backend, recipe: Recipe) -> bool:
        """True if it means this recipe."""
        wanted = {name: value for name, value in self.options.items() if name not in _OWN_OPTIONS}
        return self.backend == backend.name and canonical_json(wanted) == canonical_json(recipe.options)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"backend": self.backend, "options": dict(self.options), "axes": self.axes}


def hint_record_name(hierarchy_hash: str, graph_key: str) -> str:
    """The record that holds the hints for one graph."""
    return f"recipes/{hierarchy_hash[:2]}/{hierarchy_hash}/{graph_key[:32]}.json"


def write_hints(
    store: LocalStore, hierarchy_hash: str, graph_key: str, *, source: str, hints: Sequence[RecipeHint]
) -> None:
    """Keep hints for one graph; those that were there are gone.

    Args:
        source: where they come from, such as a repository and its revision.
    """
    record = {"schema": SCHEMA, "source": source, "recipes": [hint.to_dict() for hint in hints]}
    store.write_record(hint_record_name(hierarchy_hash, graph_key), record)


def read_hints(store: LocalStore, hierarchy_hash: str, graph_key: str) -> list[RecipeHint]:
    """The hints for one graph; those that are not of the right form are left out."""
    record: Any = store.read_record(hint_record_name(hierarchy_hash, graph_key)) or {}
    recipes = record.get("recipes")
    if record.get("schema") != SCHEMA or not isinstance(recipes, list):
        return []
    hints = [hint for item in recipes[:MAX_HINTS] if (hint := _parse(item)) is not None]
    if hints:
        logger.debug("%d recipe hints from %r", len(hints), record.get("source"))
    return hints


def _parse(item: Any) -> RecipeHint | None:
    if not isinstance(item, dict) or not isinstance(item.get("backend"), str):
        return None
    options = item.get("options", {})
    if not isinstance(options, dict):
        return None
    try:
        canonical_json(options)
    except AITuneError:
        return None
    return RecipeHint(backend=item["backend"], options=options, axes=item.get("axes"))
