"""What a tuning looks for: the fastest engine, one that is fast enough, the first that works, or one backend's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from aitune_hf.errors import ConfigError

__all__ = ["FirstWorking", "LatencyBudget", "MaxThroughput", "OneBackend", "TuneStrategy"]


@runtime_checkable
class TuneStrategy(Protocol):
    """How a tuning chooses between the candidates for one graph.

    Attributes:
        name: also what a setting or an environment variable calls it.
        times: False if the first right candidate is taken without timing anything.
        beats_eager: True if an engine must be faster than eager to be taken.
    """

    name: ClassVar[str]
    times: ClassVar[bool]
    beats_eager: ClassVar[bool]

    def settles(self, slowest_ms: float | None) -> bool:
        """True if the best engine so far is good enough, so that no further candidate is tried.

        Args:
            slowest_ms: its median latency at the recorded shape that takes the longest; None if it was not timed.
        """


@dataclass(frozen=True, kw_only=True)
class MaxThroughput:
    """Try every candidate; take the fastest right one, if it is faster than eager."""

    name: ClassVar[str] = "max_throughput"
    times: ClassVar[bool] = True
    beats_eager: ClassVar[bool] = True

    def settles(self, slowest_ms: float | None) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, kw_only=True)
class LatencyBudget:
    """Try candidates, the cheapest first, until a right one that is faster than eager meets the budget; else the fastest.

    Attributes:
        latency_budget_ms: what a call of one module may take at the slowest of its recorded shapes, in milliseconds.
    """

    name: ClassVar[str] = "latency_budget"
    times: ClassVar[bool] = True
    beats_eager: ClassVar[bool] = True
    latency_budget_ms: float

    def __post_init__(self) -> None:
        if self.latency_budget_ms <= 0:
            raise ConfigError(f"latency_budget_ms must be more than 0, got {self.latency_budget_ms}")

    def settles(self, slowest_ms: float | None) -> bool:
        """Once the budget is met."""
        return slowest_ms is not None and slowest_ms <= self.latency_budget_ms


@dataclass(frozen=True, kw_only=True)
class FirstWorking:
    """Take the first candidate that is right, the cheapest first, and time nothing."""

    name: ClassVar[str] = "first_working"
    times: ClassVar[bool] = False
    beats_eager: ClassVar[bool] = False

    def settles(self, slowest_ms: float | None) -> bool:
        """At once."""
        return True


@dataclass(frozen=True, kw_only=True)
class OneBackend:
    """Take the fastest right engine of one backend, faster than eager or not. Tuning fails where it has none.

    Attributes:
        backend: its name; None is the only one in ``TuneConfig.backends``.
    """

    name: ClassVar[str] = "one_backend"
    times: ClassVar[bool] = True
    beats_eager: ClassVar[bool] = False
    backend: str | None = None

    def settles(self, slowest_ms: float | None) -> bool:
        """Never."""
        return False
