"""Several engines for one graph: the first that may run here is used; and a word alone decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hub_server import FakeHub, Fault
from sharing_kit import Block, Machine, PlainBackend, X, call

from aitune_hf import tune
from aitune_hf.backends import registry
from aitune_hf.hub.bundle import collect
from aitune_hf.hub.publish import push
from aitune_hf.hub.pull import pull
from aitune_hf.hub.record import PipelineRecord, SharedVerdict
from aitune_hf.hub.remote import open_remote
from aitune_hf.hub.trust import Trust

REPO = "me/tuned"
Machines = Callable[[str], Machine]


class DataBackend(PlainBackend):
    """Its artefacts are data."""

    native = False

    def __init__(self) -> None:
        super().__init__("datafake")


@pytest.fixture
def two(hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A repository with a native engine and one of data for the same calls; returns what a pull installs."""
    monkeypatch.setattr(registry, "_third_party", lambda: {"datafake": SimpleNamespace(load=lambda: DataBackend)})
    both = (PlainBackend(), DataBackend())
    for number, backend in enumerate(both):
        mine, module = machine(f"mine {number}"), Block()
        tune(module, [X], mine.config(backends=(backend,)))
        push(mine.target(module, backends=(backend,)), open_remote(REPO))
    _faster(hub, machine, "fake")

    def installed(name: str, trust: object) -> list[str]:
        target = machine(name).target(Block(), backends=both)
        result = pull(target, [open_remote(REPO)], trust=Trust.parse(trust))
        return [engine.rpartition("/")[2].rpartition("-")[0] for each in result.modules for engine in each.engines]

    return installed


def _record(hub: FakeHub, machine: Machines) -> PipelineRecord:
    pipeline = machine("mine 0").target(Block()).pipeline_hash
    return PipelineRecord.from_bytes(pipeline, hub.repos[REPO].head.files[f"aitune/v1/pipelines/{pipeline}.json"][0])


def _write(hub: FakeHub, record: PipelineRecord) -> None:
    repo = hub.repos[REPO]
    repo.commit({**repo.head.files, record.path: (record.to_bytes(), False)}, "a change")


def _faster(hub: FakeHub, machine: Machines, name: str) -> None:
    """Let the engine of one backend be listed first."""

    def ordered(verdict: SharedVerdict) -> SharedVerdict:
        return replace(verdict, engines=tuple(sorted(verdict.engines, key=lambda one: one.key.backend != name)))

    record = _record(hub, machine)
    tuned = [
        replace(one, verdicts={k: tuple(map(ordered, v)) for k, v in one.verdicts.items()}) for one in record.tuned
    ]
    _write(hub, replace(record, tuned=tuple(tuned)))


def test_data_stands_in_for_a_native_winner_that_is_not_trusted(hub: FakeHub, two: Callable[..., list[str]]) -> None:
    assert two("trusting", True) in (["fake"], ["datafake"])
    assert two("wary", None) == ["datafake"]


def test_the_next_one_stands_in_for_one_that_is_damaged(hub: FakeHub, two: Callable[..., list[str]]) -> None:
    hub.faults = [Fault("GET .*/fake-.*/engine.json", "wrong")]
    assert two("one", True) == ["datafake"]
    hub.faults = [Fault("GET .*/datafake-.*/engine.json", "wrong")]
    assert two("other", True) == ["fake"]


def test_of_engines_for_the_same_shapes_one_is_fetched(hub: FakeHub, machine: Machines) -> None:
    for level in (1, 2, 3):
        mine = machine(f"mine {level}").with_options(level=level)
        mine.tuned(Block())
        mine.push(Block(), REPO)
    found = machine("theirs").look_up(Block(), REPO)
    assert len(found.findings[0].engines) == 3
    assert len(found.findings[0].first_choices) == 1
    with hub.counted() as requests:
        assert machine("theirs").pull(Block(), REPO).installed == 1
    assert len(requests) == 3  # the record, and two files


@pytest.mark.parametrize("trust", [None, True])
def test_a_strangers_losses_do_not_end_the_tuning_here(
    hub: FakeHub, machine: Machines, trust: object, tmp_path: object
) -> None:
    mine = machine("mine 0")
    target = mine.tuned(Block())
    mine.push(Block(), REPO)
    record = collect(target, mine.cache / "copied").record
    lost = {"shapes": [[[2, 4]]], "reason": "it is slower, believe me", "structural": True}
    tuned = [
        replace(
            one,
            verdicts={k: tuple(replace(each, engines=(), lost=(lost,)) for each in v) for k, v in one.verdicts.items()},
        )
        for one in record.tuned
    ]
    _write(hub, replace(record, tuned=tuple(tuned)))
    theirs, module = machine("theirs"), Block()
    result = theirs.pull(module, REPO, trust=trust)
    assert result.misses == {"": "eager was faster there"}
    assert theirs.target(module).verdicts(module) == []
    tune(module, [X], theirs.config())
    call(module)
    assert len(theirs.target(module).verdicts(module)[0].engines) == 1
