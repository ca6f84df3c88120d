"""What came of each candidate, each graph and each module, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from aitune_hf.graph.graph_spec import GraphSpec

__all__ = ["BatchTiming", "CandidateResult", "GraphResult", "Timing", "label_of"]

#: Eager's own time, or the ratio, jumped about by more than this within one timing: something else was running.
NOISY = 1.3


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Paired timings of eager and of an engine, in one run.

    Attributes:
        eager_ms, engine_ms: median latency per call, milliseconds, weighted by how often each shape was called.
        speedup: median over the rounds of eager / engine. A round times each shape once, and gives one ratio: of the
            sums over the shapes, weighted by how often each was called.
        low, high: quartiles of the same.
        sure, at_most: ends of the 90 % confidence interval of the median.
        pairs: rounds timed, each with one pair of eager and engine per shape; so many ratios there are.
        slowest_ms: the engine's median latency at the shape that takes it the longest.
    """

    eager_ms: float
    engine_ms: float
    speedup: float
    low: float
    high: float
    sure: float
    at_most: float
    pairs: int
    slowest_ms: float = 0.0

    def wins(self, min_speedup: float) -> bool:
        """True if the engine is surely faster than eager, and by at least ``min_speedup`` in the median."""
        return self.speedup >= min_speedup and self.sure >= 1.0

    def decides(self, min_speedup: float) -> bool:
        """True if more pairs would not change :meth:`wins`, as far as the interval tells."""
        return self.wins(min_speedup) or self.speedup < 1.0 or self.at_most < min_speedup

    @property
    def uncertainty(self) -> float:
        """Width of the 90 % interval, as a share of the speed-up."""
        return (self.at_most - self.sure) / self.speedup

    @property
    def is_noisy(self) -> bool:
        """True if half of the pairs are spread so widely that something else must have run meanwhile."""
        return self.low > 0 and self.high / self.low > NOISY

    def overlaps(self, other: Timing) -> bool:
        """True if the intervals leave it open which of two engines is the faster one."""
        return self.sure <= other.at_most and other.sure <= self.at_most


def label_of(backend: str, options: Mapping[str, Any]) -> str:
    """What a candidate is called: ``openvino``, or ``openvino[precision=bf16]``."""
    if not options:
        return backend
    return f"{backend}[{', '.join(f'{name}={value}' for name, value in sorted(options.items()))}]"


@dataclass(frozen=True, kw_only=True)
class BatchTiming:
    """Eager and a winner at one batch size.

    Attributes:
        batch_size: in items, as the user counts them (rows of a doubled batch count once).
        answers: ``"engine"``, or ``"eager"`` where that is faster by more than noise.
    """

    batch_size: int
    timing: Timing
    answers: str = "engine"

    @property
    def items_per_second(self) -> float:
        """Throughput of who answers."""
        milliseconds = self.timing.engine_ms if self.answers == "engine" else self.timing.eager_ms
        return self.batch_size * 1e3 / milliseconds if milliseconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {**asdict(self), "items_per_second": self.items_per_second}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BatchTiming:
        """Inverse of :meth:`to_dict`."""
        timing = Timing(**data["timing"])
        return cls(batch_size=data["batch_size"], timing=timing, answers=data["answers"])


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """One backend with one set of options, tried on one graph.

    Attributes:
        options: of the backend, as its recipe gave them.
        weights: how such an engine gets its weights.
        lossy: its outputs differ from eager's by design.
        outcome: ``won``, ``right`` (but another was faster), ``slower`` (than eager), ``unsure`` (faster or not: too
            much noise to tell), ``wrong``, ``failed``, ``unavailable`` (on this machine), ``skipped`` (time budget),
            ``untried`` (another one was good enough) or ``taken back`` (the quality budget).
        reason: why, for all but ``won``.
        structural: it failed because of what the module is, not because of speed or circumstances.
        max_error: largest absolute difference from eager over all checks.
        similarity: smallest cosine similarity of an output to eager's; of lossy candidates only.
        engine: where it is in the cache.
        source: ``built`` in this process or ``loaded`` from a cache.
        batches: its times at several batch sizes, where they were asked for.
    """

    backend: str
    outcome: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "bound"
    lossy: bool = False
    reason: str = ""
    engine: str = ""
    source: str = ""
    structural: bool = False
    max_error: float | None = None
    similarity: float | None = None
    build_s: float = 0.0
    load_s: float = 0.0
    artifact_bytes: int = 0
    timing: Timing | None = None
    batches: Sequence[BatchTiming] = ()

    @property
    def label(self) -> str:
        """Backend and options, for people."""
        return label_of(self.backend, self.options)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        batches = [batch.to_dict() for batch in self.batches]
        return {**asdict(replace(self, batches=())), "options": dict(self.options), "batches": batches}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CandidateResult:
        """Inverse of :meth:`to_dict`."""
        timing = data.get("timing")
        batches = tuple(BatchTiming.from_dict(batch) for batch in data.get("batches", ()))
        return cls(**{**data, "timing": Timing(**timing) if timing else None, "batches": batches})


@dataclass(kw_only=True)
class GraphResult:
    """What came of one graph.

    Attributes:
        path: module path.
        winner: the candidate that answers its calls, or None where eager does.
        reason: why eager stays, or why the winner takes no more than it does.
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
