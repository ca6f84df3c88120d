"""What the tests of the tuner share: modules that wait, engines that wait less, and settings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_hf import TuneConfig
from aitune_hf.backends.base import LoadRequest, Recipe
from aitune_hf.backends.testing import FakeBackend, FakeEngine


class Waiting(nn.Module):
    """Takes a while in eager, so that an engine that waits less is faster."""

    def __init__(self, milliseconds: float = 3.0, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.wait = milliseconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wait:
            time.sleep(self.wait / 1e3)
        return torch.relu(self.linear(x)) + 0.5


class Chain(nn.Module):
    """Two of them, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Waiting(2.0)
        self.second = Waiting(2.0, width=8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.second(self.first(x))}


class Quick:
    """An engine in which the waits of the module take another time."""

    def __init__(self, engine: FakeEngine, milliseconds: Any) -> None:
        self._engine, self._milliseconds = engine, milliseconds
        self.rebind, self.close = engine.rebind, engine.close

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        waits = [(part, part.wait) for part in self._engine.module.modules() if isinstance(part, Waiting)]
        wait = self._milliseconds(inputs) if callable(self._milliseconds) else self._milliseconds
        for part, _ in waits:
            part.__dict__["wait"] = wait
        try:
            return self._engine(inputs)
        finally:
            for part, before in waits:
                part.__dict__["wait"] = before


class QuickBackend(FakeBackend):
    """Its engines wait ``milliseconds`` where eager waits longer; by recipe where ``by_recipe`` says so (option ``speed``)."""

    def __init__(
        self,
        name: str = "quick",
        milliseconds: Any = 0.0,
        recipes: Sequence[Recipe] | None = None,
        by_recipe: Mapping[str, float] | None = None,
        noise: float = 0.0,
    ) -> None:
        super().__init__(name, recipes=recipes)
        self.milliseconds = milliseconds
        self.by_recipe = by_recipe or {}
        self.noise = noise

    def load(self, request: LoadRequest) -> Any:
        speed = request.engine["options"].get("speed")
        return Quick(super().load(request), self.by_recipe.get(speed, self.milliseconds))

    def change(self, leaves: list[torch.Tensor], engine: Mapping[str, Any]) -> list[torch.Tensor]:
        if engine["options"].get("precision") != "low":
            return leaves
        return [leaf + leaf.square().mean().sqrt() * self.noise for leaf in leaves]


def settings(cache: Path, *backends: Any, **changes: Any) -> TuneConfig:
    known = {"progress": False, "timing_pairs": 5, "min_share": 0.0, "granularity": "whole", "debug": True}
    return TuneConfig(backends=backends, cache_dir=cache, **{**known, **changes})


def outcomes(report: Any, result: int = 0) -> dict[str, tuple[str, str]]:
    """Candidate → outcome and reason."""
    return {one.label: (one.outcome, one.reason) for one in report.results[result].candidates}
