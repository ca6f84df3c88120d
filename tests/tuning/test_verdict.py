"""What is kept of a decision, and what is not read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tuning_kit import QuickBackend, Waiting, outcomes, settings

from aitune_hf import stats, tune
from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest, Recipe
from aitune_hf.backends.testing import FakeBackend
from aitune_hf.cache import LocalStore
from aitune_hf.errors import EngineLoadError
from aitune_hf.jit.patcher import unpatch_tree
from aitune_hf.tuning.baked import BakedEngine, WeightsDigest
from aitune_hf.tuning.drive import restore_modules
from aitune_hf.tuning.hints import RecipeHint, hint_record_name, read_hints, write_hints
from aitune_hf.tuning.verdict import SCHEMA, EngineRecord, Verdict

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture
def model() -> nn.Module:
    return Waiting(1.0).eval()


def verdict_record(store: LocalStore) -> str:
    (name,) = [name for name in store.records() if "/verdict-" in name]
    return name


def test_a_verdict_of_an_earlier_schema_counts_as_absent(tmp_path: Path, model: nn.Module) -> None:
    backend = FakeBackend()
    config = settings(tmp_path, backend, strategy="first_working")
    tune(model, [X], config)
    store = LocalStore(tmp_path)
    name = verdict_record(store)
    record: Any = store.read_record(name)
    assert record["schema"] == SCHEMA
    store.write_record(name, {**record, "schema": 1})
    unpatch_tree(model)
    assert restore_modules({"": model}, config) == 0
    report = tune(model, [X], config)
    # Decided anew, from the engine that is there.
    assert (report.builds, report.results[0].candidates[0].outcome) == (0, "won")
    assert store.read_record(name)["schema"] == SCHEMA  # type: ignore[index]


def test_a_record_of_an_engine_survives_json(tmp_path: Path, model: nn.Module) -> None:
    recipes = [Recipe(options={"speed": "cheap", "list": [1, 2]}, cost=1.0)]
    tune(model, [X], settings(tmp_path, QuickBackend(recipes=recipes)))
    store = LocalStore(tmp_path)
    verdict = Verdict.from_dict(store.read_record(verdict_record(store)) or {})
    (record,) = verdict.engines
    assert record.result.options == {"speed": "cheap", "list": [1, 2]}
    lossy = replace(
        record,
        eager_at=((0, 0, 1),),
        admitted={"metric": "cosine >= 0.9", "value": 0.99, "weights": "0" * 64},
        fallback=record,
    )
    assert EngineRecord.from_dict(json.loads(json.dumps(lossy.to_dict()))) == lossy


# -- baked weights -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def test_a_digest_tells_weights_apart_and_nothing_else() -> None:
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    digest = WeightsDigest(net).digest()
    assert WeightsDigest(twin).digest() == digest
    twin.linear.weight = nn.Parameter(net.linear.weight.detach().t().contiguous().t())  # Other strides.
    assert WeightsDigest(twin).digest() == digest
    for change in (
        lambda: twin.linear.weight.data[1, 1].add_(1e-3),
        lambda: twin.shift.add_(1),
        lambda: twin.scratch.add_(1),
        lambda: twin.double(),
    ):
        before = WeightsDigest(twin).digest()
        change()
        assert WeightsDigest(twin).digest() != before
    assert WeightsDigest(net).digest() == digest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64])
def test_a_digest_reads_every_dtype(dtype: torch.dtype) -> None:
    net = nn.Module()
    net.register_buffer("one", torch.ones(3, 2).to(dtype))
    net.register_buffer("scalar", torch.tensor(1).to(dtype))
    net.register_buffer("empty", torch.zeros(0, 4).to(dtype))
    before = WeightsDigest(net).digest()
    net.scalar.zero_()
    assert WeightsDigest(net).digest() != before


def test_a_digest_follows_edits_and_reads_what_did_not_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from aitune_hf.tuning import baked

    read: list[int] = []
    original = baked._bytes_digest
    monkeypatch.setattr(baked, "_bytes_digest", lambda tensor: read.append(tensor.numel()) or original(tensor))
    net = Net()
    weights = WeightsDigest(net)
    first = weights.digest()
    assert weights.digest() == first
    assert sorted(read) == [3, 4, 4, 16]
    read.clear()
    with torch.no_grad():
        net.shift.add_(1)
        changed = weights.digest()
        net.shift.sub_(1)
        assert weights.digest() == first != changed
    assert read == [4, 4]
    net.linear.weight.data = net.linear.weight.data.clone()
    assert weights.digest() == first


def test_weights_without_bytes_are_an_error() -> None:
    net = Net().to("meta")
    with pytest.raises(EngineLoadError, match=r"the bytes of linear\.bias \(Parameter\) cannot be read"):
        WeightsDigest(net).digest()


def test_an_engine_with_other_weights_does_not_load() -> None:
    net = Net()
    with pytest.raises(EngineLoadError, match="these are others"):
        BakedEngine(object(), WeightsDigest(net), "0" * 64)  # type: ignore[arg-type]


class Baking(FakeBackend):
    """Holds the sum of the weights it was built with, and adds it."""

    def __init__(self) -> None:
        super().__init__("baking", recipes=[Recipe(weights="baked", effort="fast")])

    def build(self, request: BuildRequest) -> BuildResult:
        result = super().build(request)
        return BuildResult(files=result.files, envelope=result.envelope, engine={**result.engine, "sum": _sum(request)})

    def load(self, request: LoadRequest) -> Any:
        assert request.engine["sum"] == _sum(request), "loaded for other weights"
        return super().load(request)


def _sum(request: BuildRequest | LoadRequest) -> float:
    return sum(float(tensor.sum()) for tensor in request.module.state_dict().values())


def test_another_checkpoint_is_not_given_the_engine_of_the_first(tmp_path: Path) -> None:
    models = [Waiting(0.0).eval() for _ in range(2)]
    config = settings(tmp_path, Baking(), strategy="first_working")
    reports = [tune(model, [X], config) for model in models]
    assert [report.builds for report in reports] == [1, 1]
    assert reports[0].rows[0].engine != reports[1].rows[0].engine
    assert reports[0].results[0].winner.weights == "baked"
    # Each start takes its own one over, and a third checkpoint none.
    for model in models:
        unpatch_tree(model)
        assert restore_modules({"": model}, config) == 1
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model(X), Waiting.forward(model, X))
        assert stats(model).engine_calls == 1
    assert restore_modules({"": Waiting(0.0).eval()}, config) == 0


# -- hints -------------------------------------------------------------------------------------------------------------


def hinted(tmp_path: Path, model: nn.Module, *backends: Any, hints: list[Any], **changes: Any) -> Any:
    """Tune with hints for the model's graph, which another cache folder tells the name of."""
    scout = LocalStore(tmp_path / "scout")
    tune(model, [X], settings(scout.root, FakeBackend("scout"), strategy="first_working"))
    verdict = Verdict.from_dict(scout.read_record(verdict_record(scout)) or {})
    store = LocalStore(tmp_path / "cache")
    name = hint_record_name(verdict.hierarchy_hash, verdict.graph.key)
    store.write_record(name, {"schema": 1, "source": "org/repo@sha", "recipes": hints})
    return tune(model, [X], settings(store.root, *backends, **changes))


