"""Is an engine faster than eager? Paired runs in one process decide."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from aitune_hf.tuning.results import Timing

__all__ = ["paired_timing"]

Run = Callable[[], object]
WARM_UP = 3


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


def paired_timing(
    cases: list[tuple[int, Run, Run]],
    pairs: int,
    device: torch.device,
    on_pair: Callable[[], object] = lambda: None,
    max_seconds: float = 20.0,
) -> Timing:
    """Time eager and engine in turn (A B A B …), after a warm-up of both.

    Args:
        cases: ``(weight, eager, engine)`` per shape; the weight is how often that shape is called.
        pairs: pairs per shape.
        max_seconds: stop early, but never under 5 pairs, when the whole would take longer.
    """
    ratios: list[tuple[float, float]] = []
    eager_ms = engine_ms = 0.0
    total = sum(weight for weight, _, _ in cases) or 1
    count = 0
    deadline = time.perf_counter() + max_seconds
    for weight, eager, engine in cases:
        for _ in range(WARM_UP):
            eager()
            engine()
        ours: list[float] = []
        theirs: list[float] = []
        for done in range(pairs):
            if done >= 5 and time.perf_counter() > deadline:
                break
            theirs.append(_timed(eager, device))
            ours.append(_timed(engine, device))
            on_pair()
        share = weight / total
        eager_ms += share * statistics.median(theirs)
        engine_ms += share * statistics.median(ours)
        # Each shape counts for the time it takes, so its ratios weigh as much as eager spends on it.
        heft = share * statistics.median(theirs) / len(theirs)
        ratios += [(a / b, heft) for a, b in zip(theirs, ours, strict=True)]
        count += len(theirs)
    # By order statistics: the rank of the median is binomial, with a standard deviation of sqrt(n) / 2.
    sure = max(0.0, 0.5 - 1.645 / (2 * math.sqrt(count)))
    low, middle, high, bound = (_weighted_quantile(ratios, q) for q in (0.25, 0.5, 0.75, sure))
    return Timing(
        eager_ms=eager_ms, engine_ms=engine_ms, speedup=middle, low=low, high=high, sure=bound, pairs=count
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
