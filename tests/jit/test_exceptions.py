"""An exception, wherever it comes from, leaves hooks, state and stack as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jit_kit import Bench, Block, FrozenBackend, Leaf, Net, check, eager_twin, patched, rows, state, stats
from torch import nn

from aitune_hf.backends.base import BuildRequest
from aitune_hf.errors import SampleError


class Touchy(nn.Module):
    """Raises on a negative first element, after its child has run."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or Leaf()
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if float(x.flatten()[0]) < 0:
            raise LookupError("negative")
        return y


def negative() -> torch.Tensor:
    return -rows().abs() - 1


def positive() -> torch.Tensor:
    return rows().abs() + 1


@pytest.mark.parametrize("moment", ["first call", "recording", "tuned", "eager"])
def test_the_users_exception_passes_and_nothing_else_changes(bench: Bench, moment: str) -> None:
    bench.backend = FrozenBackend(refuse=["Touchy"] if moment == "eager" else [])
    touchy = Touchy()
    twin = eager_twin(touchy)
    seen: list[Any] = []
    touchy.register_forward_hook(lambda *_: seen.append(None))
    session = bench.session(touchy, min_samples=3)
    calls = {"first call": 0, "recording": 1, "tuned": 4, "eager": 4}[moment]
    for _ in range(calls):
        check(touchy, twin, positive())
    before, hooks, forward = state(touchy), len(seen), touchy.forward
    if moment == "tuned":
        touchy.inner.flag = twin.inner.flag = True  # So that eager answers.
    with torch.no_grad(), pytest.raises(LookupError, match="negative"):
        touchy(negative())
    assert len(session.stack) == 0
    assert state(touchy) == (before if before != "init" else "recording")
    assert len(seen) == hooks
    assert touchy.forward is forward
    check(touchy, twin, positive())
    assert len(seen) == hooks + 1


def test_an_exception_deep_inside_empties_the_whole_stack(bench: Bench) -> None:
    outer = Touchy(Touchy(Touchy()))
    session = bench.session(outer, min_samples=2)
    with torch.no_grad(), pytest.raises(LookupError):
        outer(negative())
    assert len(session.stack) == 0
    for _ in range(3):
        check(outer, eager_twin(outer), positive())
    assert state(outer) == "tuned"


def test_calls_that_raise_do_not_count_as_samples(bench: Bench) -> None:
    touchy = Touchy()
    bench.session(touchy, min_samples=2)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(LookupError):
            touchy(negative())
    check(touchy, eager_twin(touchy), positive())
    assert state(touchy) == "recording"
    assert patched(touchy).call_count == 1


def test_a_wrong_call_raises_what_python_raises(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    for module in (leaf, twin):
        with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
            module(rows(), nothing=1)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
            module()
    check(leaf, twin, rows(), engine=True)


def test_an_exception_while_samples_are_replayed_keeps_the_children_usable(bench: Bench) -> None:
    class Moody(Block):
        """Raises when it is run without anybody asking."""

        calls_left = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            type(self).calls_left -= 1
            if type(self).calls_left < 0:
                raise LookupError("once too often")
            return y

    bench.backend = FrozenBackend(refuse=["Moody"])
    moody, twin = Moody().eval(), Block().eval()
    twin.load_state_dict(moody.state_dict())
    session = bench.session(moody, min_samples=1)
    check(moody, twin, rows())
    assert state(moody) == "eager"
    assert len(session.stack) == 0
    assert not session.replaying
    Moody.calls_left = 100
    for _ in range(3):
        check(moody, twin, rows())
    assert state(moody.left) == "tuned"


class Interrupting(FrozenBackend):
    def __init__(self, error: BaseException, at: str = "") -> None:
        super().__init__()
        self.error, self.at = error, at

    def build(self, request: BuildRequest) -> Any:
        if not self.at or request.path == self.at:
            raise self.error
        raise RuntimeError("not here")


@pytest.mark.parametrize("at", ["", "first", "second.right"])
def test_an_interrupt_inside_tuning_leaves_the_module_usable(bench: Bench, at: str) -> None:
    bench.backend = Interrupting(KeyboardInterrupt(), at)
    net = Net()
    net.first.left.scale = net.second.left.scale = 2.0
    net.second.right.scale = 3.0  # Every engine is one of its own.
    twin = eager_twin(net)
    session = bench.session(net, min_samples=1)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        net(rows())
    assert state(net) == "eager"
    assert len(session.stack) == 0
    assert not session.replaying
    assert session.tuning.acquire(blocking=False)
    session.tuning.release()
    bench.backend.error = RuntimeError("no more interrupts")
    for _ in range(3):
        check(net, twin, rows())
    assert not net.training
    bench.backend = FrozenBackend(name="second")
    bench.tune(net, rows())
    check(net, twin, rows(), engine=True)


def test_an_interrupt_inside_the_drivers_tuning_leaves_the_module_as_it_was(bench: Bench) -> None:
    bench.backend = Interrupting(KeyboardInterrupt())
    net = Net()
    twin = eager_twin(net)
    with pytest.raises(KeyboardInterrupt):
        bench.tune(net, rows())
    assert all("forward" not in vars(module) for module in net.modules())
    check(net, twin, rows())


def test_a_target_that_fails_on_a_sample_is_left_as_it_was(bench: Bench) -> None:
    touchy = Touchy()
    with pytest.raises(SampleError, match="negative"):
        bench.tune(touchy, positive(), negative())
    assert all("forward" not in vars(module) and "__getstate__" not in vars(module) for module in touchy.modules())


def test_an_engine_that_raises_is_out_and_eager_answers(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    engine = bench.backend.engines[-1]
    engine.closed = True  # It asserts that it is not.
    check(leaf, twin, rows(), engine=False)
    engine.closed = False
    check(leaf, twin, rows(), engine=False)
    assert any("engine raised AssertionError" in reason for reason in stats(leaf).eager_calls)


def test_an_output_that_cannot_be_described_is_still_the_answer(bench: Bench) -> None:
    class Strange:
        pass

    class Odd(Leaf):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return {("a", "tuple"): Strange(), "y": super().forward(x)}

    odd = Odd()
    bench.session(odd, min_samples=1)
    for _ in range(3):
        output = odd(rows())
        assert isinstance(output[("a", "tuple")], Strange)
    assert state(odd) in ("eager", "recording")
