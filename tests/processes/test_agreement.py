"""Whatever differs between processes by chance, all that tune at the same time end with the same decisions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks_kit as kit
import torch
from torch import nn

from aitune_hf import stats
from aitune_hf.cache import KeyLockedError, LocalStore
from aitune_hf.tuning import stopwatch
from aitune_hf.tuning.ranks import Rank, agreed
from aitune_hf.tuning.results import Timing


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Speed-ups that the next timings will find, each with the noise of 5 % either way; filled by the test."""
    found: list[float] = []

    def timing(*args: Any) -> Timing:
        ratio = found.pop(0)
        ends = {"low": ratio, "high": ratio, "sure": ratio * 0.95, "at_most": ratio * 1.05}
        return Timing(eager_ms=1.0, engine_ms=1.0, speedup=ratio, pairs=5, **ends)

    monkeypatch.setattr(stopwatch, "paired_timing", timing)
    return found


def answerers(report: Any) -> dict[str, str]:
    return {path: found[0] for path, found in kit.decisions(report).items()}


def test_equal_modules_get_the_same_decision_where_noise_left_it_open(tmp_path: Path, timings: list[float]) -> None:
    timings += [1.03, 1.03, 3.0]  # Unsure, also when timed once more; then surely faster.
    twins = {"first": kit.Part(5).eval(), "second": kit.Part(5).eval()}
    config = kit.settings(tmp_path, kit.LoggingBackend(tmp_path / "log"))
    report = kit.tune_parts(twins, config)
    assert answerers(report) == {"first": "eager", "second": "eager"}
    assert "noise" in report.results[1].reason
    assert timings == [3.0]


def test_what_noise_leaves_open_is_timed_once_more_before_it_is_given_up(tmp_path: Path, timings: list[float]) -> None:
    timings += [1.03, 3.0]
    config = kit.settings(tmp_path, kit.LoggingBackend(tmp_path / "log"))
    assert answerers(kit.tune_parts({"part": kit.Part(5).eval()}, config)) == {"part": "logging"}
    assert timings == []


def test_a_later_tuning_decides_anew_what_was_left_open(tmp_path: Path, timings: list[float]) -> None:
    timings += [1.03, 1.03, 3.0]
    config = kit.settings(tmp_path, kit.LoggingBackend(tmp_path / "log"))
    assert answerers(kit.tune_parts({"part": kit.Part(5).eval()}, config)) == {"part": "eager"}
    report = kit.tune_parts({"part": kit.Part(5).eval()}, config)
    assert answerers(report) == {"part": "logging"}
    assert report.builds == 0
    third = kit.tune_parts({"part": kit.Part(5).eval()}, config)
    assert answerers(third) == {"part": "logging"}
    assert timings == []
    assert LocalStore(tmp_path).verify() == []


def test_a_start_takes_nothing_over_that_was_left_open(tmp_path: Path, timings: list[float]) -> None:
    timings += [1.03, 1.03]
    config = kit.settings(tmp_path, kit.LoggingBackend(tmp_path / "log"))
    kit.tune_parts({"part": kit.Part(5).eval()}, config)
    assert kit.restore_parts({"part": kit.Part(5).eval()}, config) == 0


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[threading.Thread]:
    """Another tuning of the same part, which is in its build for a second and a half."""
    backend = kit.LoggingBackend(tmp_path / "log", seconds=1.5)
    config = kit.settings(tmp_path / "cache", backend, strategy="first_working")
    thread = threading.Thread(target=kit.tune_parts, args=({"part": kit.Part(5).eval()}, config))
    thread.start()
    while not (tmp_path / "log").exists():
        time.sleep(0.005)
    yield thread
    thread.join()


def test_who_comes_second_waits_and_takes_the_verdict(tmp_path: Path, busy: threading.Thread) -> None:
    backend = kit.LoggingBackend(tmp_path / "other log")
    config = kit.settings(tmp_path / "cache", backend, strategy="first_working")
    report = kit.tune_parts({"part": kit.Part(5).eval()}, config)
    assert (report.builds, report.loads, backend.builds) == (0, 1, [])


