"""Modules taken up as they are constructed, and what is said at exit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_kit import Bench, FrozenBackend, Leaf, Net, check, eager_twin, patched, rows, state, untune
from torch import nn

from aitune_hf.config import TuneConfig
from aitune_hf.jit import PatchedModule, current_session, intercepting
from aitune_hf.jit.exit_advice import exit_advice
from aitune_hf.jit.patcher import patched_modules
from aitune_hf.tuning.drive import make_tuner

INIT: Any = None


@pytest.fixture(autouse=True)
def constructor_before() -> None:
    global INIT
    INIT = nn.Module.__init__  # Torch's own compiler may have wrapped it for good by now.


@pytest.fixture(autouse=True)
def silent_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice for the sessions made here is not for whoever runs the tests."""
    monkeypatch.setattr("aitune_hf.jit.interception.atexit.register", lambda advise: advise)


def block(bench: Bench, **settings: Any) -> Any:
    config = bench.config(**settings)
    return intercepting(config, make_tuner(config))


def test_modules_constructed_in_the_block_are_tuned_when_their_time_has_come(bench: Bench) -> None:
    before = Net()
    with block(bench, min_samples=2) as session:
        net = Net()
        assert current_session() is session
        assert nn.Module.__init__ is not INIT
    after = Net()
    assert nn.Module.__init__ is INIT
    assert [state(module) for module in (before, after, net, net.first.left)] == [None, None, "init", "init"]
    assert state(net.first.left.linear) is None
    twin = eager_twin(net)
    for _ in range(3):
        check(net, twin, rows())
    assert state(net) == "tuned"
    untune(net)
    assert list(patched_modules(net)) == []


def test_it_works_as_a_decorator(bench: Bench) -> None:
    @block(bench, min_samples=1)
    def make() -> Net:
        return Net()

    for _ in range(2):
        assert state(make()) == "init"
        assert nn.Module.__init__ is INIT


def test_an_exception_in_the_block_restores_the_constructor(bench: Bench) -> None:
    with pytest.raises(LookupError), block(bench):
        raise LookupError
    assert nn.Module.__init__ is INIT


def test_a_class_that_initialises_its_base_twice_is_patched_once(bench: Bench) -> None:
    class Twice(Leaf):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            super().__init__()

    with block(bench, min_samples=1) as session:
        twice = Twice()
    assert [one.name for one in session.modules].count("Twice") == 1
    check(twice, eager_twin(twice), rows())


def test_an_inner_block_takes_the_modules_and_gives_them_back(bench: Bench) -> None:
    with block(bench) as outer:
        first = Leaf()
        with block(bench) as inner:
            second = Leaf()
        third = Leaf()
    assert [patched(one).session for one in (first, second, third)] == [outer, inner, outer]


def test_overlapping_blocks_of_two_threads_keep_apart(bench: Bench) -> None:
    entered, leave = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        with block(bench) as session:
            entered.set()
            leave.wait(10)
            found.append(patched(Leaf()).session is session)
        found.append(state(Leaf()))

    thread = threading.Thread(target=other)
    with block(bench) as mine:
        thread.start()
        entered.wait(10)
        assert patched(Leaf()).session is mine
    assert state(Leaf()) is None  # The other thread's block is still open.
    leave.set()
    thread.join()
    assert found == [True, None]
    assert nn.Module.__init__ is INIT


def test_what_tuning_itself_constructs_is_left_alone(bench: Bench) -> None:
    made: list[nn.Module] = []

    class Constructing(FrozenBackend):
        def build(self, request: Any) -> Any:
            made.append(Leaf())
            return super().build(request)

    bench.backend = Constructing()
    with block(bench, min_samples=1):
        net = Net()
        check(net, eager_twin(net), rows())
        assert state(net) == "tuned"
    assert [state(one) for one in made] == [None]


def test_excluded_classes_are_not_intercepted(bench: Bench) -> None:
    with block(bench, patch_exclude=(Leaf.__module__,)) as session:
        Net()
        torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert session.modules == []


def test_existing_modules_and_new_ones_share_a_session(bench: Bench) -> None:
    from aitune_hf.jit import Patcher

    old = Leaf()
    with block(bench, min_samples=1) as session:
        Patcher().patch_tree(old)
        new = Leaf()
    assert patched(old).session is patched(new).session is session


SCRIPT = """
import torch
from torch import nn
from aitune_hf.config import TuneConfig
from aitune_hf.jit import intercepting, enable_tune_deferred

class Mine(nn.Module):
    def forward(self, x):
        return x + 1

class Tuner:
    def restore(self, patched): return None
    def can_capture(self, patched): pass
    def blocks(self, patched): return []
    def tune(self, patched): return [], {{}}

def main():
    with intercepting(TuneConfig({settings}), Tuner()) as session:
        mine = Mine()
        for _ in range({calls}):
            mine(torch.ones(2))
    {then}

main()
"""


@pytest.mark.parametrize(
    ("settings", "calls", "then", "expected"),
    [
        ("min_samples=5", 2, "del mine", "the most called module saw 2 of min_samples=5 calls"),
        ("min_samples=2", 4, "pass", None),
    ],
)
def test_advice_is_given_at_exit_when_nothing_was_tuned(
    settings: str, calls: int, then: str, expected: str | None, tmp_path: Path
) -> None:
    script = textwrap.dedent(SCRIPT).format(settings=settings, calls=calls, then=then)
    command = [sys.executable, "-W", "error", "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    if expected is None:
        assert run.stderr == ""
    else:
        assert run.stderr.startswith(f"aitune_hf: nothing was tuned; {expected}")
        assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "calls", "expected"),
    [
        ({"min_samples": 5}, 2, "the most called module saw 2 of min_samples=5 calls"),
        ({"min_samples": 5}, 0, "none of the modules that were intercepted was called"),
        ({"mode": "deferred"}, 4, "enable_tune_deferred() was never called"),
        ({"min_samples": 1, "batch_axis_required": True}, 4, "no recorded call varied an axis"),
        ({"min_samples": 1, "skip_modules": ("Leaf",)}, 4, "skipped on request"),
        ({"mode": "inspect"}, 4, None),
        ({"min_samples": 2}, 4, None),
    ],
)
def test_the_advice_names_what_was_missing(
    bench: Bench, settings: dict[str, Any], calls: int, expected: str | None
) -> None:
    with block(bench, **settings) as session:
        leaf = Leaf()
    with torch.no_grad():
        for _ in range(calls):
            leaf(rows())
    advice = exit_advice(session)
    assert advice is None if expected is None else expected in str(advice)


def test_on_python_exit_speaks_for_the_current_session(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with intercepting(TuneConfig(mode="deferred", cache_dir=bench.folder), None):
        leaf = Leaf()
        leaf(rows())
        PatchedModule.on_python_exit()
    assert "enable_tune_deferred()" in capsys.readouterr().err
