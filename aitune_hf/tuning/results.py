"""What came of each candidate, each graph and each module, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aitune_hf.graph.graph_spec import GraphSpec

__all__ = ["CandidateResult", "GraphResult", "Timing"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Paired timings of eager and of an engine, in one run.

    Attributes:
        eager_ms, engine_ms: median latency per call, milliseconds, weighted by how often each shape was called.
        speedup: median over the pairs of eager / engine.
        low, high: quartiles of the same.
        sure, at_most: ends of the 90 % confidence interval of the median.
        pairs: pairs timed.
    """

    eager_ms: float
    engine_ms: float
    speedup: float
    low: float
    high: float
    sure: float
    at_most: float
    pairs: int

    def wins(self, min_speedup: float) -> bool:
        """True if the engine is surely faster than eager, and by at least ``min_speedup`` in the median."""
        return self.speedup >= min_speedup and self.sure >= 1.0

    def decides(self, min_speedup: float) -> bool:
        """True if more pairs would not change :meth:`wins`, as far as the interval tells."""
        return self.wins(min_speedup) or self.speedup < 1.0 or self.at_most < min_speedup


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """One backend with one set of options, tried on one graph.

    Attributes:
        outcome: ``won``, ``right`` (but another was faster), ``slower`` (than eager), ``unsure`` (faster or not: too
            much noise to tell), ``wrong``, ``failed``, ``unavailable`` (on this machine) or ``skipped`` (time budget).
        reason: why, for all but ``won``.
        structural: it failed because of what the module is, not because of speed or circumstances.
        max_error: largest absolute difference from eager over all checks.
        engine: where it is in the cache.
        source: ``built`` in this process or ``loaded`` from a cache.
    """

    backend: str
    outcome: str
    reason: str = ""
    engine: str = ""
    source: str = ""
    structural: bool = False
    max_error: float | None = None
    build_s: float = 0.0
    load_s: float = 0.0
    artifact_bytes: int = 0
    timing: Timing | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CandidateResult:
        """Inverse of :meth:`to_dict`."""
        timing = data.get("timing")
        return cls(**{**data, "timing": Timing(**timing) if timing else None})


@dataclass(kw_only=True)
class GraphResult:
    """What came of one graph.

    Attributes:
        path: module path.
        winner: the candidate that answers its calls, or None where eager does.
        reason: why eager stays.
        structural: no engine could be had because the module cannot be captured, compiled or run right as a whole, so
            that what is below it should be tried.
        candidates: all that were tried, one per engine variant.
    """

    path: str
    graph: GraphSpec
    calls: int = 0
    seconds: float = 0.0
    winner: CandidateResult | None = None
    reason: str = ""
    structural: bool = False
    candidates: Sequence[CandidateResult] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "path": self.path,
            "graph": self.graph.to_dict(),
            "calls": self.calls,
            "seconds": self.seconds,
            "winner": self.winner.to_dict() if self.winner else None,
            "reason": self.reason,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }
