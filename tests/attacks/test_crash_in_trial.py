"""Engines that crash when they are loaded first: they never come near the caller's process, and are tried once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from attack_kit import SOURCE, Victim, native_key

from aitune_hf.cache import LocalStore, Manifest
from aitune_hf.errors import EngineLoadError
from aitune_hf.hub.admission import Admitted, Refused, admit
from aitune_hf.hub.objection import Objection
from aitune_hf.hub.trust import Trust


def killed() -> None:
    """Load a library in a child process that dies of it."""
    child = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], check=False, timeout=60)
    assert child.returncode == -signal.SIGSEGV
    raise EngineLoadError("its process was killed by SIGSEGV")


def failing(error: BaseException) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


def test_what_crashed_is_set_aside_and_not_tried_again(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "crashed", "model.pt2 failed its first load: EngineLoadError", meddles=killed)
    (kept,) = (victim.store.root / "aitune" / "quarantine").glob("*/entry/model.pt2")
    assert kept.read_bytes() == engine
    victim.store = LocalStore(victim.store.root)  # as another process sees it
    for trust in (True, SOURCE.url):
        victim.refused(native_key(), "crashed", "SIGSEGV", trust=trust)
    assert len(victim.trials) == 1


def test_the_same_files_under_another_manifest_are_not_tried_again(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "crashed", "model.pt2", meddles=killed)
    victim.lay_entry(native_key(), {"model.pt2": engine}, results={"speedup": 9.0}, provenance={"created": "later"})
    victim.refused(native_key(), "crashed", "failed here earlier")
    assert len(victim.trials) == 1


def test_other_files_for_the_same_key_get_their_own_trial(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "crashed", "model.pt2", meddles=killed)
    victim.lay_entry(native_key(), {"model.pt2": engine, "fixed.json": b"{}"})
    victim.admitted(native_key())
    assert len(victim.trials) == 2


@pytest.mark.parametrize("error", [RuntimeError("x"), MemoryError(), OSError("bad"), AssertionError()])
def test_whatever_it_raises_is_a_refusal(victim: Victim, engine: bytes, error: Exception) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "crashed", type(error).__name__, meddles=failing(error))


def test_what_cannot_be_tried_here_is_refused_and_not_remembered(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    reason = "model.pt2 needs a backend that is switched off"
    victim.refused(native_key(), "foreign", reason, meddles=failing(Objection("foreign", reason)))
    victim.admitted(native_key())


def test_an_interrupt_is_no_verdict(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    with pytest.raises(KeyboardInterrupt):
        victim.admit(native_key(), meddles=failing(KeyboardInterrupt()))
    victim.admitted(native_key())


def test_the_reason_is_bounded(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    result = victim.refused(native_key(), "crashed", "model.pt2", meddles=failing(RuntimeError("x" * 10**6)))
    assert len(result.reason) < 1000


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where threads run
def test_a_trial_that_kills_the_whole_process_leaves_nothing_in_the_store(victim: Victim, engine: bytes) -> None:
    # For a caller that does without the child: the entry is committed after its trial only.
    victim.lay_entry(native_key(), {"model.pt2": engine})

    def die(folder: Path, manifest: Manifest) -> None:
        os._exit(9)

    child = os.fork()
    if child == 0:
        admit(
            victim.folder,
            native_key(),
            manifest_sha256=None,
            source=SOURCE,
            trust=Trust.parse(True),
            store=victim.store,
            trial=die,
        )
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert LocalStore(victim.store.root).entries() == []


def test_many_that_admit_at_once_try_it_once(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    trials: list[int] = []
    results: list[Admitted | Refused] = []

    def run() -> None:
        results.append(
            admit(
                victim.folder,
                native_key(),
                manifest_sha256=None,
                source=SOURCE,
                trust=Trust.parse(True),
                store=LocalStore(victim.store.root),
                trial=lambda folder, manifest: trials.append(1),
            )
        )

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trials) == 1
    policies = [result.policy for result in results if isinstance(result, Admitted)]
    assert sorted(policies) == ["explicit"] + ["present"] * 5
