"""What is worth tuning stays so, whatever a noisy machine says the second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf import TuneConfig
from aitune_hf.backends.testing import FakeBackend
from aitune_hf.jit.recorder import GraphRecorder
from aitune_hf.tuning.drive import tune_modules
from aitune_hf.tuning.worth import Worth


def test_shares_below_the_least_are_objected_to() -> None:
    worth = Worth(min_share=0.01, decided={"known"}, small_before={"small"})
    assert worth.objection("new", 0.01) is None
    assert worth.objection("known", 0.0) is None
    assert "takes 0.90% of the time" in str(worth.objection("new", 0.009))
    assert worth.objection("small", 0.02) is not None
    assert worth.objection("small", 0.03) is None
    assert worth.small == {"new", "small"}


@pytest.mark.parametrize(("first", "second"), [((0.004, 1.0), (0.02, 1.0)), ((0.02, 1.0), (0.004, 1.0))])
def test_a_second_tuning_builds_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[float, float], second: tuple[float, float]
) -> None:
    times: dict[int, float] = {}
    original = GraphRecorder.run

    def run(self: GraphRecorder, forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        output = original(self, forward, module, args, kwargs)
        self.seconds = times[id(module)]
        return output

    monkeypatch.setattr(GraphRecorder, "run", run)
    roots = {"small": nn.Linear(4, 4).eval(), "large": nn.Linear(4, 6).eval()}

    def drive(x: torch.Tensor) -> None:
        with torch.no_grad():
            for root in roots.values():
                root(x)

    reports = []
    for seconds in (first, second):
        times.update(zip(map(id, roots.values()), seconds, strict=True))
        config = TuneConfig(cache_dir=tmp_path, backends=[FakeBackend()], strategy="first_working", progress=False)
        reports.append(tune_modules(roots, drive, [torch.randn(2, 4)], config))
    assert reports[1].builds == 0
    assert [row.backend for row in reports[0].rows] == [row.backend for row in reports[1].rows]
