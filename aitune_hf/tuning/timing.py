"""Which of several ways to run a graph is faster? Runs taken in turn, in one process, decide."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aitune_hf.tuning.results import Timing

__all__ = ["Case", "Run", "interleaved_timing", "paired_timing", "run_off_timing"]

Run = Callable[[], object]
WARM_UP = 3
MAX_EXTENSION = 4
#: Two engines whose speeds are known better than this need no further rounds to choose between them.
CLOSE_ENOUGH = 0.05


def _timed(run: Run, device: torch.device) -> float:
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


@dataclass
class Case:
    """One shape: how often it is called, how to run it, and the times measured so far, in milliseconds.

    Attributes:
        weight: how often that shape is called.
        runs: eager first, then the engines.
    """

    weight: int
    runs: Sequence[Run]
    times: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.times = [[] for _ in self.runs]

    def warm_up(self) -> None:
        """Run each a few times, untimed."""
        for _ in range(WARM_UP):
            for run in self.runs:
                run()

    def add_round(self, device: torch.device) -> None:
        """Time each once, in turn, after an untimed run of the same: threads of the one before may still be spinning."""
        for run, times in zip(self.runs, self.times, strict=True):
            run()
            times.append(_timed(run, device))


def interleaved_timing(
    cases: Sequence[Case],
    rounds: int,
    device: torch.device,
    is_decided: Callable[[list[Timing]], bool],
    on_round: Callable[[], object] = lambda: None,
    max_seconds: float = 30.0,
) -> list[Timing]:
    """Time eager and engines in turn (A B C A B C …), after a warm-up of all.

    Until ``is_decided`` by what was measured, up to four times as many rounds are run.

    Args:
        rounds: per shape.
        max_seconds: stop early, but never under 5 rounds per shape, when it would take longer.

    Returns:
        For each engine, its times against eager's.
    """
    deadline = time.perf_counter() + max_seconds
    for case in cases:
        case.warm_up()
    for count in range(rounds * MAX_EXTENSION):
        if count >= 5 and time.perf_counter() > deadline:
            break
        if count >= rounds and (count - rounds) % 5 == 0 and is_decided(_timings(cases)):
            break
        for case in cases:
            case.add_round(device)
            on_round()
    return _timings(cases)


def paired_timing(
    cases: Sequence[tuple[int, Run, Run]],
    pairs: int,
    device: torch.device,
    min_speedup: float = 1.0,
    on_pair: Callable[[], object] = lambda: None,
    max_seconds: float = 30.0,
) -> Timing:
    """Time one engine against eager, with more pairs while it is open whether it is faster.

    Args:
        cases: ``(weight, eager, engine)`` per shape; the weight is how often that shape is called.
        pairs: rounds; each times one pair per shape.
        min_speedup: what must be decided: is the speed-up at least this?
        max_seconds: as for :func:`interleaved_timing`.
    """
    measured = [Case(weight, runs) for weight, *runs in cases]

    def is_decided(found: list[Timing]) -> bool:
        return found[0].decides(min_speedup)

    (timing,) = interleaved_timing(measured, pairs, device, is_decided, on_pair, max_seconds)
    return timing


def run_off_timing(
    cases: Sequence[tuple[int, Run, Run, Run]],
    rounds: int,
    device: torch.device,
    min_speedup: float = 1.0,
    on_round: Callable[[], object] = lambda: None,
    max_seconds: float = 30.0,
) -> tuple[Timing, Timing]:
    """Time two engines and eager in turn.

    There are more rounds while it is open which one is faster by what matters, or whether each is faster than eager.

    Args:
        cases: ``(weight, eager, engine, other engine)`` per shape.
        rounds: per shape.
        min_speedup: as for :func:`paired_timing`.
        max_seconds: as for :func:`interleaved_timing`.
    """
    measured = [Case(weight, runs) for weight, *runs in cases]

    def is_decided(found: list[Timing]) -> bool:
        one, other = found
        if not all(timing.decides(min_speedup) for timing in found):
            return False
        return not one.overlaps(other) or max(one.uncertainty, other.uncertainty) < CLOSE_ENOUGH

    one, other = interleaved_timing(measured, rounds, device, is_decided, on_round, max_seconds)
    return one, other


def _timings(cases: Sequence[Case]) -> list[Timing]:
    return [_timing(cases, engine) for engine in range(1, len(cases[0].runs))]


def _timing(cases: Sequence[Case], engine: int) -> Timing:
    total = sum(case.weight for case in cases)
    eager_ms = engine_ms = slowest_ms = 0.0
    for case in cases:
        theirs, ours = statistics.median(case.times[0]), statistics.median(case.times[engine])
        eager_ms += case.weight / total * theirs
        engine_ms += case.weight / total * ours
        slowest_ms = max(slowest_ms, ours)
    # A round is a sample of all the work, so a shape that gets much slower is never outvoted by others that get faster.
    ratios = sorted(a / b for a, b in zip(_per_round(cases, 0), _per_round(cases, engine), strict=True))
    rounds = len(ratios)
    # By order statistics: the rank of the median is binomial, with a standard deviation of sqrt(n) / 2.
    rank = max(0, math.floor(rounds / 2 - 1.645 * math.sqrt(rounds) / 2) - 1)
    quarter = math.ceil(rounds / 4) - 1
    return Timing(
        eager_ms=eager_ms,
        engine_ms=engine_ms,
        speedup=statistics.median(ratios),
        low=ratios[quarter],
        high=ratios[rounds - 1 - quarter],
        sure=ratios[rank],
        at_most=ratios[rounds - 1 - rank],
        pairs=rounds,
        slowest_ms=slowest_ms,
    )


def _per_round(cases: Sequence[Case], run: int) -> list[float]:
    """What all calls would have taken at the speed of each round."""
    weights = [case.weight for case in cases]
    return [
        sum(weight * ms for weight, ms in zip(weights, times, strict=True))
        for times in zip(*(case.times[run] for case in cases), strict=True)
    ]
