"""Which candidates to try for a graph, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from aitune_hf.backends.base import Backend, Recipe
from aitune_hf.config import Effort, TuneConfig
from aitune_hf.tuning.hints import RecipeHint
from aitune_hf.tuning.results import CandidateResult, label_of

__all__ = ["Candidate", "Candidates", "candidates_for"]

_EFFORTS: tuple[Effort, ...] = get_args(Effort)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A backend and one way in which it can build.

    Attributes:
        hinted: it won elsewhere, so it is tried first.
    """

    backend: Backend
    recipe: Recipe
    hinted: bool = False

    @property
    def label(self) -> str:
        """Backend and options, for people."""
        return label_of(self.backend.name, self.recipe.options)

    def result(self, outcome: str, reason: str = "") -> CandidateResult:
        """What came of it."""
        return CandidateResult(
            backend=self.backend.name,
            outcome=outcome,
            reason=reason,
            options=dict(self.recipe.options),
            weights=self.recipe.weights,
            lossy=self.recipe.lossy,
        )


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What to try, in order, and what came of those that cannot be tried at all."""

    to_try: Sequence[Candidate]
    out: Sequence[CandidateResult]


def candidates_for(
    backends: Sequence[Backend],
    device: torch.device,
    config: TuneConfig,
    *,
    portable: bool = False,
    hints: Sequence[RecipeHint] = (),
) -> Candidates:
    """All recipes that the settings allow: hinted ones first, then strict before lossy ones, the cheapest first.

    A hint only ever picks one of the recipes that a backend itself offers: its options go nowhere else.

    Args:
        portable: ask native backends for engines that run on other machines too.
        hints: what won elsewhere; of any effort, but not lossy where precision is strict.
    """
    found: list[Candidate] = []
    out: list[CandidateResult] = []
    for backend in backends:
        reason, recipes = _offer(backend, device)
        if reason is not None:
            out.append(CandidateResult(backend=backend.name, outcome="unavailable", reason=reason))
        for recipe in recipes if reason is None else ():
            hinted = any(hint.names(backend, recipe) for hint in hints)
            if _is_allowed(recipe, config, hinted):
                options = {**recipe.options, "portable": True} if portable and backend.native else recipe.options
                found.append(Candidate(backend=backend, recipe=replace(recipe, options=options), hinted=hinted))
    found.sort(key=lambda one: (not one.hinted, one.recipe.lossy, one.recipe.cost))
    return Candidates(to_try=found, out=out)


def _is_allowed(recipe: Recipe, config: TuneConfig, hinted: bool) -> bool:
    if recipe.lossy and config.precision != "relaxed":
        return False
    return hinted or _EFFORTS.index(recipe.effort) <= _EFFORTS.index(config.effort)


def _offer(backend: Backend, device: torch.device) -> tuple[str | None, Sequence[Recipe]]:
    """Why nothing can be built, or what can."""
    try:
        reason = backend.available()
        recipes: Any = backend.recipes(device) if reason is None else ()
    except Exception as error:  # noqa: BLE001 - code of third parties, which must not stop the others
        return f"its check failed: {type(error).__name__}: {error}", ()
    if reason is None and not recipes:
        reason = f"it has nothing for {device.type}"
    return reason, recipes
