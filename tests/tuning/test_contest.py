"""Which of several right candidates is taken, by each strategy. Engines and eager wait on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tuning_kit import Chain, QuickBackend, Waiting, outcomes, settings

from aitune_hf import TuneConfig, stats, tune
from aitune_hf.backends.base import BuildRequest, BuildResult, Recipe
from aitune_hf.backends.testing import FakeBackend, InaccurateBackend, SlowBackend
from aitune_hf.errors import BuildError, ConfigError, UntunableError
from aitune_hf.jit.patcher import patched_modules
from aitune_hf.strategy import FirstWorking, LatencyBudget, MaxThroughput, OneBackend
from aitune_hf.tuning import stopwatch
from aitune_hf.tuning.results import Timing

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture
def model() -> nn.Module:
    return Waiting().eval()


def timing(speedup: float, spread: float = 0.02, eager_ms: float = 1.0) -> Timing:
    low, high = speedup * (1 - spread), speedup * (1 + spread)
    ends = {"low": low, "high": high, "sure": low, "at_most": high}
    return Timing(eager_ms=eager_ms, engine_ms=eager_ms / speedup, speedup=speedup, pairs=5, **ends)


class Clock:
    """Stands in for both ways of timing: what it will measure next, in order."""

    def __init__(self) -> None:
        self.alone: list[Timing] = []
        self.run_offs: list[tuple[Timing, Timing]] = []

    def paired(self, *args: Any) -> Timing:
        return self.alone.pop(0)

    def run_off(self, *args: Any) -> tuple[Timing, Timing]:
        return self.run_offs.pop(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopwatch, "paired_timing", made.paired)
    monkeypatch.setattr(stopwatch, "run_off_timing", made.run_off)
    return made


def three_recipes() -> list[Recipe]:
    return [
        Recipe(options={"speed": "dear"}, effort="max", cost=9.0),
        Recipe(options={"speed": "cheap"}, effort="fast", cost=1.0),
        Recipe(options={"speed": "usual"}, cost=5.0),
    ]


@pytest.mark.parametrize(
    ("effort", "expected"),
    [("fast", ["cheap"]), ("balanced", ["cheap", "usual"]), ("max", ["cheap", "usual", "dear"])],
)
def test_effort_says_which_recipes_are_tried_and_the_cheapest_is_first(
    tmp_path: Path, effort: Any, expected: list[str]
) -> None:
    model = Waiting(14.0).eval()
    backend = QuickBackend(recipes=three_recipes(), by_recipe={"cheap": 7.0, "usual": 0.0, "dear": 4.0})
    report = tune(model, [X], settings(tmp_path, backend, effort=effort))
    assert [options["speed"] for options in backend.options] == expected
    assert list(outcomes(report)) == [f"quick[speed={speed}]" for speed in expected]
    best = "usual" if "usual" in expected else "cheap"
    assert report.rows[0].backend == f"quick[speed={best}]"
    winner = report.results[0].winner
    assert (winner.options, winner.lossy, winner.weights) == ({"speed": best}, False, "bound")


def test_the_cost_orders_recipes_of_different_backends(tmp_path: Path, model: nn.Module) -> None:
    late = QuickBackend("late", recipes=[Recipe(cost=3.0)])
    early = QuickBackend("early", recipes=[Recipe(cost=2.0)])
    report = tune(model, [X], settings(tmp_path, late, early, strategy="first_working"))
    assert list(outcomes(report)) == ["early", "late"]
    assert outcomes(report)["late"][0] == "untried"
    assert "first_working" in outcomes(report)["late"][1]
    assert late.builds == []


def test_an_unavailable_backend_and_one_without_recipes_are_named_once(tmp_path: Path, model: nn.Module) -> None:
    class Away(QuickBackend):
        def available(self) -> str | None:
            return "install it"

    class Broken(QuickBackend):
        def available(self) -> str | None:
            raise OSError("no such device")

        def version(self) -> str:
            raise ImportError("no such library")

    backends = [
        Away("away", recipes=three_recipes()),
        Broken("broken"),
        QuickBackend("none", recipes=[]),
        QuickBackend(),
    ]
    report = tune(model, [X], settings(tmp_path, *backends))
    found = outcomes(report)
    assert found["away"] == ("unavailable", "install it")
    assert found["broken"] == ("unavailable", "its check failed: OSError: no such device")
    assert found["none"] == ("unavailable", "it has nothing for cpu")
    assert found["quick"][0] == "won"


# -- run-off and noise -------------------------------------------------------------------------------------------------


def test_near_equals_are_timed_against_each_other(tmp_path: Path, model: nn.Module, clock: Clock) -> None:
    first, second = QuickBackend("first"), QuickBackend("second")
    clock.alone += [timing(1.50, 0.1), timing(1.45, 0.1)]
    clock.run_offs += [(timing(1.60), timing(1.40))]  # The newcomer's comes first.
    report = tune(model, [X], settings(tmp_path, first, second))
    assert report.rows[0].backend == "second"
    assert report.results[0].winner.timing.speedup == 1.60
    assert outcomes(report)["first"][0] == "right"
    assert "second was faster: 1.60x eager's speed against 1.40x" in outcomes(report)["first"][1]
    assert clock.run_offs == []


def test_clear_differences_need_no_run_off(tmp_path: Path, model: nn.Module, clock: Clock) -> None:
    backends = [QuickBackend(name) for name in ("a", "b", "c")]
    clock.alone += [timing(1.5), timing(3.0), timing(2.0)]
    report = tune(model, [X], settings(tmp_path, *backends))
    assert report.rows[0].backend == "b"
    # At most two engines are loaded at a time, and what lost is closed.
    assert [backend.engines[-1].closed for backend in backends] == [True, False, True]


def test_the_best_of_real_timings_is_chosen(tmp_path: Path) -> None:
    model = Waiting(12.0).eval()  # Far longer than a loaded machine adds to a sleep.
    waits = {"a": 8.0, "b": 2.0, "c": 6.0, "d": 5.0}
    report = tune(model, [X], settings(tmp_path, *[QuickBackend(name, wait) for name, wait in waits.items()]))
    assert report.rows[0].backend == "b"


def test_an_unsure_candidate_is_timed_once_more_at_the_end(tmp_path: Path, model: nn.Module, clock: Clock) -> None:
    clock.alone += [timing(1.03, 0.2), timing(1.3), timing(2.0)]
    report = tune(model, [X], settings(tmp_path, QuickBackend("shaky"), QuickBackend("steady")))
    assert report.rows[0].backend == "shaky"
    assert outcomes(report)["steady"][0] == "right"
    assert clock.alone == []


def test_a_run_off_that_neither_wins_leaves_eager(tmp_path: Path, model: nn.Module, clock: Clock) -> None:
    clock.alone += [timing(1.05, 0.04), timing(1.06, 0.04)]
    clock.run_offs += [(timing(0.92), timing(0.93))]
    backends = [QuickBackend("a"), QuickBackend("b")]
    report = tune(model, [X], settings(tmp_path, *backends))
    assert report.rows[0].backend == "eager"
    assert outcomes(report) == {
        "a": ("slower", "0.93x eager's speed, 1.02x is needed"),
        "b": ("slower", "0.92x eager's speed, 1.02x is needed"),
    }
    assert all(engine.closed for backend in backends for engine in backend.engines)
    assert clock.alone == []


@pytest.mark.parametrize(("newcomer", "first", "winner"), [(1.5, 0.9, "b"), (0.9, 1.5, "a")])
def test_a_run_off_that_one_wins_names_the_other_slower_than_eager(
    tmp_path: Path, model: nn.Module, clock: Clock, newcomer: float, first: float, winner: str
) -> None:
    clock.alone += [timing(1.2, 0.1), timing(1.2, 0.1)]
    clock.run_offs += [(timing(newcomer), timing(first))]
    backends = {name: QuickBackend(name) for name in ("a", "b")}
    report = tune(model, [X], settings(tmp_path, *backends.values()))
    assert report.rows[0].backend == winner
    assert sorted(outcome for outcome, _ in outcomes(report).values()) == ["slower", "won"]
    assert {name: backend.engines[-1].closed for name, backend in backends.items()} == {
        name: name != winner for name in backends
    }


def test_where_a_run_off_has_no_winner_one_that_lost_before_is_taken(
    tmp_path: Path, model: nn.Module, clock: Clock
) -> None:
    clock.alone += [timing(1.3), timing(2.0), timing(2.0)]
    clock.run_offs += [(timing(0.9), timing(0.9))]
    backends = [QuickBackend(name) for name in ("a", "b", "c")]
    report = tune(model, [X], settings(tmp_path, *backends))
    assert report.rows[0].backend == "a"
    assert [outcome for outcome, _ in outcomes(report).values()] == ["won", "slower", "slower"]
    assert report.results[0].winner.timing.speedup == 1.3
    assert [backend.engines[-1].closed for backend in backends] == [False, True, True]


def test_who_is_unsure_after_a_run_off_is_timed_once_more(tmp_path: Path, model: nn.Module, clock: Clock) -> None:
    clock.alone += [timing(1.2, 0.1), timing(1.2, 0.1), timing(1.4), timing(1.1)]
    clock.run_offs += [(timing(1.03, 0.1), timing(1.03, 0.1))]
    report = tune(model, [X], settings(tmp_path, QuickBackend("a"), QuickBackend("b")))
    assert report.rows[0].backend == "b"  # The newcomer's turn comes first.
    assert outcomes(report)["a"] == ("right", "b was faster: 1.40x eager's speed against 1.10x")
    assert clock.alone == []


@pytest.mark.parametrize("seed", range(20))
def test_whoever_wins_beats_eager_whatever_was_measured(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)

    def some() -> Timing:
        return timing(chance.uniform(0.9, 1.3), chance.choice([0.01, 0.1]), chance.choice([1.0, 1.0, 2.0]))

    monkeypatch.setattr(stopwatch, "paired_timing", lambda *args: some())
    monkeypatch.setattr(stopwatch, "run_off_timing", lambda *args: (some(), some()))
    backends = [QuickBackend(name) for name in ("a", "b", "c", "d")]
    report = tune(model, [X], settings(tmp_path, *backends))
    won = [one for one in report.results[0].candidates if one.outcome == "won"]
    assert [one.label for one in won] == [row.backend for row in report.rows if row.backend != "eager"]
    assert all(one.timing.wins(1.02) for one in won)
    loaded = [backend.name for backend in backends for engine in backend.engines if not engine.closed]
    assert loaded == [one.label for one in won]


@pytest.mark.parametrize(
    "odd", [timing(0.9, 0.3), timing(0.9, 0.01, eager_ms=2.0)], ids=["noisy", "eager was slow too"]
)
def test_a_doubtful_loss_is_timed_once_more(tmp_path: Path, model: nn.Module, clock: Clock, odd: Timing) -> None:
    clock.alone += [timing(1.1), odd, timing(2.0)]
    report = tune(model, [X], settings(tmp_path, QuickBackend("steady"), QuickBackend("odd")))
    assert report.rows[0].backend == "odd"
    assert clock.alone == []


def test_a_clear_loss_is_final(tmp_path: Path, model: nn.Module, clock: Clock) -> None:
    clock.alone += [timing(0.5)]
    report = tune(model, [X], settings(tmp_path, QuickBackend()))
    assert report.rows[0].backend == "eager"
    assert clock.alone == []


def test_what_is_only_a_little_faster_does_not_win(tmp_path: Path, model: nn.Module, clock: Clock) -> None:
    clock.alone += [timing(1.10, 0.01)]
    report = tune(model, [X], settings(tmp_path, QuickBackend(), min_speedup=1.2))
    assert outcomes(report)["quick"] == ("slower", "1.10x eager's speed, 1.20x is needed")


# -- strategies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["latency_budget", LatencyBudget(latency_budget_ms=8.0)])
def test_a_latency_budget_ends_the_search(tmp_path: Path, strategy: Any) -> None:
    model = Waiting(14.0).eval()
    backend = QuickBackend(recipes=three_recipes(), by_recipe={"cheap": 10.0, "usual": 2.0, "dear": 0.0})
    config = settings(tmp_path, backend, effort="max", strategy=strategy, latency_budget_ms=8.0)
    report = tune(model, [X], config)
    assert report.rows[0].backend == "quick[speed=usual]"
    assert outcomes(report)["quick[speed=dear]"][0] == "untried"
    assert report.results[0].winner.timing.slowest_ms <= 8.0


def test_a_latency_budget_that_none_meets_gives_the_fastest(tmp_path: Path, model: nn.Module) -> None:
    backend = QuickBackend(recipes=three_recipes(), by_recipe={"cheap": 2.0, "usual": 1.5, "dear": 0.0})
    config = settings(tmp_path, backend, effort="max", strategy=LatencyBudget(latency_budget_ms=0.01))
    assert tune(model, [X], config).rows[0].backend == "quick[speed=dear]"


def test_the_budget_is_for_the_slowest_shape(tmp_path: Path) -> None:
    model = Waiting(14.0).eval()

    def by_rows(inputs: list[torch.Tensor]) -> float:
        return 0.2 if inputs[0].shape[0] < 8 else 9.0

    rows = [torch.randn(8, 4), *[torch.randn(count, 4) for count in (1, 2, 3) for _ in range(3)]]
    backends = [QuickBackend("uneven", by_rows), QuickBackend("even", 2.0)]
    config = settings(tmp_path, *backends, strategy=LatencyBudget(latency_budget_ms=7.0))
    report = tune(model, rows, config)
    assert report.results[0].candidates[0].timing.slowest_ms > 7.0
    assert report.rows[0].backend == "even"


@pytest.mark.parametrize("strategy", ["one_backend", OneBackend(backend="plain"), OneBackend()])
def test_one_backend_is_used_even_where_it_is_slower(tmp_path: Path, model: nn.Module, strategy: Any) -> None:
    report = tune(model, [X], settings(tmp_path, SlowBackend("plain"), strategy=strategy))
    assert report.rows[0].backend == "plain"
    assert report.rows[0].speedup < 1


def test_one_backend_among_several_is_the_only_one_tried(tmp_path: Path, model: nn.Module) -> None:
    backends = [QuickBackend("fast"), FakeBackend("plain")]
    report = tune(model, [X], settings(tmp_path, *backends, strategy=OneBackend(backend="plain")))
    assert list(outcomes(report)) == ["plain"]
    assert report.rows[0].backend == "plain"


def test_one_backend_that_has_nothing_is_an_error_that_says_why(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(UntunableError, match=r"no engine for this target.*differs from eager"):
        tune(model, [X], settings(tmp_path, InaccurateBackend(), strategy="one_backend"))
    assert "forward" not in vars(model)
    with pytest.raises(ConfigError, match="there is no backend 'nowhere'"):
        tune(model, [X], settings(tmp_path, strategy=OneBackend(backend="nowhere")))


def test_one_backend_may_have_engines_for_parts(tmp_path: Path) -> None:
    chain = Chain().eval()
    backend = FakeBackend(fail=lambda request: BuildError("no") if request.path == "Chain" else None)
    tune(chain, [X], settings(tmp_path, backend, strategy="one_backend"))
    with torch.no_grad():
        chain(X)
    assert stats(chain).engine_calls == 2


# -- deciding anew -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda config: replace(config, effort="max"),
        lambda config: replace(config, backends=(*config.backends, QuickBackend("new", 1.0))),
        lambda config: replace(config, strategy=FirstWorking()),
        lambda config: replace(config, min_speedup=1.1),
    ],
    ids=["effort", "backends", "strategy", "min_speedup"],
)
def test_eager_was_faster_is_not_for_ever(
    tmp_path: Path, model: nn.Module, clock: Clock, change: Callable[[TuneConfig], TuneConfig]
) -> None:
    config = settings(tmp_path, QuickBackend())
    clock.alone += [timing(0.5)]
    assert tune(model, [X], config).rows[0].backend == "eager"
    assert tune(model, [X], config).rows[0].backend == "eager"  # Known, and not timed again.
    clock.alone += [timing(2.0), timing(1.5)]
    assert tune(model, [X], change(config)).rows[0].backend == "quick"


def test_the_names_of_strategies_are_their_classes() -> None:
    for strategy in (MaxThroughput(), FirstWorking()):
        assert TuneConfig(strategy=strategy.name).chosen_strategy == strategy
    assert TuneConfig.from_env({"AITUNE_HF_STRATEGY": "first_working"}).chosen_strategy == FirstWorking()


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["build", "check", "time", "run-off"])
def test_an_interrupt_leaves_a_pipeline_that_works_and_no_engine_behind(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Of two modules that are tuned one after the other, the second is interrupted."""
    chain = Chain().eval()
    expected = chain(X)["y"].detach()
    state = torch.get_rng_state()
    backends = [InterruptingBackend(stage, name) for name in ("a", "b")]
    spread = 0.2 if stage == "run-off" else 0.02
    clock.alone += [timing(2.0, spread), timing(1.5, spread)] * 2
    if stage == "time":
        monkeypatch.setattr(stopwatch, "paired_timing", interrupting(clock.paired, after=2))
    if stage == "run-off":
        monkeypatch.setattr(stopwatch, "run_off_timing", interrupting(clock.run_off, after=0))
    with pytest.raises(KeyboardInterrupt):
        tune(chain, [X], settings(tmp_path, *backends))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(chain(X)["y"].detach(), expected)
    assert not list(patched_modules(chain))
    assert all(engine.closed for backend in backends for engine in backend.engines)
    assert not [path for path in (tmp_path / "aitune" / "tmp").glob("*") if path.is_dir()]
    # The locks are free, and the next tuning goes through.
    monkeypatch.setattr(stopwatch, "paired_timing", lambda *args: timing(2.0))
    report = tune(chain, [X], settings(tmp_path, FakeBackend("c")))
    assert {row.backend for row in report.rows} - {"eager"} == {"c"}


class InterruptingBackend(FakeBackend):
    """The whole is refused, and the engine of the second part is interrupted at its first call if told so."""

    def __init__(self, stage: str, name: str) -> None:
        super().__init__(name, fail=lambda request: BuildError("no") if request.path == "Chain" else None)
        self.stage = stage

    def build(self, request: BuildRequest) -> BuildResult:
        if self.stage == "build" and request.path == "second":
            (request.workdir / "half").touch()
            raise KeyboardInterrupt
        return super().build(request)

    def change(self, leaves: list[torch.Tensor], engine: Any) -> list[torch.Tensor]:
        if self.stage == "check" and leaves[0].shape[-1] == 8:
            raise KeyboardInterrupt
        return leaves


def interrupting(run: Callable[..., Any], after: int) -> Callable[..., Any]:
    calls: list[None] = []

    def wrapper(*args: Any) -> Any:
        calls.append(None)
        if len(calls) > after:
            raise KeyboardInterrupt
        return run(*args)

    return wrapper
