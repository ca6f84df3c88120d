"""Nothing recorded outlives tuning, calls leave nothing behind, and a deleted module takes everything with it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_kit import Bench, Forgetful, FrozenBackend, Net, check, eager_twin, patched, rows, state
from torch import nn

from aitune_hf.jit import TuningSession
from aitune_hf.jit.recorder import GraphRecorder


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Only reference counts free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def samples_of(recorder: GraphRecorder) -> list[weakref.ref[torch.Tensor]]:
    graphs = recorder.graphs.values()
    return [weakref.ref(t) for g in graphs for s in g.samples for t in (*s.inputs, *s.outputs)]


@pytest.mark.parametrize("refuse", [[], ["Net"], ["Net", "Block", "Leaf"]], ids=["tuned", "below", "nowhere"])
def test_samples_are_freed_after_tuning(bench: Bench, refuse: list[str], no_collection: None) -> None:
    bench.backend = FrozenBackend(refuse=refuse)
    net = Net()
    bench.session(net, min_samples=3)
    twin = eager_twin(net)
    check(net, twin, rows())
    check(net, twin, rows(3))
    kept = samples_of(patched(net).recorder)
    assert len(kept) == 6
    check(net, twin, rows())
    assert [reference() for reference in kept] == [None] * 6
    assert not any(samples_of(one.recorder) for one in [patched(net)])


def test_live_tensors_are_flat_over_calls(bench: Bench) -> None:
    for refuse in ([], ["Net"]):
        bench.backend = FrozenBackend(refuse=refuse, name=f"frozen{len(refuse)}")
        net = Net()
        bench.tune(net, rows(), rows(3))
        with torch.no_grad():
            net(rows())
            before = live_tensors()
            for count in range(20):
                net(rows(2 + count % 4))
        assert live_tensors() <= before


def test_recording_for_long_keeps_few_samples(bench: Bench) -> None:
    net = Net()
    bench.session(net, mode="inspect")
    with torch.no_grad():
        for _ in range(40):
            net(rows())
    assert len(samples_of(patched(net).recorder)) == 9  # Three calls of one shape: an input and two outputs each.
    assert all(not samples_of(patched(child).recorder) for child in (net.first, net.second))


def test_a_value_that_is_another_at_every_call_does_not_grow_memory(bench: Bench) -> None:
    from jit_kit import Leaf

    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.session(leaf, mode="inspect")
    for count in range(200):
        check(leaf, twin, rows(), gain=float(count))
    recorder = patched(leaf).recorder
    assert len(recorder.graphs) == 64
    assert recorder.overflow == 200 - 64
    assert patched(leaf).call_count == 200


@pytest.mark.parametrize("how", ["patched", "recording", "tuned", "below", "untuned"])
def test_a_deleted_module_takes_everything_with_it_at_once(bench: Bench, how: str, no_collection: None) -> None:
    bench.backend = Forgetful(refuse=["Net"] if how == "below" else [])
    net = Net()
    session = bench.session(net, min_samples={"patched": 9, "recording": 9}.get(how, 2))
    with torch.no_grad():
        for _ in range(0 if how == "patched" else 4):
            net(rows())
    assert state(net.first if how == "below" else net) == {"patched": "init", "recording": "recording"}.get(
        how, "tuned"
    )
    references: list[weakref.ref[Any]] = [weakref.ref(module) for module in net.modules()]
    references += [weakref.ref(tensor) for tensor in net.parameters()]
    references += [weakref.ref(patched(net)), *samples_of(patched(net).recorder)]
    references += [weakref.ref(installed.engine) for installed in patched(net).engines]
    if how == "untuned":
        patched(net)._unpatch_hierarchy(include_self=True)
    del net
    alive = [reference() for reference in references if reference() is not None]
    assert alive == []
    assert session.heads == session.modules == []


def test_closing_engines_of_a_deleted_module_is_not_forgotten(bench: Bench) -> None:
    net = Net()
    bench.tune(net, rows())
    engine = bench.backend.engines[-1]
    del net
    gc.collect()
    assert engine.closed


def test_a_session_keeps_no_module_alive(no_collection: None, tmp_path: Path) -> None:
    bench = Bench(tmp_path, Forgetful())
    session = bench.session(*(nets := [Net() for _ in range(3)]), min_samples=1)
    with torch.no_grad():
        for net in nets:
            net(rows())
    assert len(session.heads) == 3
    del net
    nets.pop()
    assert len(session.heads) == 2
    nets.clear()
    assert session.heads == session.modules == []


def test_many_short_lived_modules_leave_nothing_in_the_session() -> None:
    from aitune_hf.jit.patcher import Patcher

    session = TuningSession(tuner=None)
    for _ in range(50):
        net = Net()
        Patcher(session).patch_tree(net)
        net(rows())
    del net
    gc.collect()
    assert len(session._heads) <= 1
    assert session.modules == []


def test_a_guard_lets_offloaded_weights_go(bench: Bench, no_collection: None) -> None:
    net = Net()
    bench.backend = Forgetful()
    bench.tune(net, rows())
    weight = weakref.ref(net.first.left.linear.weight)
    net.first.left.linear.weight = nn.Parameter(torch.zeros(4, 4))
    # The engine of this test holds an alias of the storage, as a compiled one does, but nobody the parameter.
    assert weight() is None
