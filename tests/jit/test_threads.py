"""Several threads in one module: every answer is right, and every call is counted once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from jit_kit import Bench, FrozenBackend, Leaf, Net, check, eager_twin, patched, rows, state, stats, untune
from torch import nn

from aitune_hf.jit.session import pipeline_call

THREADS, CALLS = 8, 500


def hammer(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Run ``work`` in several threads that start together; raise what any of them raised."""
    ready = threading.Barrier(threads)

    def run(index: int) -> None:
        ready.wait(10)
        work(index)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run, index) for index in range(threads)]:
            future.result(120)


def inputs_and_answers(twin: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with torch.no_grad():
        return [(x, twin(x)["y"]) for x in (rows(2 + index % 3) for index in range(THREADS))]


def test_eight_threads_get_their_own_answers_and_are_all_counted(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    bench.tune(net, rows(2), rows(3))
    pairs = inputs_and_answers(twin)  # Inputs of four rows are outside what was tuned.

    def work(index: int) -> None:
        x, answer = pairs[index]
        with torch.no_grad():
            for _ in range(CALLS):
                assert torch.allclose(net(x)["y"], answer, atol=1e-5)

    hammer(work)
    counted = stats(net)
    outside = sum(x.shape[0] == 4 for x, _ in pairs) * CALLS
    assert counted.engine_calls == THREADS * CALLS - outside
    assert sum(counted.eager_calls.values()) == outside
    assert patched(net).call_count == THREADS * CALLS + 2  # And the two samples.


def test_untuning_while_others_call_closes_no_engine_under_a_call(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    pairs = inputs_and_answers(twin)
    for _ in range(5):
        bench.tune(net, rows(2), rows(4))
        stop = threading.Event()

        def work(index: int, stop: threading.Event = stop) -> None:
            if index == 0:
                stop.wait(0.05)
                untune(net)
                stop.set()
                return
            x, answer = pairs[index]
            count = 0
            with torch.no_grad():
                while not stop.is_set() or count < 50:
                    count += 1
                    assert torch.allclose(net(x)["y"], answer, atol=1e-5)

        hammer(work)
        assert all(engine.closed for engine in bench.backend.engines)
        assert state(net) is None


def test_an_engine_is_closed_by_the_last_call_that_runs_in_it(bench: Bench) -> None:
    leaf = Leaf()
    bench.tune(leaf, rows())
    engine: Any = bench.backend.engines[-1]
    inside, go = threading.Event(), threading.Event()
    run = engine.frozen.linear.forward

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        go.wait(10)
        assert not engine.closed
        return run(x)

    engine.frozen.linear.forward = slow
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        call = pool.submit(torch.no_grad()(leaf), rows())
        inside.wait(10)
        untune(leaf)
        assert not engine.closed
        go.set()
        call.result(10)
    assert engine.closed


@pytest.mark.parametrize("refuse", [[], ["Net"]], ids=["tuned", "below"])
def test_one_thread_tunes_while_others_call(bench: Bench, refuse: list[str]) -> None:
    bench.backend = FrozenBackend(refuse=refuse)
    net = Net()
    twin = eager_twin(net)
    session = bench.session(net, min_samples=20)
    pairs = inputs_and_answers(twin)

    def work(index: int) -> None:
        x, answer = pairs[index]
        with torch.no_grad():
            for _ in range(60):
                assert torch.allclose(net(x)["y"], answer, atol=1e-5)

    hammer(work)
    assert state(net) == ("eager" if refuse else "tuned")
    assert len(session.heads) == 1
    assert sum(name == "Net" for name in session.fq_name_counter) == 1
    check(net, twin, rows(3))


def test_others_go_on_eager_while_one_thread_tunes(bench: Bench) -> None:
    building, go = threading.Event(), threading.Event()

    class Slow(FrozenBackend):
        def build(self, request: Any) -> Any:
            building.set()
            go.wait(20)
            return super().build(request)

    bench.backend = Slow()
    net = Net()
    twin = eager_twin(net)
    bench.session(net, min_samples=2)
    check(net, twin, rows())
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(check, net, twin, rows())
        building.wait(20)
        for _ in range(3):
            check(net, twin, rows())  # Would wait for ever if it needed the thread that tunes.
        go.set()
        call.result(20)
    check(net, twin, rows(), engine=True)


def test_first_calls_from_many_threads_make_one_head(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    session = bench.session(net, mode="inspect")
    pairs = inputs_and_answers(twin)

    def work(index: int) -> None:
        x, answer = pairs[index]
        with torch.no_grad():
            for _ in range(30):
                assert torch.allclose(net(x)["y"], answer, atol=1e-5)

    hammer(work)
    assert session.heads == [patched(net)]
    (graph,) = patched(net).recorder.graphs.values()
    assert graph.calls == patched(net).call_count == THREADS * 30
    assert graph.untunable is None


def test_a_change_is_seen_by_all_threads_inside_and_outside_pipeline_calls(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    bench.tune(net, rows(2), rows(4))
    pairs = inputs_and_answers(twin)
    net.second.right.scale = twin.second.right.scale = 3.0
    changed = inputs_and_answers(twin)
    changed = [(x, twin(x)["y"].detach()) for x, _ in pairs]

    def work(index: int) -> None:
        x, answer = changed[index]
        with torch.no_grad():
            for count in range(50):
                if count % 2:
                    with pipeline_call():
                        assert torch.allclose(net(x)["y"], answer, atol=1e-5)
                else:
                    assert torch.allclose(net(x)["y"], answer, atol=1e-5)

    hammer(work)
    assert stats(net).engine_calls == 0
