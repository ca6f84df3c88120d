"""Timing: pairs in one run, weighted by how often each shape is called. The clock is the tests' own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from aitune_hf.tuning import timing
from aitune_hf.tuning.timing import paired_timing, run_off_timing

CPU = torch.device("cpu")
Spend = Callable[[float], None]


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Spend:
    """Lets so many milliseconds pass."""
    now = [0.0]

    def advance(milliseconds: float) -> None:
        now[0] += milliseconds / 1e3

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return advance


def test_the_ratio_of_pairs_is_the_speedup(spend: Spend) -> None:
    found = paired_timing([(1, lambda: spend(3), lambda: spend(1))], 9, CPU)
    assert found.speedup == pytest.approx(3)
    assert found.eager_ms == pytest.approx(3)
    assert found.low <= found.speedup <= found.high
    assert found.sure <= found.speedup <= found.at_most
    assert found.pairs == 9
    assert found.wins(1.02)


def test_each_shape_counts_for_the_time_it_takes(spend: Spend) -> None:
    slower_but_rare = (1, lambda: spend(1), lambda: spend(4))
    faster_and_frequent = (30, lambda: spend(4), lambda: spend(1))
    found = paired_timing([slower_but_rare, faster_and_frequent], 5, CPU)
    assert found.speedup == pytest.approx((1 + 30 * 4) / (4 + 30 * 1))
    assert found.speedup == pytest.approx(found.eager_ms / found.engine_ms)


def test_a_shape_that_gets_much_slower_is_not_outvoted(spend: Spend) -> None:
    frequent_and_faster = (10, lambda: spend(1), lambda: spend(0.5))
    rare_and_far_slower = (1, lambda: spend(4), lambda: spend(14))
    found = paired_timing([frequent_and_faster, rare_and_far_slower], 5, CPU, 1.02)
    assert found.speedup == pytest.approx((10 * 1 + 4) / (10 * 0.5 + 14))
    assert found.decides(1.02)
    assert not found.wins(1.02)


def test_a_round_over_several_shapes_is_one_ratio(spend: Spend) -> None:
    cases = [(1, lambda: spend(2), lambda: spend(1)), (3, lambda: spend(4), lambda: spend(3))]
    assert paired_timing(cases, 7, CPU).pairs == 7


def test_the_interval_is_of_order_statistics_over_the_rounds(spend: Spend) -> None:
    # Warm-up takes the first three, and each turn begins with an untimed run; eager / engine is 1, 2, … 15, so the median
    # surely lies from the 4th to the 12th.
    turns = [seconds for rank in range(1, 16) for seconds in (1.0, 120 / rank)]
    times = iter([1.0] * timing.WARM_UP + turns)
    found = timing.interleaved_timing(
        [timing.Case(1, [lambda: spend(120), lambda: spend(next(times))])], 15, CPU, lambda found: True
    )[0]
    expected = (4, 4, 8, 12, 12)
    assert (found.sure, found.low, found.speedup, found.high, found.at_most) == pytest.approx(expected)


def test_equal_speeds_do_not_win(spend: Spend) -> None:
    found = paired_timing([(1, lambda: spend(1), lambda: spend(1))], 15, CPU, 1.02)
    assert not found.wins(1.02)
    assert found.decides(1.02)
    assert found.pairs == 15


def test_noise_is_met_with_more_pairs_and_never_wins(spend: Spend) -> None:
    waits = itertools.cycle([1.0, 4.0, 1.5])
    found = paired_timing([(1, lambda: spend(2), lambda: spend(next(waits)))], 5, CPU, 1.02)
    assert found.pairs > 5
    assert not (found.wins(1.02) and found.sure < 1.0)


def test_a_slow_case_stops_early_but_not_under_five_pairs(spend: Spend) -> None:
    found = paired_timing([(1, lambda: spend(2), lambda: spend(2))], 50, CPU, max_seconds=0.0)
    assert found.pairs == 5


def test_a_run_off_times_both_against_the_same_eager_in_turn() -> None:
    order: list[str] = []
    runs = [lambda name=name: order.append(name) for name in ("eager", "one", "other")]
    run_off_timing([(1, *runs)], 5, CPU)
    assert order[:6] == ["eager", "one", "other"] * 2
    assert len(order) % 3 == 0


def test_a_run_off_tells_the_faster_one(spend: Spend) -> None:
    one, other = run_off_timing([(1, lambda: spend(6), lambda: spend(2), lambda: spend(3))], 5, CPU)
    assert (one.speedup, other.speedup) == (pytest.approx(3), pytest.approx(2))
    assert not one.overlaps(other)
    assert one.pairs == 5


def test_a_run_off_goes_on_while_it_is_open_and_ends_once_both_are_near_enough(spend: Spend) -> None:
    waits, others = itertools.cycle([1.0, 2.0, 3.0]), itertools.cycle([3.0, 1.0, 2.0])
    one, other = run_off_timing(
        [(1, lambda: spend(4), lambda: spend(next(waits)), lambda: spend(next(others)))], 5, CPU
    )
    assert one.pairs == other.pairs == 20
    # Equal ones are told to be equal at once.
    one, _ = run_off_timing([(1, lambda: spend(4), lambda: spend(2), lambda: spend(2))], 5, CPU)
    assert one.pairs == 5


def test_a_run_off_goes_on_while_it_is_open_whether_the_faster_one_beats_eager(spend: Spend) -> None:
    waits = itertools.cycle([1.8, 2.2, 1.9])
    runs = (lambda: spend(2), lambda: spend(next(waits)), lambda: spend(9))
    one, other = run_off_timing([(1, *runs)], 5, CPU, 1.02)
    assert not one.overlaps(other)
    assert one.pairs > 5


def test_the_slowest_shape_is_told(spend: Spend) -> None:
    cases = [(9, lambda: spend(2), lambda: spend(1)), (1, lambda: spend(9), lambda: spend(7))]
    assert paired_timing(cases, 5, CPU).slowest_ms == pytest.approx(7)


def test_noise_is_seen(spend: Spend) -> None:
    waits = itertools.cycle([1.0, 1.0, 2.0, 2.0])
    assert paired_timing([(1, lambda: spend(4), lambda: spend(next(waits)))], 9, CPU).is_noisy
    assert not paired_timing([(1, lambda: spend(4), lambda: spend(2))], 9, CPU).is_noisy
