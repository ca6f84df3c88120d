"""A gate between calls and changes: nobody passes who must not, and no interrupt shuts it for good."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from aitune_hf.backends.call_gate import ONCE, CallGate


def call(gate: CallGate, work: Callable[[], object] = lambda: None) -> int:
    held: list[int] = []
    try:
        held += map(gate.take, ONCE)
        work()
        return held[0]
    finally:
        if held:
            gate.give(held[0])


def tokens(gate: CallGate, places: int) -> list[int]:
    """All tokens of a gate that nobody uses. Does not wait for what is lost."""
    found = []
    while len(found) < places + 1:
        try:
            found.append(gate.take(False))
        except Exception:  # noqa: BLE001 - the queue's own, which has no public name here.
            break
    for token in found:
        gate.give(token)
    return sorted(found)


def test_no_change_runs_beside_a_call() -> None:
    gate, inside, together = CallGate(3), [], []

    def look() -> None:
        inside.append(None)
        together.append(len(inside))
        inside.pop()

    def change() -> None:
        together.append(0 if not inside else 100)

    with ThreadPoolExecutor(6) as pool:
        done = [pool.submit(call, gate, look) for _ in range(300)]
        done += [pool.submit(gate.alone, change) for _ in range(100)]
        for one in done:
            one.result(10)
    assert max(together) <= 3
    assert tokens(gate, 3) == [0, 1, 2]


def test_a_change_that_fails_opens_the_gate_again() -> None:
    gate = CallGate(2)
    with pytest.raises(ZeroDivisionError):
        gate.alone(lambda: 1 / 0)
    assert gate.alone(lambda: "done") == "done"
    assert tokens(gate, 2) == [0, 1]


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Interrupts are heard: a job in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_waiting_for_a_call_opens_the_gate_again() -> None:
    gate, entered, leave = CallGate(2), threading.Event(), threading.Event()
    runs = threading.Thread(target=call, args=(gate, lambda: (entered.set(), leave.wait(10))))
    runs.start()
    assert entered.wait(10)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        gate.alone(lambda: pytest.fail("a call was still running"))
    timer.join()
    leave.set()
    runs.join(10)
    assert tokens(gate, 2) == [0, 1]
    assert gate.alone(lambda: "done") == "done"


@pytest.fixture
def alarms() -> Iterator[None]:
    """SIGALRM interrupts as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_interrupts_at_any_moment_lose_no_token(alarms: None) -> None:
    gate, interrupted = CallGate(2), 0
    for delay in range(400):
        try:
            signal.setitimer(signal.ITIMER_REAL, 20e-6 + delay * 1e-7)
            while True:
                call(gate)
                gate.alone(lambda: None)
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 400
    assert tokens(gate, 2) == [0, 1]
