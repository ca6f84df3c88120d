"""Engines that were built for machines that are not here travel, and stay what they are: never run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hub_server import FakeHub
from sharing_kit import Block, Machine, call, vars_of

from aitune_hf import stats
from aitune_hf.cache import EngineKey, Entry, Environment
from aitune_hf.hub.target import Target, place_of
from aitune_hf.tuning.unverified import UNVERIFIED_POLICY

REPO = "me/tuned"
Machines = Callable[[str], Machine]


def built_for(machine: Machine, place: Environment) -> Target:
    """Put an engine for a kind of machine into a cache, as ``build_for`` does, and nothing else."""
    scratch = Machine(machine.cache.with_name(f"{machine.cache.name} scratch"))
    module = Block()
    known = scratch.tuned(module)
    (verdict,) = known.verdicts(module)
    (record,) = verdict.engines
    entry = known.store.lookup(record.key)
    assert isinstance(entry, Entry)
    target = machine.target(Block())
    key = EngineKey(**{**vars_of(record.key), "environment": place})
    with target.store.reserve(key) as slot:
        for name in entry.manifest.files:
            slot.write(name, entry.read(name))
        slot.commit(engine=entry.manifest.engine)
    result = replace(record.result, outcome="right", engine=str(key.entry_path))
    target.keep_unverified("", verdict.graph, [replace(record, key=key, result=result)], place)
    return machine.target(Block())


def outcomes(target: Target, module: torch.nn.Module, place: Environment) -> list[str]:
    return [each.result.outcome for verdict in target.unverified_verdicts(module, place) for each in verdict.engines]


def test_they_are_pushed_pulled_and_checked_at_their_first_call(hub: FakeHub, machine: Machines) -> None:
    place = Environment.current("cpu").for_plans()
    built_for(machine("mine"), place)
    pushed = machine("mine").push(Block(), REPO)
    assert f"/{place.tag}/" in pushed.added[0]

    theirs, module = machine("theirs"), Block()
    assert "hit: fake" in theirs.look_up(module, REPO).summary()
    wary = machine("wary").pull(Block(), REPO, trust=None)
    assert wary.installed == 0
    result = theirs.pull(module, REPO, trust=REPO)
    assert [outcome.answer for outcome in result.modules] == ["hit"], result.summary()
    assert result.installed == 1
    target = theirs.target(module)
    assert target.verdicts(module) == []  # no decision: nobody has timed it
    assert outcomes(target, module, place) == ["unverified"]
    for _ in range(2):
        assert torch.equal(call(module), module.linear(torch.ones(2, 4)).relu())
    assert stats(module).engine_calls == 1
    assert outcomes(target, module, place) == ["right"]
    assert result.confirm()
    # What was found out here stays.
    assert theirs.pull(Block(), REPO, trust=REPO).installed == 1
    assert outcomes(theirs.target(module), module, place) == ["right"]


def test_on_another_kind_of_machine_they_are_a_named_miss(hub: FakeHub, machine: Machines) -> None:
    here = Environment.current("cpu")
    place = Environment(device_type="cuda", arch=here.arch, os=here.os, torch="any", sm="sm89").for_plans()
    built_for(machine("mine"), place)
    assert machine("mine").push(Block(), REPO).added
    result = machine("theirs").pull(Block(), REPO, trust=REPO)
    assert result.misses == {"": "built for cuda, asked for cpu"}
    assert machine("theirs").target(Block()).store.entries() == []


def test_a_decision_by_times_comes_first(hub: FakeHub, machine: Machines) -> None:
    place = Environment.current("cpu").for_plans()
    built_for(machine("mine"), place)
    machine("mine").tuned(Block())
    assert len(machine("mine").push(Block(), REPO).added) == 2
    module = Block()
    result = machine("theirs").pull(module, REPO, trust=REPO)
    assert [f"/{place.tag}/" in engine for outcome in result.modules for engine in outcome.engines] == [False]
    assert outcomes(machine("theirs").target(module), module, place) == []


@pytest.mark.parametrize("tag", ["cuda-sm89-x86_64-linux", "cpu-x86_64-linux"])
def test_a_tag_names_a_kind_of_machine(tag: str) -> None:
    place = place_of(tag)
    assert place is not None
    assert place.tag == tag
    assert place == place.for_plans()


@pytest.mark.parametrize(
    "tag", [UNVERIFIED_POLICY[:8], "", "a-b", "CUDA-sm89-x86_64-linux", "torch2.13-cu130-sm90-x-y", "data-cpu"]
)
def test_another_tag_does_not(tag: str) -> None:
    assert place_of(tag) is None