def speeds(*names: str) -> list[Recipe]:
    efforts: Any = ("fast", "balanced", "max")
    return [Recipe(options={"speed": name}, cost=cost, effort=efforts[cost]) for cost, name in enumerate(names)]


def test_a_recipe_that_won_elsewhere_is_tried_first_and_alone(tmp_path: Path, model: nn.Module) -> None:
    backend = QuickBackend(recipes=speeds("a", "b", "c"))
    report = hinted(tmp_path, model, backend, hints=[{"backend": "quick", "options": {"speed": "c"}, "axes": None}])
    assert [options["speed"] for options in backend.options] == ["c"]
    assert report.rows[0].backend == "quick[speed=c]"
    assert outcomes(report)["quick[speed=a]"] == (
        "untried",
        "quick[speed=c], the recipe that won elsewhere, won here too",
    )


def test_a_hint_that_does_not_win_here_costs_one_build(tmp_path: Path, model: nn.Module) -> None:
    backend = QuickBackend(recipes=speeds("a", "b"), by_recipe={"b": 3.0, "a": 0.0})
    report = hinted(tmp_path, model, backend, hints=[{"backend": "quick", "options": {"speed": "b"}}])
    assert [options["speed"] for options in backend.options] == ["b", "a"]
    assert report.rows[0].backend == "quick[speed=a]"


@pytest.mark.parametrize(
    "hints",
    [
        [{"backend": "quick", "options": {"speed": "unheard of"}}],
        [{"backend": "elsewhere", "options": {}}],
        [{"options": {}}],
        [{"backend": 3}, {"backend": "quick", "options": ["speed"]}, "quick", None],
        "quick",
        {},
        [{"backend": "quick", "options": {"speed": "lossy"}}],
    ],
)
def test_a_hint_that_means_nothing_here_is_ignored(tmp_path: Path, model: nn.Module, hints: Any) -> None:
    recipes = [*speeds("a"), Recipe(options={"speed": "lossy"}, lossy=True, effort="fast")]
    backend = QuickBackend(recipes=recipes)
    report = hinted(tmp_path, model, backend, hints=hints)
    assert [options["speed"] for options in backend.options] == ["a"]
    assert list(outcomes(report)) == ["quick[speed=a]"]


def test_hints_are_written_and_read_back(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    hints = [RecipeHint(backend="openvino", options={"precision": "f32"}, axes=[[None, [1, 8, 1, None]]])]
    write_hints(store, "a" * 64, "b" * 64, source="org/repo@sha", hints=hints)
    assert read_hints(store, "a" * 64, "b" * 64) == hints
    assert read_hints(store, "a" * 64, "c" * 64) == []
    assert store.records() == [f"recipes/aa/{'a' * 64}/{'b' * 32}.json"]
