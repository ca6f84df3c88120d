"""The tuner: what wins, what does not and why, and what the next process finds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf import TuneConfig, stats, tune, untune
from aitune_hf.backends.base import BuildRequest
from aitune_hf.backends.testing import FakeBackend
from aitune_hf.cache import Environment
from aitune_hf.errors import BuildError, ConfigError, SampleError
from aitune_hf.graph import BatchDim, DynamicShapes
from aitune_hf.tuning import drive
from aitune_hf.tuning.drive import make_tuner
from aitune_hf.tuning.progress import Progress


class Slow(nn.Module):
    """Takes a while in eager, so that an engine that skips the wait is faster."""

    def __init__(self, milliseconds: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wait = milliseconds

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.wait and not getattr(self.linear, "hurry", False):
            time.sleep(self.wait / 1e3)
        return torch.relu(self.linear(x)) * scale


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Slow(1.0)
        self.second = Slow(1.0)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.second(self.first(x))}


def settings(tmp_path: Path, *backends: Any, **kwargs: Any) -> TuneConfig:
    return TuneConfig(backends=backends, cache_dir=tmp_path, progress=False, timing_pairs=5, **kwargs)


def first_working(tmp_path: Path, *backends: Any, **kwargs: Any) -> TuneConfig:
    return settings(tmp_path, *backends, strategy="first_working", **kwargs)


def fast_backend(name: str = "fast", milliseconds: float = 0.0) -> FakeBackend:
    """An engine that does not sleep; it does in ``milliseconds``."""

    def spoil(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return leaves

    class Fast(FakeBackend):
        def load(self, request: Any) -> Any:
            engine = super().load(request)
            run = engine.__call__
            module = request.module

            class Quick:
                def __call__(self, inputs: list[torch.Tensor]) -> Any:
                    waits = [(part, part.wait) for part in module.modules() if isinstance(part, Slow)]
                    for part, _ in waits:
                        part.wait = milliseconds
                    try:
                        return run(inputs)
                    finally:
                        for part, wait in waits:
                            part.wait = wait

                def rebind(self) -> None:
                    engine.rebind()

                def close(self) -> None:
                    engine.close()

            return Quick()

    return Fast(name, spoil)


@pytest.fixture
def model() -> nn.Module:
    return Slow().eval()


def test_the_fastest_right_engine_wins_and_the_others_are_named(tmp_path: Path, model: nn.Module) -> None:
    x = torch.randn(2, 4)
    wrong = FakeBackend("wrong", lambda leaves: [leaf * 1.05 + 0.01 for leaf in leaves])
    broken = FakeBackend("broken", fail=lambda request: RuntimeError("no such operator"))
    config = settings(tmp_path, wrong, broken, fast_backend("middling", 1.0), fast_backend("fast"), FakeBackend("slow"))
    report = tune(model, [x], config)
    outcomes = {one.backend: (one.outcome, one.reason) for one in report.results[0].candidates}
    assert outcomes["fast"][0] == "won"
    assert outcomes["middling"][0] == "right"
    assert outcomes["slow"][0] == "slower"
    assert outcomes["wrong"][0] == "wrong"
    assert "differs from eager" in outcomes["wrong"][1]
    assert outcomes["broken"][0] == "failed"
    assert "no such operator" in outcomes["broken"][1]
    assert report.rows[0].backend == "fast"


def test_where_no_engine_is_faster_eager_stays_and_the_table_says_why(tmp_path: Path, model: nn.Module) -> None:
    report = tune(model, [torch.randn(2, 4)], settings(tmp_path, FakeBackend()))
    assert report.rows[0].backend == "eager"
    assert "eager's speed" in report.table()
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert stats(model).engine_calls == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda leaves: [leaf * float("nan") for leaf in leaves], "not finite"),
        (lambda leaves: [leaf.double() for leaf in leaves], "dtype"),
        (lambda leaves: [leaf[:1] for leaf in leaves], "shape"),
        (lambda leaves: [*leaves, *leaves], "output tensors"),
        (lambda leaves: [leaf + (leaf.shape[0] == 5) for leaf in leaves], "[5, 4]"),
        (lambda leaves: [leaf + (leaf.shape[0] == 1) for leaf in leaves], "[1, 4]"),
    ],
    ids=["nan", "dtype", "shape", "count", "wrong only at the largest batch", "wrong only at batch one"],
)
def test_a_wrong_engine_never_answers(
    tmp_path: Path, model: nn.Module, spoil: Callable[[list[torch.Tensor]], list[torch.Tensor]], why: str
) -> None:
    config = first_working(tmp_path, FakeBackend("bad", spoil))
    x = torch.randn(3, 4)
    expected = model(x).detach()
    report = tune(model, [torch.randn(2, 4), x, torch.randn(5, 4)], config)
    assert all(candidate.outcome == "wrong" for candidate in report.results[0].candidates[:1])
    assert why in report.results[0].candidates[0].reason
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_a_second_tuning_builds_nothing(tmp_path: Path, model: nn.Module) -> None:
    x = torch.randn(2, 4)
    first, second = FakeBackend(), FakeBackend()
    assert tune(model, [x], first_working(tmp_path, first)).builds == 1
    report = tune(model, [x], first_working(tmp_path, second))
    assert (report.builds, report.loads) == (0, 1)
    assert second.builds == []
    assert "builds: 0" in report.summary()


def test_what_lost_or_failed_is_not_tried_again(tmp_path: Path, model: nn.Module) -> None:
    x = torch.randn(2, 4)
    tune(model, [x], settings(tmp_path, FakeBackend()))
    again = FakeBackend()
    report = tune(model, [x], settings(tmp_path, again))
    assert again.builds == []
    assert "eager's speed" in report.rows[0].note


def test_other_weights_of_the_same_structure_use_the_same_engine(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    tune(Slow().eval(), [x], first_working(tmp_path, FakeBackend()))
    other, backend = Slow().eval(), FakeBackend()
    expected = other(x).detach()
    tune(other, [x], first_working(tmp_path, backend))
    assert backend.builds == []
    with torch.no_grad():
        torch.testing.assert_close(other(x), expected)
    assert stats(other).engine_calls == 1


def test_another_structure_is_another_engine(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    tune(Slow(1.0).eval(), [x], first_working(tmp_path, FakeBackend()))
    backend = FakeBackend()
    tune(Slow(1.5).eval(), [x], first_working(tmp_path, backend))
    assert backend.builds == ["Slow"]


def test_one_engine_takes_all_sizes_between_those_seen(tmp_path: Path, model: nn.Module) -> None:
    backend = FakeBackend()
    tune(model, [torch.randn(2, 4), torch.randn(7, 4)], first_working(tmp_path, backend))
    assert len(backend.builds) == 1
    with torch.no_grad():
        for rows in (1, 2, 3, 7):
            model(torch.randn(rows, 4))
        assert stats(model).engine_calls == 4
        model(torch.randn(8, 4))
    assert "engine takes 1 to 7" in next(iter(stats(model).eager_calls))


def test_a_declared_range_is_built_although_one_size_was_seen(tmp_path: Path, model: nn.Module) -> None:
    shapes = {"": DynamicShapes(x={0: BatchDim(min=1, max=16)})}
    tune(model, [torch.randn(2, 4)], first_working(tmp_path, FakeBackend(), dynamic_shapes=shapes))
    with torch.no_grad():
        model(torch.randn(16, 4))
    assert stats(model).engine_calls == 1


def test_single_sizes_are_built_where_one_engine_for_all_cannot_be(tmp_path: Path, model: nn.Module) -> None:
    def only_static(request: BuildRequest) -> Exception | None:
        varies = any(axis for row in request.axes for axis in row)
        return BuildError("axis 0 is fixed by the forward") if varies else None

    backend = FakeBackend(fail=only_static)
    report = tune(model, [torch.randn(2, 4), torch.randn(3, 4)], first_working(tmp_path, backend))
    assert len(backend.builds) == 2
    assert "only for sizes that were recorded" in report.rows[0].note
    assert "axis 0 is fixed by the forward" in report.rows[0].note
    with torch.no_grad():
        model(torch.randn(2, 4))
        model(torch.randn(3, 4))
        model(torch.randn(5, 4))
    assert stats(model).engine_calls == 2
    # The next tuning finds them both.
    report = tune(model, [torch.randn(2, 4), torch.randn(3, 4)], first_working(tmp_path, backend))
    assert (report.builds, report.loads) == (0, 2)
    with torch.no_grad():
        model(torch.randn(2, 4))
        model(torch.randn(3, 4))
    assert stats(model).engine_calls == 2


def test_children_are_tuned_where_the_whole_cannot_be_captured(tmp_path: Path) -> None:
    pair = Pair().eval()
    x = torch.randn(2, 4)
    expected = pair(x)["y"].detach()
    backend = FakeBackend(fail=lambda request: BuildError("no") if request.path == "Pair" else None)
    report = tune(pair, [x], first_working(tmp_path, backend))
    assert [(row.path, row.backend, row.count) for row in report.rows] == [("Pair", "eager", 1), ("first", "fake", 2)]
    assert "first and 1 like it" in report.table()
    with torch.no_grad():
        torch.testing.assert_close(pair(x)["y"], expected)
    assert stats(pair).modules["first"].engine_calls == 1
    # Both have the same structure, and so the same engine.
    assert backend.builds == ["first"]


def test_a_spent_time_budget_starts_no_build(tmp_path: Path, model: nn.Module) -> None:
    backend = FakeBackend()
    report = tune(model, [torch.randn(2, 4)], first_working(tmp_path, backend, time_budget_s=0.0))
    assert backend.builds == []
    assert "time budget" in report.rows[0].note
    # It was not decided, so the next tuning decides.
    assert tune(model, [torch.randn(2, 4)], first_working(tmp_path, backend)).builds == 1


def test_an_interrupt_while_building_leaves_the_module_eager_and_the_cache_clean(
    tmp_path: Path, model: nn.Module
) -> None:
    def interrupt(request: BuildRequest) -> Exception | None:
        raise KeyboardInterrupt

    x = torch.randn(2, 4)
    expected = model(x).detach()
    with pytest.raises(KeyboardInterrupt):
        tune(model, [x], first_working(tmp_path, FakeBackend(fail=interrupt)))
    torch.testing.assert_close(model(x).detach(), expected)
    assert "forward" not in vars(model)
    assert not list(tmp_path.rglob("manifest.json"))
    assert not [path for path in (tmp_path / "aitune" / "tmp").glob("*") if path.is_dir()]


class Buggy(FakeBackend):
    """Raises where only a fault of ours could: what it is asked there is no candidate's to fail at."""

    def version(self) -> str:
        if self.builds:
            raise NameError("a slip")
        return "1"


