"""What a tuning did, as data and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aitune_hf.jit.statistics import TuningStats
from aitune_hf.tuning.quality_gate import QualityOutcome
from aitune_hf.tuning.results import BatchTiming, CandidateResult, GraphResult

__all__ = ["ModuleRow", "TuningReport"]

_COLUMNS = ("module", "parameters", "share", "backend", "speed-up", "max error", "built/loaded", "note")


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One line of the table: a module, or one of its graphs.

    Attributes:
        share: of the recorded time, 0 to 1.
        backend: what answers its calls now: a backend with its options, or ``eager``.
        speedup: eager / engine, median of paired runs; None where eager stays.
        seconds: to build or load the engine.
        source: ``built``, ``loaded`` or empty.
        engine: where the engine is in the cache, or empty.
        count: modules of equal structure that share the engine; the line is for all of them.
    """

    path: str
    class_name: str
    parameters: int
    share: float
    backend: str
    speedup: float | None
    max_error: float | None
    seconds: float
    source: str
    note: str
    engine: str = ""
    count: int = 1

    def cells(self) -> tuple[str, ...]:
        """The texts of a table line."""
        source = f"{self.source} {self.seconds:.1f} s" if self.source else "-"
        return (
            self.path if self.count == 1 else f"{self.path} and {self.count - 1} like it",
            f"{self.parameters:,}",
            f"{self.share:.1%}",
            self.backend,
            f"{self.speedup:.2f}x" if self.speedup is not None else "-",
            f"{self.max_error:.1e}" if self.max_error is not None else "-",
            source,
            self.note,
        )


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """The outcome of one ``tune`` call.

    Attributes:
        rows: one line per module that was recorded at the top, or tuned below it.
        results: what came of each graph, with every candidate.
        stats: counters, as of the end of the tuning.
        seconds: of the whole call.
        engine_bytes: size of the engines in use; weights_bytes: size of the weights of the modules they run.
        cache_dir: the engine cache, or why it could not be written.
        quality: with relaxed precision: what was measured on the outputs, and which lossy engines stayed.
    """

    rows: Sequence[ModuleRow]
    results: Sequence[GraphResult] = field(default_factory=list)
    stats: TuningStats
    samples: int
    seconds: float
    engine_bytes: int
    weights_bytes: int
    cache_dir: str
    quality: QualityOutcome | None = None

    @property
    def builds(self) -> int:
        """Engines built in this process."""
        return self.stats.builds

    @property
    def loads(self) -> int:
        """Engines loaded from the cache."""
        return self.stats.loads

    def table(self) -> str:
        """The rows as text."""
        lines = [_COLUMNS, *(row.cells() for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS) - 1)]
        texts = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]) for line in lines
        ]
        texts.insert(1, "  ".join("-" * width for width in [*widths, len(_COLUMNS[-1])]))
        return "\n".join(text.rstrip() for text in texts)

    def summary(self) -> str:
        """One line: builds, loads, sizes and time."""
        return (
            f"builds: {self.builds}, loads: {self.loads}, engines {self.engine_bytes / 1e6:.2f} MB for weights of "
            f"{self.weights_bytes / 1e6:.2f} MB, {self.seconds:.1f} s, cache: {self.cache_dir}"
        )

    def candidates(self) -> str:
        """Every candidate that was looked at, with what came of it and why, one a line."""
        lines: list[str] = []
        for result in self.results:
            for one in result.candidates:
                speed = f" {one.timing.speedup:.2f}x" if one.timing else ""
                reason = f": {one.reason}" if one.reason else ""
                lines.append(f"{result.path}: {one.label} {one.outcome}{speed}{reason}")
                lines += [f"{result.path}:   {_batch_line(batch)}" for batch in one.batches]
        return "\n".join(lines)

    def __str__(self) -> str:
        quality = f"\n{self.quality}" if self.quality is not None else ""
        return f"{self.table()}\n{self.summary()}{quality}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "modules": [vars(row) for row in self.rows],
            "graphs": [result.to_dict() for result in self.results],
            "stats": self.stats.to_dict(),
            "samples": self.samples,
            "seconds": self.seconds,
            "engine_bytes": self.engine_bytes,
            "weights_bytes": self.weights_bytes,
            "cache_dir": self.cache_dir,
            "quality": asdict(self.quality) if self.quality is not None else None,
        }

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_dict` to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def backend_of(winner: CandidateResult | None) -> str:
    """What a table calls the answerer of a graph."""
    return winner.label if winner is not None else "eager"


def _batch_line(batch: BatchTiming) -> str:
    timing = batch.timing
    return (
        f"batch {batch.batch_size}: eager {timing.eager_ms:.2f} ms, engine {timing.engine_ms:.2f} ms, {batch.answers} "
        f"answers, {batch.items_per_second:.1f}/s"
    )
