"""Relaxed precision: lossy engines stay only within a budget on what the whole pipeline gives."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import nn
from tuning_kit import Chain, QuickBackend, Waiting, outcomes, settings

from aitune_hf import TuneConfig, stats, tune
from aitune_hf.backends.base import BuildRequest, Recipe
from aitune_hf.cache import LocalStore
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError, SampleError
from aitune_hf.jit.patcher import patched_modules, unpatch_tree
from aitune_hf.quality import QualityBudget
from aitune_hf.tuning.drive import restore_modules
from aitune_hf.tuning.output_metrics import final_arrays, kept_output, measure

X = torch.linspace(-1, 1, 8).reshape(2, 4)
LOW = {"precision": "low", "speed": "low"}


def lossy_backend(noise: float, strict_wait: float | None = 1.5, name: str = "both") -> QuickBackend:
    """A lossy recipe that waits for nothing and, unless ``strict_wait`` is None, one that is right and slower."""
    recipes = [] if strict_wait is None else [Recipe(options={"speed": "strict"}, effort="fast", cost=0.0)]
    recipes.append(Recipe(options=LOW, lossy=True, effort="fast", cost=1.0))
    return QuickBackend(name, recipes=recipes, by_recipe={"strict": strict_wait or 0.0, "low": 0.0}, noise=noise)


def relaxed(cache: Path, *backends: Any, **changes: Any) -> TuneConfig:
    known = {"precision": "relaxed", "quality": QualityBudget(metric="max_abs", most=0.05)}
    return settings(cache, *backends, **{**known, **changes})


@pytest.fixture
def model() -> nn.Module:
    return Waiting().eval()


LOSSY = "both[precision=low, speed=low]"


def test_relaxed_precision_without_a_budget_is_an_error() -> None:
    with pytest.raises(ConfigError, match="precision='relaxed' needs a budget"):
        TuneConfig(precision="relaxed")


def test_a_lossy_engine_within_the_budget_is_used_and_the_report_says_so(tmp_path: Path, model: nn.Module) -> None:
    report = tune(model, [X], relaxed(tmp_path, lossy_backend(0.01)))
    assert report.rows[0].backend == LOSSY
    assert report.quality.admitted == [f"Waiting: {LOSSY}"]
    assert 0 < report.quality.value <= 0.05
    assert report.quality.taken_back == []
    assert "quality: " in str(report)
    assert "max_abs <= 0.05" in str(report)
    assert report.to_dict()["quality"]["value"] == report.quality.value
    assert outcomes(report)["both[speed=strict]"][0] == "right"
    with torch.no_grad():
        assert 0 < float((model(X) - Waiting.forward(model, X)).abs().max()) <= 0.05
    assert report.results[0].winner.similarity > 0.9


def test_a_lossy_engine_beyond_the_budget_gives_way_to_the_strict_one(tmp_path: Path, model: nn.Module) -> None:
    report = tune(model, [X], relaxed(tmp_path, lossy_backend(0.2)))
    assert report.rows[0].backend == "both[speed=strict]"
    assert report.quality.taken_back == [f"Waiting: {LOSSY}"]
    assert report.quality.value == 0
    assert outcomes(report)[LOSSY][0] == "taken back"
    assert "missed the quality budget" in outcomes(report)[LOSSY][1]
    assert outcomes(report)["both[speed=strict]"][0] == "won"
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(X), Waiting.forward(model, X))
    assert stats(model).engine_calls > 0


class Graded(QuickBackend):
    """Recipes that are faster the rougher they are: ``noise`` by the option ``speed``."""

    def __init__(self, noise: dict[str, float], cost: float = 0.0) -> None:
        waits = {speed: float(place) / 2 for place, speed in enumerate(noise)}
        recipes = [
            Recipe(options={"speed": speed}, lossy=bool(amount), effort="fast", cost=cost + place)
            for place, (speed, amount) in enumerate(noise.items())
        ]
        super().__init__("graded", recipes=recipes, by_recipe=waits)
        self.levels = noise

    def change(self, leaves: list[torch.Tensor], engine: Any) -> list[torch.Tensor]:
        return [leaf + leaf.square().mean().sqrt() * self.levels[engine["options"]["speed"]] for leaf in leaves]


LEVELS = {"roughest": 0.3, "rougher": 0.2, "rough": 0.01, "exact": 0.0}


def test_the_next_best_lossy_engine_follows_one_beyond_the_budget(tmp_path: Path, model: nn.Module) -> None:
    config = relaxed(tmp_path, Graded(LEVELS))
    report = tune(model, [X], config)
    assert report.rows[0].backend == "graded[speed=rough]"
    assert report.quality.taken_back == ["Waiting: graded[speed=roughest]", "Waiting: graded[speed=rougher]"]
    assert report.quality.admitted == ["Waiting: graded[speed=rough]"]
    assert 0 < report.quality.value <= 0.05
    assert outcomes(report)["graded[speed=rough]"][0] == "won"
    assert outcomes(report)["graded[speed=exact]"][0] == "right"
    with torch.no_grad():
        for _ in range(2):
            assert 0 < float((model(X) - Waiting.forward(model, X)).abs().max()) <= 0.05
    # What missed the budget is out for good: here, in the next tuning, and at the next start.
    again = Graded(LEVELS)
    report = tune(model, [X], replace(config, backends=(again,)))
    assert (again.builds, report.rows[0].backend, report.quality.taken_back) == ([], "graded[speed=rough]", [])
    unpatch_tree(model)
    assert restore_modules({"": model}, config) == 1
    with torch.no_grad():
        model(X)  # Eager answers the first call of an engine that was not checked in this process.
        assert 0 < float((model(X) - Waiting.forward(model, X)).abs().max()) <= 0.05


def test_the_last_fallback_is_the_strict_one(tmp_path: Path, model: nn.Module) -> None:
    tight = QualityBudget(metric="max_abs", most=1e-4)
    report = tune(model, [X], relaxed(tmp_path, Graded(LEVELS), quality=tight))
    assert report.rows[0].backend == "graded[speed=exact]"
    assert len(report.quality.taken_back) == 3
    assert report.quality.admitted == []
    with torch.no_grad():
        torch.testing.assert_close(model(X), Waiting.forward(model, X))


def test_what_is_rougher_and_slower_is_no_fallback(tmp_path: Path, model: nn.Module) -> None:
    odd = {"rough": 0.2, "rougher": 0.3, "exact": 0.0}
    report = tune(model, [X], relaxed(tmp_path, Graded(odd)))
    assert report.rows[0].backend == "graded[speed=exact]"
    assert report.quality.taken_back == ["Waiting: graded[speed=rough]"]


def test_a_fallback_that_is_gone_from_the_cache_is_passed_over(
    tmp_path: Path, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful(Graded):
        """Cannot load its middle engine a second time."""

        def load(self, request: Any) -> Any:
            if request.engine["options"]["speed"] == "rough":
                self.loads = getattr(self, "loads", 0) + 1
                if self.loads > 1:
                    raise EngineLoadError("lost")
            return super().load(request)

    report = tune(model, [X], relaxed(tmp_path, Forgetful({"rougher": 0.2, "rough": 0.01, "exact": 0.0})))
    assert report.rows[0].backend == "graded[speed=exact]"
    assert "a fallback of a lossy engine is not used: lost" in caplog.text


def values(*numbers: float) -> Any:
    """A metric that gives these, one after the other, and the last one for good."""
    left = list(numbers)

    def metric(eager: Any, tuned: Any) -> float:
        return left.pop(0) if len(left) > 1 else left[0]

    return metric


def test_a_fallback_is_checked_before_it_is_believed(tmp_path: Path, model: nn.Module) -> None:
    """It was right in the contest, but that may be long ago, and on other weights."""

    class Broken(Graded):
        loads = 0

        def load(self, request: Any) -> Any:
            self.loads += request.engine["options"]["speed"] == "rough"
            return super().load(request)

        def change(self, leaves: list[torch.Tensor], engine: Any) -> list[torch.Tensor]:
            broken = engine["options"]["speed"] == "rough" and self.loads > 1
            return [leaf * -1 for leaf in leaves] if broken else super().change(leaves, engine)

    backend = Broken({"rougher": 0.2, "rough": 0.01, "exact": 0.0})
    budget = QualityBudget(metric=values(1.0, 0.0), most=0.5)
    report = tune(model, [X], relaxed(tmp_path, backend, quality=budget))
    assert report.rows[0].backend == "graded[speed=exact]"
    assert "cosine similarity" in outcomes(report)["graded[speed=rough]"][1]
    assert report.quality.admitted == []


def test_an_admission_that_does_not_hold_any_more_is_taken_back_at_once(tmp_path: Path, model: nn.Module) -> None:
    def metric(eager: Any, tuned: Any) -> float:
        measured.append(answer[len(measured)] if len(measured) < len(answer) else -1.0)
        if measured[-1] < 0:
            raise KeyboardInterrupt
        return measured[-1]

    measured: list[float] = []
    answer = [0.0]
    config = relaxed(tmp_path, Graded(LEVELS), quality=QualityBudget(metric=metric, most=0.5))
    assert tune(model, [X], config).quality.admitted == ["Waiting: graded[speed=roughest]"]
    measured.clear()
    answer[:] = [1.0]
    with pytest.raises(KeyboardInterrupt):
        tune(model, [X], config)  # Misses, and is interrupted while the next one is measured.
    assert restore_modules({"": model}, config) == 1
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(X), Waiting.forward(model, X))
    assert stats(model).engine_calls == 1


def test_at_a_start_the_chain_goes_on_where_an_engine_cannot_be_loaded(
    tmp_path: Path, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreadable(Graded):
        loads: int = 0

        def load(self, request: Any) -> Any:
            if request.engine["options"]["speed"] == "rough":
                self.loads += 1
                raise EngineLoadError("cannot be read")
            return super().load(request)

    levels = {"rough": 0.01, "exact": 0.0}
    config = relaxed(tmp_path, Graded(levels))
    assert tune(model, [X], config).rows[0].backend == "graded[speed=rough]"
    unpatch_tree(model)
    backend = Unreadable(levels)
    assert restore_modules({"": model}, replace(config, backends=(backend,))) == 1
    assert backend.loads == 1
    assert caplog.text.count("cannot be read") == 1
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(X), Waiting.forward(model, X))
    assert stats(model).engine_calls == 1


def test_equal_modules_each_take_up_their_own_engine_alone(tmp_path: Path) -> None:
    """A verdict that they share names an engine for the weights of each of them."""

    class Trio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Waiting(2.0) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return x

    recipes = [
        Recipe(options={"speed": "strict"}, effort="fast", cost=0.0),
        Recipe(options=LOW, weights="baked", lossy=True, effort="fast", cost=1.0),
    ]
    backend = QuickBackend("both", recipes=recipes, by_recipe={"strict": 1.5, "low": 0.0}, noise=0.001)
    backend.fail = lambda request: BuildError("not as a whole") if request.path == "Trio" else None
    model = Trio().eval()
    config = relaxed(tmp_path, backend)
    report = tune(model, [X], config)
    assert len(report.quality.admitted) == 3
    twin = copy.deepcopy(model)
    unpatch_tree(twin)
    assert restore_modules({"": twin}, config) == 3
    installed = [one for patched in patched_modules(twin) for one in patched.engines]
    assert [one.lossy for one in installed] == [True] * 3
    other = Trio().eval()
    assert restore_modules({"": other}, config) == 3
    assert not any(one.lossy for patched in patched_modules(other) for one in patched.engines)


def test_without_a_strict_winner_eager_takes_its_place(tmp_path: Path, model: nn.Module) -> None:
    config = relaxed(tmp_path, lossy_backend(0.2, strict_wait=None))
    report = tune(model, [X], config)
    assert report.rows[0].backend == "eager"
    assert "missed the quality budget" in report.rows[0].note
    with torch.no_grad():
        torch.testing.assert_close(model(X), Waiting.forward(model, X))
    # Decided: the next tuning does not try it again.
    again = lossy_backend(0.2, strict_wait=None)
    assert tune(model, [X], replace(config, backends=(again,))).rows[0].backend == "eager"
    assert again.builds == []
    assert again.engines == []


def test_the_worst_module_goes_first_and_the_others_stay(tmp_path: Path) -> None:
    class Uneven(QuickBackend):
        """Much worse on the second part, whose output is wider."""

        def change(self, leaves: list[torch.Tensor], engine: Any) -> list[torch.Tensor]:
            self.noise = 0.2 if leaves[0].shape[-1] == 8 else 0.001
            return super().change(leaves, engine)

        def build(self, request: BuildRequest) -> Any:
            if request.path == "Chain":
                raise BuildError("not as a whole")
            return super().build(request)

    chain = Chain().eval()
    backend = Uneven("both", recipes=lossy_backend(0).offered, by_recipe={"strict": 1.0, "low": 0.0})
    report = tune(chain, [X], relaxed(tmp_path, backend))
    assert {row.path: row.backend for row in report.rows} == {
        "Chain": "eager",
        "first": LOSSY,
        "second": "both[speed=strict]",
    }
    assert report.quality.admitted == [f"first: {LOSSY}"]
    assert report.quality.taken_back == [f"second: {LOSSY}"]
    assert report.quality.value <= 0.05


def test_a_broken_lossy_engine_is_wrong_before_any_budget_is_asked(tmp_path: Path, model: nn.Module) -> None:
    report = tune(model, [X], relaxed(tmp_path, lossy_backend(float("nan"))))
    assert outcomes(report)[LOSSY][0] == "wrong"
    report = tune(model, [X], relaxed(tmp_path / "other", lossy_backend(-3.0)))
    assert outcomes(report)[LOSSY][0] == "wrong"
    assert "cosine similarity" in outcomes(report)[LOSSY][1]
    assert report.quality.admitted == report.quality.taken_back == []


def test_quality_is_told_where_no_lossy_engine_is_in_use_too(tmp_path: Path, model: nn.Module) -> None:
    report = tune(model, [X], relaxed(tmp_path, QuickBackend()))
    assert 0 <= report.quality.value < 1e-4
    assert "quality: " in str(report)
    assert "lossy engines: none" in str(report)
    assert tune(Waiting(0.0).eval(), [X], relaxed(tmp_path, QuickBackend(milliseconds=1.0))).quality is None


def test_the_next_tuning_measures_again_and_builds_nothing(tmp_path: Path, model: nn.Module) -> None:
    config = relaxed(tmp_path, lossy_backend(0.01))
    tune(model, [X], config)
    report = tune(model, [X], config)
    assert (report.builds, report.rows[0].backend) == (0, LOSSY)
    assert report.quality.admitted == [f"Waiting: {LOSSY}"]


def test_a_start_takes_a_lossy_engine_for_the_weights_it_was_measured_with_only(tmp_path: Path) -> None:
    model = Waiting().eval()
    config = relaxed(tmp_path, lossy_backend(0.01))
    tune(model, [X], config)
    twin, other = Waiting().eval(), Waiting().eval()
    twin.load_state_dict(model.state_dict())
    assert restore_modules({"": twin}, config) == 1
    assert restore_modules({"": other}, config) == 1
    with torch.no_grad():
        for _ in range(2):
            twin(X), other(X)
        assert not torch.equal(twin(X), Waiting.forward(twin, X))  # Lossy, and admitted.
        torch.testing.assert_close(other(X), Waiting.forward(other, X))  # The strict one.
    assert stats(other).engine_calls == 2


def test_a_verdict_whose_quality_was_never_measured_gives_no_lossy_engine(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aitune_hf.tuning import drive

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drive, "hold_to_budget", interrupted)
    config = relaxed(tmp_path, lossy_backend(0.2))
    with pytest.raises(KeyboardInterrupt):
        tune(model, [X], config)
    assert restore_modules({"": model}, config) == 0
    assert "forward" not in vars(model)
    assert not [name for name in LocalStore(tmp_path).records() if "/verdict-" in name]


def test_random_numbers_are_the_same_in_both_runs(tmp_path: Path) -> None:
    """A pipeline that draws noise itself, from torch's own generator and from one that it is given."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Waiting()

        def forward(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
            return self.inner(x) + torch.randn(x.shape) + torch.randn(x.shape, generator=generator)

    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    target = Noisy().eval()
    backend = lossy_backend(0.01)
    backend.fail = lambda request: BuildError("no") if request.path == "Noisy" else None
    report = tune(target, [{"x": X, "generator": generator}, X], relaxed(tmp_path, backend))
    assert report.quality.admitted == [f"inner: {LOSSY}"]
    assert report.quality.value <= 0.05
    assert torch.equal(generator.get_state(), state)


def test_a_metric_of_the_users_gets_the_outputs_themselves(tmp_path: Path) -> None:
    seen: list[tuple[type, type]] = []

    def sameness(eager: Any, tuned: Any) -> float:
        seen.append((type(eager), type(tuned)))
        return float(eager["y"].shape == tuned["y"].shape)

    budget = QualityBudget(metric=sameness, least=1.0)
    report = tune(Chain().eval(), [X], relaxed(tmp_path, lossy_backend(0.1), quality=budget))
    assert report.quality.value == 1.0
    assert seen == [(dict, dict)]


def test_without_anything_to_compare_it_is_an_error(tmp_path: Path) -> None:
    class Mute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Waiting()

        def forward(self, x: torch.Tensor) -> str:
            self.inner(x)
            return "done"

    target = Mute().eval()
    with pytest.raises(SampleError, match="no image, array or tensor"):
        tune(target, [X], relaxed(tmp_path, lossy_backend(0.01)))
    assert "forward" not in vars(target.inner)


def test_under_jit_enable_only_strict_recipes_are_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from aitune_hf.jit import enable

    backend = lossy_backend(0.01)
    with enable(relaxed(tmp_path, backend, min_samples=1)):
        model = Waiting().eval()
        with torch.no_grad():
            model(X)
            model(X)
    assert [options["speed"] for options in backend.options] == ["strict"]
    assert "only strict recipes" in caplog.text
    unpatch_tree(model)


# -- metrics -----------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    image: Any
    flag: bool = True
    text: str = "a"


def image(level: int) -> Image.Image:
    return Image.fromarray(numpy.full((2, 3, 3), level, dtype=numpy.uint8))


def test_every_form_of_output_is_reduced_to_its_numbers() -> None:
    class ModelOutput(OrderedDict):  # type: ignore[type-arg]
        pass

    found = final_arrays(
        [
            Output(image=image(5)),
            ModelOutput(loss=None, logits=torch.ones(2, 3, dtype=torch.bfloat16), hidden=(torch.zeros(1),)),
            {"label": "x", "score": 0.5},
            [[[1.0, 2.0], [3.0, 4.0]]],
            numpy.float32(2),
            numpy.array([image(1), image(2)], dtype=object),
            numpy.array(["text"]),
        ]
    )
    assert [array.shape for array in found] == [(2, 3, 3), (2, 3), (1,), (), (1, 2, 2), (), (2, 3, 3), (2, 3, 3)]


def quality_of(metric: Any, eager: Any, tuned: Any) -> float:
    bound = {"most": 1.0} if metric == "max_abs" else {"least": 0.0}
    budget = QualityBudget(metric=metric, **bound)
    return measure(budget, kept_output(eager, budget), kept_output(tuned, budget))


@pytest.mark.parametrize(
    ("metric", "eager", "tuned", "expected"),
    [
        ("psnr", image(100), image(101), 20 * math.log10(255)),
        ("psnr", numpy.full((2, 2), 0.5), numpy.full((2, 2), 0.6), 20.0),
        ("psnr", [image(1), image(1)], [image(1), image(3)], 20 * math.log10(255 / 2)),
        ("psnr", image(1), image(1), 200.0),
        ("cosine", torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]]), math.sqrt(0.5)),
        ("cosine", torch.zeros(2, 3), torch.zeros(2, 3), 1.0),
        ("max_abs", {"a": torch.zeros(3), "b": 1.0}, {"a": torch.tensor([0.0, -0.25, 0.0]), "b": 1.0}, 0.25),
        ("agreement", torch.eye(4), torch.eye(4)[[0, 1, 2, 2]], 0.75),
        ("agreement", torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 0]), 0.5),
    ],
)
def test_metrics(metric: str, eager: Any, tuned: Any, expected: float) -> None:
    assert quality_of(metric, eager, tuned) == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["psnr", "cosine", "max_abs"])
def test_nothing_holds_for_what_is_not_a_number_or_of_another_shape(metric: str) -> None:
    budget = QualityBudget(metric=metric, **({"most": 9.0} if metric == "max_abs" else {"least": -9.0}))  # type: ignore[arg-type]
    for tuned in (torch.tensor([1.0, math.nan]), torch.ones(3)):
        value = measure(budget, kept_output(torch.ones(2), budget), kept_output(tuned, budget))
        assert not budget.holds(value)
        assert math.isnan(budget.worst([1.0, value, 2.0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric": "ssim", "least": 1}, "metric must be one of"),
        ({"metric": "psnr"}, "needs one of"),
        ({"metric": "psnr", "least": 1, "most": 2}, "needs one of"),
        ({"metric": "psnr", "most": 2}, "needs `least`"),
        ({"metric": "max_abs", "least": 2}, "needs `most`"),
    ],
)
def test_a_budget_that_says_nothing_is_an_error(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QualityBudget(**settings)
