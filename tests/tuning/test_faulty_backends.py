"""Every kind of fault that a backend can have: eager stays, the reason is told, and the user's call is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_kit import Waiting, outcomes, settings

from aitune_hf import stats, tune
from aitune_hf.backends.testing import (
    CrashingBackend,
    ExitingBackend,
    FakeBackend,
    HangingBackend,
    InaccurateBackend,
    LossyBackend,
    MiscountingBackend,
    NanAtBatchOneBackend,
    RetypingBackend,
    ShortAtLargestBackend,
    SlowBackend,
)

BATCHES = [2, 3, 5]


def tuned(tmp_path: Path, *backends: Any, **changes: Any) -> tuple[Waiting, Any]:
    model = Waiting(1.0).eval()
    report = tune(model, [torch.randn(rows, 4) for rows in BATCHES], settings(tmp_path, *backends, **changes))
    return model, report


def assert_eager_answers(model: Waiting) -> None:
    before = stats(model).engine_calls
    with torch.no_grad():
        for rows in (1, *BATCHES):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(model(x), Waiting.forward(model, x))
    assert stats(model).engine_calls == before


@pytest.mark.parametrize(
    ("backend", "outcome", "reason"),
    [
        (NanAtBatchOneBackend(), "wrong", "[[1, 4]]: output 0: not finite where eager is"),
        (InaccurateBackend(), "wrong", "differs from eager"),
        (MiscountingBackend(), "wrong", "2 output tensors, eager gives 1"),
        (RetypingBackend(), "wrong", "dtype torch.float64, eager gives torch.float32"),
        (ShortAtLargestBackend(), "wrong", "[[5, 4]]: output 0: shape"),
        (SlowBackend(), "slower", "eager's speed"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_faulty_engine_is_named_and_never_answers(tmp_path: Path, backend: Any, outcome: str, reason: str) -> None:
    model, report = tuned(tmp_path, backend)
    first = report.results[0].candidates[0]
    assert first.outcome == outcome
    assert reason in first.reason
    assert {row.backend for row in report.rows} == {"eager"}
    assert f"{backend.name}: " in report.rows[0].note
    assert f"{backend.name} {outcome}" in report.candidates()
    assert_eager_answers(model)


def test_all_at_once_with_a_right_one_among_them(tmp_path: Path) -> None:
    faulty = [NanAtBatchOneBackend(), InaccurateBackend(), MiscountingBackend(), RetypingBackend(), SlowBackend()]
    model, report = tuned(tmp_path, *faulty, FakeBackend(), strategy="first_working")
    assert report.rows[0].backend == "slow"  # Right, and the first of those.
    assert outcomes(report)["fake"][0] == "untried"
    with torch.no_grad():
        x = torch.randn(4, 4)
        torch.testing.assert_close(model(x), Waiting.forward(model, x))
    assert stats(model).engine_calls == 1


def test_a_lossy_recipe_is_not_tried_unless_asked_for(tmp_path: Path) -> None:
    backend = LossyBackend()
    _, report = tuned(tmp_path, backend, strategy="first_working", effort="max")
    assert list(outcomes(report)) == ["lossy"]
    assert backend.options == [{}]


@pytest.mark.parametrize(
    ("backend", "timeout_s", "reason"),
    [
        (HangingBackend(), 1.0, "took longer than 1 s"),
        (ExitingBackend(code=3), None, "exit code 3"),
        (CrashingBackend(), None, "SIGSEGV"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_build_that_does_not_come_back_is_ended_and_named(
    tmp_path: Path, backend: Any, timeout_s: float | None, reason: str
) -> None:
    model, report = tuned(tmp_path, backend, candidate_timeout_s=timeout_s)
    first, *others = report.results[0].candidates
    assert first.outcome == "failed"
    assert reason in first.reason
    # The engines for single sizes, which are tried where one for all cannot be had, are not waited for.
    assert [one.reason for one in others] == [f"not tried again: {first.reason}"] * len(BATCHES)
    assert f"{backend.name}: " in report.rows[0].note
    assert_eager_answers(model)
    assert not list(tmp_path.rglob("manifest.json"))
    assert not [path for path in (tmp_path / "aitune" / "tmp").glob("*") if path.is_dir()]


def test_an_isolated_build_that_works_gives_an_engine(tmp_path: Path) -> None:
    class Nothing(FakeBackend):
        """Cannot be imported by name, and so cannot be sent to a child process."""

        isolated = True

    model, report = tuned(tmp_path, Nothing("local"), strategy="first_working")
    assert "cannot be sent there" in outcomes(report)["local"][1]
    assert_eager_answers(model)
    model, report = tuned(tmp_path, HangingBackend(seconds=0.0), strategy="first_working")
    assert report.rows[0].backend == "hanging"
    with torch.no_grad():
        x = torch.randn(4, 4)
        torch.testing.assert_close(model(x), Waiting.forward(model, x))
    assert stats(model).engine_calls == 1
