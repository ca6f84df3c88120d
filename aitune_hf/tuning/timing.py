"""Is an engine faster than eager? Paired runs in one process decide."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aitune_hf.tuning.results import Timing

__all__ = ["paired_timing"]

Run = Callable[[], object]
WARM_UP = 3
MAX_EXTENSION = 4


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
class _Case:
    """One shape: how often it is called, and the times measured so far, in milliseconds."""

    weight: int
    eager: Run
    engine: Run
    theirs: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.eager()
            self.engine()

    def add_pair(self, device: torch.device) -> None:
        self.theirs.append(_timed(self.eager, device))
        self.ours.append(_timed(self.engine, device))


def paired_timing(
    cases: Sequence[tuple[int, Run, Run]],
    pairs: int,
    device: torch.device,
    min_speedup: float = 1.0,
    on_pair: Callable[[], object] = lambda: None,
    max_seconds: float = 30.0,
) -> Timing:
    """Time eager and engine in turn (A B A B …), after a warm-up of both.

    While noise leaves it open whether the engine is faster than eager, up to four times as many pairs are run.

    Args:
        cases: ``(weight, eager, engine)`` per shape; the weight is how often that shape is called.
        pairs: pairs per shape.
        min_speedup: what must be decided: is the speed-up at least this?
        max_seconds: stop early, but never under 5 pairs per shape, when it would take longer.
    """
    measured = [_Case(*case) for case in cases]
    deadline = time.perf_counter() + max_seconds
    for case in measured:
        case.warm_up()
    for count in range(pairs * MAX_EXTENSION):
        if count >= 5 and time.perf_counter() > deadline:
            break
        if count >= pairs and (count - pairs) % 5 == 0 and _timing(measured).decides(min_speedup):
            break
        for case in measured:
            case.add_pair(device)
            on_pair()
    return _timing(measured)


def _timing(cases: Sequence[_Case]) -> Timing:
    total = sum(case.weight for case in cases) or 1
    ratios: list[tuple[float, float]] = []
    eager_ms = engine_ms = 0.0
    for case in cases:
        share = case.weight / total
        eager_ms += share * statistics.median(case.theirs)
        engine_ms += share * statistics.median(case.ours)
        # Each shape counts for the time it takes, so its ratios weigh as much as eager spends on it.
        heft = share * statistics.median(case.theirs) / len(case.theirs)
        ratios += [(a / b, heft) for a, b in zip(case.theirs, case.ours, strict=True)]
    # By order statistics: the rank of the median is binomial, with a standard deviation of sqrt(n) / 2.
    margin = 1.645 / (2 * math.sqrt(len(ratios)))
    quantiles = (0.25, 0.5, 0.75, max(0.0, 0.5 - margin), min(1.0, 0.5 + margin))
    low, middle, high, sure, at_most = (_weighted_quantile(ratios, q) for q in quantiles)
    return Timing(
        eager_ms=eager_ms,
        engine_ms=engine_ms,
        speedup=middle,
        low=low,
        high=high,
        sure=sure,
        at_most=at_most,
        pairs=len(ratios),
    )


def _weighted_quantile(values: list[tuple[float, float]], q: float) -> float:
    ordered = sorted(values)
    target = q * sum(weight for _, weight in ordered)
    running = 0.0
    for value, weight in ordered:
        running += weight
        if running >= target:
            return value
    return ordered[-1][0]
