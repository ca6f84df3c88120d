"""What came of building for other machines, as data and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BuildForReport", "TargetBuild"]

_COLUMNS = ("module", "graph", "target", "outcome", "size", "time", "note")


@dataclass(frozen=True, kw_only=True)
class TargetBuild:
    """One graph of one module for one target.

    Attributes:
        path: module path.
        graph: the graph's name within the module.
        target: such as ``rtx:sm89``.
        outcome: ``built``, ``found`` (in the cache already) or ``failed``.
        reason: why it failed.
        engine: where it is in the cache.
        bytes: size of its files.
        seconds: that it took.
    """

    path: str
    graph: str
    target: str
    outcome: str
    reason: str = ""
    engine: str = ""
    bytes: int = 0
    seconds: float = 0.0

    def cells(self) -> tuple[str, ...]:
        """The texts of a table line."""
        size = f"{self.bytes / 1e6:.2f} MB" if self.engine else "-"
        return self.path, self.graph, self.target, self.outcome, size, f"{self.seconds:.1f} s", self.reason


@dataclass(frozen=True, kw_only=True)
class BuildForReport:
    """What ``build_for`` made. ``print`` it.

    Attributes:
        builds: one per module, graph and target.
        cache_dir: where the engines are.
    """

    builds: Sequence[TargetBuild]
    cache_dir: str
    seconds: float

    @property
    def engines(self) -> list[str]:
        """Where the engines are in the cache, each once."""
        return list(dict.fromkeys(build.engine for build in self.builds if build.engine))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        rows = [_COLUMNS, *(build.cells() for build in self.builds)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.append(
            f"{len(self.engines)} engines in {self.cache_dir}, {self.seconds:.1f} s. None of them was run: the first "
            "machine that can checks each against eager before it is used."
        )
        return "\n".join(lines)
