"""Batch sizes at which eager is the faster one are its to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tuning_kit import QuickBackend, Waiting, outcomes, settings

from aitune_hf import stats, tune
from aitune_hf.backends.testing import FakeBackend
from aitune_hf.graph import BatchDim, DynamicShapes
from aitune_hf.jit.patcher import unpatch_tree
from aitune_hf.tuning.drive import restore_modules


def better_from_two_on(inputs: list[torch.Tensor]) -> float:
    """Milliseconds: longer than eager for a single row."""
    return 24.0 if inputs[0].shape[0] == 1 else 0.0


SAMPLES = [torch.randn(rows, 4) for rows in (4, 4, 4, 8)]


@pytest.fixture
def model() -> nn.Module:
    return Waiting(8.0).eval()


def answered_by_engine(model: nn.Module, rows: int) -> bool:
    before = stats(model).engine_calls
    x = torch.randn(rows, 4)
    with torch.no_grad():
        for _ in range(2):  # The first call of an engine from the cache is eager's.
            torch.testing.assert_close(model(x), Waiting.forward(model, x))
    return stats(model).engine_calls > before


def test_eager_answers_the_sizes_at_which_it_is_faster(tmp_path: Path, model: nn.Module) -> None:
    config = settings(tmp_path, QuickBackend(milliseconds=better_from_two_on), batch_sizes=(1, 2, 8, 16))
    report = tune(model, SAMPLES, config)
    winner = report.results[0].winner
    # 16 is more than the engine takes.
    assert [(one.batch_size, one.answers) for one in winner.batches] == [(1, "eager"), (2, "engine"), (8, "engine")]
    assert winner.batches[0].timing.speedup < 1 < winner.batches[1].timing.speedup
    assert winner.batches[2].items_per_second > winner.batches[1].items_per_second
    assert "batch 1: eager" in report.candidates()
    assert report.to_dict()["graphs"][0]["winner"]["batches"][0]["answers"] == "eager"
    assert [answered_by_engine(model, rows) for rows in (1, 2, 3, 8)] == [False, True, True, True]
    assert "eager was faster at size 1 of axis 0" in stats(model).eager_calls
    # Whoever takes the engine over knows it too.
    unpatch_tree(model)
    assert restore_modules({"": model}, config) == 1
    assert [answered_by_engine(model, rows) for rows in (1, 2, 3, 8)] == [False, True, True, True]
    unpatch_tree(model)
    report = tune(model, SAMPLES, config)
    assert report.builds == 0
    assert [one.batch_size for one in report.results[0].winner.batches] == [1, 2, 8]
    assert [answered_by_engine(model, rows) for rows in (1, 2)] == [False, True]


def test_a_doubled_batch_is_counted_in_items(tmp_path: Path, model: nn.Module) -> None:
    shapes = {"": DynamicShapes(x={0: BatchDim(min=2, max=8, multiple_of=2)})}
    config = settings(tmp_path, QuickBackend(), effort="max", dynamic_shapes=shapes)
    report = tune(model, [torch.randn(4, 4)], config)
    assert [one.batch_size for one in report.results[0].winner.batches] == [1, 2, 4]


@pytest.mark.parametrize(
    ("changes", "samples"),
    [({}, SAMPLES), ({"batch_sizes": ()}, SAMPLES), ({"effort": "max"}, SAMPLES[:1])],
    ids=["balanced", "none asked for", "the batch does not vary"],
)
def test_without_need_nothing_is_swept(tmp_path: Path, model: nn.Module, changes: Any, samples: Any) -> None:
    report = tune(model, samples, settings(tmp_path, QuickBackend(), **changes))
    assert report.rows[0].backend == "quick"
    assert list(report.results[0].winner.batches) == []


def test_an_engine_that_is_wrong_at_a_size_in_between_loses_to_the_next(tmp_path: Path, model: nn.Module) -> None:
    class WrongAtTwo(QuickBackend):
        def change(self, leaves: list[torch.Tensor], engine: Any) -> list[torch.Tensor]:
            return [leaf + (leaf.shape[0] == 2) for leaf in leaves]

    backends = [WrongAtTwo("hasty"), QuickBackend("steady", 1.0)]
    report = tune(model, SAMPLES, settings(tmp_path, *backends, batch_sizes=(2,)))
    assert report.rows[0].backend == "steady"
    assert outcomes(report)["hasty"][0] == "wrong"
    assert "[[2, 4]]" in outcomes(report)["hasty"][1]
    assert all(engine.closed for engine in backends[0].engines)
    assert answered_by_engine(model, 2)


def test_first_working_times_nothing(tmp_path: Path, model: nn.Module) -> None:
    config = settings(tmp_path, FakeBackend(), effort="max", strategy="first_working")
    winner = tune(model, SAMPLES, config).results[0].winner
    assert (winner.timing, list(winner.batches)) == (None, [])
