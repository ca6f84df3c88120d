"""Timing: pairs in one run, weighted by how often each shape is called."""

from __future__ import annotations

import time

import pytest
import torch

from aitune_hf.tuning.timing import paired_timing

CPU = torch.device("cpu")


def spend(milliseconds: float) -> None:
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def test_the_ratio_of_pairs_is_the_speedup() -> None:
    timing = paired_timing([(1, lambda: spend(3), lambda: spend(1))], 9, CPU)
    assert timing.speedup == pytest.approx(3, rel=0.3)
    assert timing.low <= timing.speedup <= timing.high
    assert timing.sure <= timing.speedup
    assert timing.pairs == 9


def test_each_shape_counts_for_the_time_it_takes() -> None:
    slower_but_rare = (1, lambda: spend(1), lambda: spend(4))
    faster_and_frequent = (30, lambda: spend(4), lambda: spend(1))
    timing = paired_timing([slower_but_rare, faster_and_frequent], 5, CPU)
    assert timing.speedup == pytest.approx(4, rel=0.3)


def test_equal_speeds_are_not_surely_faster() -> None:
    timing = paired_timing([(1, lambda: spend(1), lambda: spend(1))], 15, CPU)
    assert timing.sure < 1.05


def test_a_slow_case_stops_early_but_not_under_five_pairs() -> None:
    timing = paired_timing([(1, lambda: spend(2), lambda: spend(2))], 50, CPU, max_seconds=0.0)
    assert timing.pairs == 5
