"""Counters of what a tuned target really did. They are a test oracle, so they are exact under threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ModuleStats", "TuningStats"]


@dataclass
class ModuleStats:
    """Counts of one module.

    Attributes:
        engine_calls: calls answered by an engine.
        eager_calls: calls answered by the original forward: reason → count.
        builds, loads: engines built, and engines loaded from a cache.
        hits: cache look-ups that found an engine or a verdict.
        misses: cache look-ups that did not: reason → count.
        seconds: where the time went: ``record``, ``build``, ``load``, ``check``, ``time``.
    """

    engine_calls: int = 0
    eager_calls: Counter[str] = field(default_factory=Counter)
    builds: int = 0
    loads: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def engine_call(self) -> None:
        """Count one call answered by an engine."""
        with self._lock:
            self.engine_calls += 1

    def eager_call(self, reason: str) -> bool:
        """Count one call answered by eager; True the first time for this reason."""
        with self._lock:
            self.eager_calls[reason] += 1
            return self.eager_calls[reason] == 1

    @property
    def calls(self) -> int:
        """Calls answered, by whomever."""
        with self._lock:
            return self.engine_calls + sum(self.eager_calls.values())

    def add_seconds(self, what: str, seconds: float) -> None:
        """Add to the time spent on one thing."""
        with self._lock:
            self.seconds[what] += seconds  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "engine_calls": self.engine_calls,
            "eager_calls": dict(self.eager_calls),
            "builds": self.builds,
            "loads": self.loads,
            "hits": self.hits,
            "misses": dict(self.misses),
            "seconds": {what: round(float(value), 4) for what, value in self.seconds.items()},
        }


@dataclass(frozen=True)
class TuningStats:
    """Counts of a whole target: module path → :class:`ModuleStats`, and their sums as attributes."""

    modules: Mapping[str, ModuleStats]

    def _sum(self, name: str) -> int:
        return sum(getattr(stats, name) for stats in self.modules.values())

    def _merge(self, name: str) -> dict[str, Any]:
        merged: Counter[str] = Counter()
        for stats in self.modules.values():
            merged.update(getattr(stats, name))
        return dict(merged)

    @property
    def engine_calls(self) -> int:
        """Calls answered by engines."""
        return self._sum("engine_calls")

    @property
    def eager_calls(self) -> dict[str, int]:
        """Calls answered by eager: reason → count."""
        return self._merge("eager_calls")

    @property
    def builds(self) -> int:
        """Engines built in this process."""
        return self._sum("builds")

    @property
    def loads(self) -> int:
        """Engines loaded from a cache."""
        return self._sum("loads")

    @property
    def hits(self) -> int:
        """Cache look-ups that found something."""
        return self._sum("hits")

    @property
    def misses(self) -> dict[str, int]:
        """Cache look-ups that did not: reason → count."""
        return self._merge("misses")

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of tuning went."""
        return self._merge("seconds")

    def to_dict(self) -> dict[str, Any]:
        """JSON form, sums and modules."""
        names = ("engine_calls", "eager_calls", "builds", "loads", "hits", "misses", "seconds")
        sums = {name: getattr(self, name) for name in names}
        return {**sums, "modules": {path: stats.to_dict() for path, stats in self.modules.items()}}
