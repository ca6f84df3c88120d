"""An engine is timed only while it answers: whatever makes eager answer instead is the reason why it is not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tuning_kit import QuickBackend, Waiting, outcomes, settings

from aitune_hf import stats, tune
from aitune_hf.backends.base import Recipe
from aitune_hf.errors import UntunableError
from aitune_hf.tuning import stopwatch, timing

X = torch.linspace(-1, 1, 8).reshape(2, 4)
#: More calls than checks make, fewer than a warm-up and five pairs do.
CHECKS = 4


class Tiring(QuickBackend):
    """Its engines answer so many calls, and then raise; ``fails_at`` says for which inputs."""

    def __init__(
        self, name: str, calls: int, milliseconds: float = 0.0, fails_at: Callable[[int], bool] = lambda rows: True
    ) -> None:
        super().__init__(name, milliseconds)
        self.left = calls
        self.fails_at = fails_at

    def change(self, leaves: list[torch.Tensor], engine: Mapping[str, Any]) -> list[torch.Tensor]:
        if self.fails_at(leaves[0].shape[0]):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("out of memory")
        return leaves


@pytest.fixture
def model() -> nn.Module:
    return Waiting().eval()


def test_an_engine_that_raises_while_it_is_timed_has_failed_and_says_why(tmp_path: Path, model: nn.Module) -> None:
    tiring = Tiring("tiring", CHECKS)
    report = tune(model, [X], settings(tmp_path, tiring, QuickBackend("steady")))
    assert report.rows[0].backend == "steady"
    outcome, reason = outcomes(report)["tiring"]
    assert outcome == "failed"
    assert reason == "eager answered while it was timed: the tiring engine raised RuntimeError: out of memory"
    assert all(engine.closed for engine in tiring.engines)


def test_the_one_backend_is_not_taken_if_its_engine_raises_while_it_is_timed(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(UntunableError, match="RuntimeError: out of memory"):
        tune(model, [X], settings(tmp_path, Tiring("tiring", CHECKS), strategy="one_backend"))


def test_weights_that_no_engine_with_a_copy_can_follow_are_named_instead_of_a_speed(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = Waiting().eval()
    backends = [QuickBackend("copying", recipes=[Recipe(weights="filled")]), QuickBackend("following", 1.0)]
    report = tune(model, [X], settings(tmp_path, *backends))
    assert report.rows[0].backend == "following"
    outcome, reason = outcomes(report)["copying"]
    assert outcome == "failed"
    assert "inference mode" in reason


@pytest.mark.parametrize("tired", ["first", "second"])
def test_of_two_in_a_run_off_the_one_that_raises_is_out_and_the_other_is_taken(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch, tired: str
) -> None:
    monkeypatch.setattr("aitune_hf.tuning.results.Timing.overlaps", lambda one, other: True)
    used = Tiring(tired, 10**6)
    backends = {"first": QuickBackend("first"), "second": QuickBackend("second"), tired: used}

    def tiring_run_off(*args: Any) -> Any:
        used.left = 2
        return timing.run_off_timing(*args)

    monkeypatch.setattr(stopwatch, "run_off_timing", tiring_run_off)
    report = tune(model, [X], settings(tmp_path, *backends.values()))
    other = "second" if tired == "first" else "first"
    assert report.rows[0].backend == other
    assert outcomes(report)[tired][0] == "failed"
    assert "out of memory" in outcomes(report)[tired][1]
    assert backends[tired].engines[-1].closed
    assert not backends[other].engines[-1].closed
    with torch.no_grad():
        torch.testing.assert_close(model(X), Waiting.forward(model, X))
    assert stats(model).engine_calls == 1


def test_an_engine_that_raises_at_a_swept_batch_size_is_not_used(tmp_path: Path, model: nn.Module) -> None:
    samples = [torch.randn(rows, 4) for rows in (4, 4, 8)]
    backends = [Tiring("tiring", 2, fails_at=lambda rows: rows == 6), QuickBackend("steady", 1.0)]
    report = tune(model, samples, settings(tmp_path, *backends, batch_sizes=(6,)))
    assert report.rows[0].backend == "steady"
    assert "at batch 6, eager answered while it was timed" in outcomes(report)["tiring"][1]
