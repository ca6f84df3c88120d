"""Engines that hold a copy of the weights follow every edit: for every thread, and whatever interrupts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_kit import Bench, FrozenBackend, FrozenEngine, Leaf, check, eager_twin, rows, stats

from aitune_hf.backends.base import Recipe


class CopyingEngine(FrozenEngine):
    """Has its own copy of the weights, as of the last rebind."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.at_rebind: Callable[[], object] = lambda: None
        self.rebind()

    def rebind(self) -> None:
        self.at_rebind()
        super().rebind()
        for tensor in (*self.frozen.parameters(), *self.frozen.buffers()):
            tensor.data = tensor.data.clone()


class CopyingBackend(FrozenBackend):
    def recipes(self, device: torch.device) -> Sequence[Recipe]:
        return [Recipe(weights="filled", effort="fast", cost=0.0)]

    def load(self, request: Any) -> Any:
        engine = CopyingEngine(request.module, request.engine)
        self.engines.append(engine)  # type: ignore[arg-type]
        return engine


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, CopyingBackend())


def edited(bench: Bench) -> tuple[Leaf, Leaf, CopyingEngine]:
    """A tuned module whose weights were edited after its engine had answered, and its twin with the same edit."""
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    check(leaf, twin, rows(), engine=True)
    for module in (leaf, twin):
        with torch.no_grad():
            module.linear.weight.mul_(3)
    return leaf, twin, bench.backend.engines[-1]  # type: ignore[return-value]


def test_an_interrupted_rebind_is_done_by_the_next_call(bench: Bench) -> None:
    leaf, twin, engine = edited(bench)

    def interrupt() -> None:
        engine.at_rebind = lambda: None
        raise KeyboardInterrupt

    engine.at_rebind = interrupt
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        leaf(rows())
    for _ in range(2):
        check(leaf, twin, rows(), engine=True)


def test_no_thread_gets_old_weights_while_another_rebinds(bench: Bench) -> None:
    leaf, twin, engine = edited(bench)
    rebinding, go_on = threading.Event(), threading.Event()
    engine.at_rebind = lambda: (rebinding.set(), go_on.wait(10))
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            check(leaf, twin, rows())
        except BaseException as error:  # noqa: BLE001 - told to the test.
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    threads[0].start()
    assert rebinding.wait(10)
    threads[1].start()
    threads[1].join(0.2)  # Time enough to answer with old weights, if it did not wait.
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert not wrong
    assert stats(leaf).engine_calls == 3


def test_an_edit_amid_a_rebind_is_seen_by_the_next_call(bench: Bench) -> None:
    leaf, twin, engine = edited(bench)
    rebind = engine.rebind

    def and_edit() -> None:
        rebind()
        engine.rebind = rebind  # type: ignore[method-assign]
        for module in (leaf, twin):
            module.linear.weight.mul_(2)

    engine.rebind = and_edit  # type: ignore[method-assign]
    with torch.no_grad():
        leaf(rows())
    check(leaf, twin, rows(), engine=True)


def test_a_module_that_left_its_device_takes_its_weights_with_it_at_the_next_call(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    engine: Any = bench.backend.engines[-1]
    kept = {name: tensor.clone() for name, tensor in leaf.state_dict().items()}
    before = engine.rebinds
    leaf.to("meta")
    with torch.no_grad():
        for _ in range(3):
            assert leaf(rows().to("meta")).is_meta
    assert engine.rebinds == before + 1  # Told once, not at every call that eager answers.
    leaf.load_state_dict(kept, assign=True)
    check(leaf, twin, rows(), engine=True)