def test_a_time_budget_also_ends_the_waiting(tmp_path: Path, busy: threading.Thread) -> None:
    part = kit.Part(5).eval()
    expected = kit.run({"": part})[""]
    backend = kit.LoggingBackend(tmp_path / "other log")
    config = kit.settings(tmp_path / "cache", backend, strategy="first_working", time_budget_s=0.2)
    start = time.monotonic()
    report = kit.tune_parts({"part": part}, config)
    assert time.monotonic() - start < 1.2
    assert backend.builds == []
    assert "the time budget was spent while another process decided" in report.rows[0].note
    with torch.no_grad():
        torch.testing.assert_close(part(kit.sample_for(part)), expected)


# -- which modules are tuned -------------------------------------------------------------------------------------------


#: Thread and width → seconds that a forward takes there.
_delays: dict[tuple[int, int], float] = {}


class Delayed(nn.Module):
    def __init__(self, width: int, hidden: int = 3) -> None:
        super().__init__()
        self.inner, self.linear = nn.Linear(3, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_delays.get((threading.get_ident(), self.linear.out_features), 0.0))
        return self.linear(self.inner(x))


def test_ranks_go_by_the_times_of_the_first(tmp_path: Path) -> None:
    store, now = LocalStore(tmp_path), time.time()
    assert agreed(store, "times/a.json", now, lambda: {"a": 1.0}) == {"a": 1.0}
    assert agreed(store, "times/a.json", now, lambda: {"a": 2.0}) == {"a": 1.0}
    assert agreed(store, "times/a.json", time.time() + 1, lambda: {"a": 3.0}) == {"a": 3.0}
    assert store.verify() == []


def test_a_module_near_the_least_share_is_tuned_by_all_ranks_or_by_none(tmp_path: Path) -> None:
    rows: dict[int, list[tuple[str, str, float, str]]] = {}
    models = [{"large": Delayed(5).eval(), "small": Delayed(4).eval()} for _ in range(2)]

    def tune(index: int) -> None:
        # The first rank finds that the small one takes a tenth of the time, the second that it takes half.
        _delays[threading.get_ident(), 5] = 0.05
        _delays[threading.get_ident(), 4] = (0.005, 0.05)[index]
        parts = models[index]
        backend = kit.LoggingBackend(tmp_path / f"log{index}")
        config = replace(kit.settings(tmp_path / "cache", backend, strategy="first_working"), min_share=0.3)
        report = kit.tune_parts(parts, config, Rank(index=index, count=2))
        rows[index] = [(row.path, row.backend, round(row.share, 6), row.note) for row in report.rows]

    threads = [threading.Thread(target=tune, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rows[0]) == sorted(rows[1])
    assert sum(share for _, _, share, _ in rows[0]) == pytest.approx(1.0, abs=1e-4)
    assert ("large", "logging") in [row[:2] for row in rows[0]]


def test_blocks_of_different_structures_are_shared_out_too(tmp_path: Path) -> None:
    found: dict[int, tuple[list[str], int]] = {}
    models = [nn.Sequential(*(Delayed(3, size).eval() for size in (9, 9, 8, 8))).eval() for _ in range(2)]

    def tune(index: int) -> None:
        backend = kit.LoggingBackend(tmp_path / f"log{index}", seconds=0.8)
        config = kit.settings(tmp_path / "cache", backend, strategy="first_working", granularity="blocks")
        report = kit.tune_parts({"": models[index]}, config, Rank(index=index, count=2))
        found[index] = backend.builds, report.loads

    threads = [threading.Thread(target=tune, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: (["0"], 3), 1: (["2"], 3)}
    x = torch.ones(2, 3)
    with torch.no_grad():
        assert torch.equal(models[0](x), models[0](x))
    assert [stats(model).engine_calls for model in models] == [8, 0]


# -- the lock on a record ----------------------------------------------------------------------------------------------


def test_one_at_a_time_works_on_a_record(tmp_path: Path) -> None:
    mine, theirs = LocalStore(tmp_path), LocalStore(tmp_path)
    with mine.exclusive("a/b.json"):
        with theirs.exclusive("a/c.json"):
            pass
        with pytest.raises(KeyLockedError, match=r"a/b\.json"), theirs.exclusive("a/b.json", timeout_s=0):
            pass
    with theirs.exclusive("a/b.json", timeout_s=0):
        pass


def test_a_folder_that_cannot_be_written_excludes_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with LocalStore(tmp_path / "file/cache").exclusive("a.json"):
        pass
