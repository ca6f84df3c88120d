"""Modules of unusual form: other dtypes, recursion, forwards that cannot be captured; and calls from many threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from real_kit import Block, Tuned, answers, assert_same, bert_call, noise
from torch import nn


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05)], ids=["float64", "bfloat16"]
)
def test_other_dtypes_have_engines_of_their_own(dtype: torch.dtype, atol: float, tune: Callable[..., Tuned]) -> None:
    block = tune(Block(dtype=dtype).eval(), [noise(3, 8, dtype=dtype)])
    with answers(block.module) as seen:
        out = block.same(noise(3, 8, seed=1, dtype=dtype), atol=atol)
        assert out.dtype == dtype
        with torch.no_grad():
            assert block.module.double()(noise(3, 8, dtype=torch.float64)).dtype == torch.float64
    assert seen.engines == 1 + (dtype == torch.float64)
    assert sum(seen.eager.values()) == (dtype != torch.float64)


class Countdown(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        return self(y, depth - 1) if depth else y


def test_a_module_that_calls_itself_is_answered_once(tune: Callable[..., Tuned]) -> None:
    countdown = tune(Countdown().eval(), [noise(3, 8)])
    with answers(countdown.module) as seen:
        for seed in (1, 2):
            countdown.same(noise(3, 8, seed=seed))
        countdown.same(noise(3, 8), depth=3)
    assert seen.engines >= 2
    assert seen.builds == 0


class Fork(nn.Module):
    """Which child answers depends on the data, so it cannot be captured as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.left(x) if x.mean() > 0 else self.right(x)
        return y


def test_children_are_tuned_where_the_parent_cannot_be_captured(tune: Callable[..., Tuned]) -> None:
    positive, negative = noise(3, 8).abs(), -noise(3, 8).abs()
    # Of calls of equal shapes the first and the fourth are kept, so both ways are among the samples.
    fork = tune(Fork().eval(), [positive, negative, negative, negative])
    assert fork.report.rows[0].backend == "eager"
    assert fork.report.builds <= 1, "both children have the same structure"
    with answers(fork.module, "left") as left, answers(fork.module, "right") as right:
        fork.same(positive * 2)
        fork.same(negative * 2)
        fork.same(negative * 3)
    assert (left.engines, right.engines) == (1, 2)


class Chain(nn.Module):
    """The same child, twice in a row: one engine at work in nested and repeated calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 1e6:
            return x
        y: torch.Tensor = self.block(self.block(x))
        return y


def test_an_output_that_is_an_input_again_is_not_written_over(tune: Callable[..., Tuned]) -> None:
    chain = tune(Chain().eval(), [noise(3, 8)])
    x = noise(3, 8, seed=4)
    with answers(chain.module, "block") as seen:
        first = chain.same(x)
        kept = first.clone()
        chain.same(noise(3, 8, seed=5))
    assert seen.engines == 4
    assert torch.equal(first, kept), "an answer given is the caller's own"
    assert torch.equal(x, noise(3, 8, seed=4))


def test_eight_threads_get_the_answers_of_eager(bert: Tuned) -> None:
    calls = [bert_call(1 + index % 3, 3 + index, seed=index) for index in range(8)]
    with torch.no_grad():
        expected = [bert.twin(**call) for call in calls]

    def work(index: int) -> None:
        with torch.no_grad():
            for turn in range(100):
                which = (index + turn) % len(calls)
                assert_same(bert.module(**calls[which]), expected[which])

    with answers(bert.module) as seen, ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, index) for index in range(8)]:
            done.result()
    assert (seen.engines, seen.eager) == (800, {})