def test_a_fault_of_our_own_is_loud_and_leaves_the_module_usable(
    tmp_path: Path, model: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, backend = torch.randn(2, 4), Buggy()
    backend.builds.append("")
    config = first_working(tmp_path, FakeBackend())
    expected = model(x).detach()
    broken = make_tuner(config)
    broken.backends[0] = broken.book.backends[0] = backend  # type: ignore[index]
    for debug in (False, True):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(drive, "make_tuner", lambda config: broken)
            if debug:
                with pytest.raises(NameError, match="a slip"):
                    tune(model, [x], replace(config, debug=True))
            else:
                assert "a slip" in tune(model, [x], config).rows[0].note
        (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert record.exc_info is not None
        torch.testing.assert_close(model(x).detach(), expected)
        untune(model)
        assert "forward" not in vars(model)


def test_eager_that_fails_at_an_end_of_the_range_is_a_reason_and_no_fault(tmp_path: Path) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 16:
                raise ValueError("not sixteen")
            return self.linear(x)

    shapes = {"": DynamicShapes(x={0: BatchDim(min=1, max=16)})}
    report = tune(Picky().eval(), [torch.randn(2, 4)], first_working(tmp_path, FakeBackend(), dynamic_shapes=shapes))
    assert "eager itself fails at input shapes [[16, 4]]: ValueError('not sixteen')" in str(
        [one.reason for one in report.results[0].candidates]
    )


def test_progress_names_module_and_candidate_and_which_of_how_many(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    original = Progress.phase

    def phase(self: Progress, what: str, *args: Any) -> Any:
        shown.append(what)
        return original(self, what, *args)

    monkeypatch.setattr(Progress, "phase", phase)
    tune(model, [torch.randn(2, 4)], settings(tmp_path, fast_backend("a"), FakeBackend("b")))
    assert shown[0] == "recording"
    for what in ("building a (1 of 2)", "checking a (1 of 2)", "timing a (1 of 2)", "building b (2 of 2)"):
        assert f"Slow: {what}" in shown


def test_no_sample_is_an_error_at_once(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(SampleError, match="at least one sample"):
        tune(model, [], first_working(tmp_path, FakeBackend()))


def test_a_sample_that_fails_names_itself_and_changes_nothing(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(SampleError, match=r"sample 1 .*RuntimeError"):
        tune(model, [torch.randn(2, 4), torch.randn(2, 5)], first_working(tmp_path, FakeBackend()))
    assert "forward" not in vars(model)
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_samples_may_be_calls_of_any_form(tmp_path: Path, model: nn.Module) -> None:
    x = torch.randn(2, 4)
    samples = [x, {"x": x, "scale": 2.0}, ((x,), {"scale": 3.0}), lambda target: target(x, 4.0)]
    tune(model, samples, first_working(tmp_path, FakeBackend()))
    with torch.no_grad():
        for scale in (1.0, 2.0, 3.0, 4.0):
            model(x, scale)
    assert stats(model).engine_calls == 4


def test_what_is_no_pipeline_and_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot tune a"):
        tune(object(), [1], first_working(tmp_path, FakeBackend()))


def test_random_state_and_modes_are_as_found(tmp_path: Path) -> None:
    pair = Pair().eval()
    pair.second.train()
    state = torch.get_rng_state()
    tune(pair, [torch.randn(2, 4, generator=torch.Generator())], first_working(tmp_path, FakeBackend()))
    assert torch.equal(torch.get_rng_state(), state)
    assert pair.second.training
    assert not pair.first.training


def test_an_unwritable_cache_is_a_warning_and_an_engine_in_memory(
    tmp_path: Path, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    x = torch.randn(2, 4)
    report = tune(model, [x], first_working(blocked / "cache", FakeBackend()))
    assert report.builds == 1
    assert "in memory" in report.summary()
    assert any("cache" in record.message.lower() for record in caplog.records if record.levelname == "WARNING")
    with torch.no_grad():
        model(x)
    assert stats(model).engine_calls == 1


def test_untune_leaves_the_module_as_it_was(tmp_path: Path, model: nn.Module) -> None:
    before = dict(vars(model))
    tune(model, [torch.randn(2, 4)], first_working(tmp_path, FakeBackend()))
    assert vars(model) != before
    untune(model)
    assert vars(model) == before


def test_a_portable_engine_is_another_engine_and_the_backend_is_told(tmp_path: Path, model: nn.Module) -> None:
    if not Environment.current("cpu").can_be_portable:
        pytest.skip("this CPU is no x86-64-v3")
    x, backend = torch.randn(2, 4), FakeBackend()
    tune(model, [x], first_working(tmp_path, backend))
    tune(model, [x], first_working(tmp_path, backend, portable=True))
    assert backend.options == [{}, {"portable": True}]
    report = tune(model, [x], first_working(tmp_path, FakeBackend(), portable=True))
    assert (report.builds, report.loads) == (0, 1)
    assert "avx2-portable" in report.rows[0].engine


def test_the_cache_keeps_to_its_size(tmp_path: Path) -> None:
    for wait in (0.1, 0.2, 0.3):
        tune(Slow(wait).eval(), [torch.randn(2, 4)], first_working(tmp_path, FakeBackend(), max_cache_bytes=1))
    # The engine built last is in use; those before it are gone.
    assert len(list(tmp_path.rglob("engine.json"))) == 1
