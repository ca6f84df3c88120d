"""One rank: tunes the parts, then says what it did in ``<out>/rank<r>.json``.

worker.py <out folder> <cache folder> <fake|real> [--accelerate] [--seconds S] [--die-once PART]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ranks_kit as kit

from aitune_hf import stats
from aitune_hf.integrations.accelerate import current_rank


class Fatal(kit.LoggingBackend):
    """Ends its process, as a crash would, in the first build of one part."""

    def build(self, request: Any) -> Any:
        if request.path == self.fatal and not self.log.with_name("died").exists():
            self.log.with_name("died").touch()
            self._write("began", request.path)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build(request)

    fatal = ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("kind", choices=["fake", "real"])
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--die-once", default="")
    arguments = parser.parse_args()
    if arguments.accelerate:
        from accelerate import PartialState

        state = PartialState(cpu=True)
    rank = current_rank()
    work(arguments.out, arguments.cache, arguments.kind, rank, arguments.seconds, arguments.die_once)
    if arguments.accelerate:
        state.destroy_process_group()


def work(
    out: Path,
    cache: Path,
    kind: str,
    rank: kit.Rank,
    seconds: float,
    die_once: str = "",
    slow_width: int | None = 8,
) -> None:
    """Tune, compare with eager, and write down what came of it."""
    backend: Any = "inductor"
    changes: dict[str, Any] = {"strategy": "first_working"} if kind == "real" else {}
    if kind == "fake":
        backend = Fatal(out / "log", seconds, rank.index)
        backend.fatal = die_once
    parts = kit.make_plain() if kind == "real" else kit.make_parts(slow_width=slow_width)
    expected = kit.run(parts)
    report = kit.tune_parts(parts, kit.settings(cache, backend, **changes), rank)
    right = kit.is_right(parts, expected)
    facts = {
        "rank": rank.index,
        "count": rank.count,
        "builds": report.builds,
        "built": sorted(path for path, one in report.stats.modules.items() if one.builds),
        "loads": report.loads,
        "right": right,
        "engine_calls": sum(stats(part).engine_calls for part in parts.values()),
        "decisions": kit.decisions(report),
        "outputs": {name: output.tolist() for name, output in kit.run(parts).items()},
    }
    (out / f"rank{rank.index}.json").write_text(json.dumps(facts))
    print("rank {rank} of {count}: builds {builds} {built}, loads {loads}, right {right}".format(**facts), flush=True)


if __name__ == "__main__":
    main()
