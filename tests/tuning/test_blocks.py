"""Repeated blocks: one engine for all of equal structure, each with its own weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aitune_hf
from aitune_hf import AITuneModel, TuneConfig, stats, tune
from aitune_hf.backends.testing import FakeBackend
from aitune_hf.errors import BuildError


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Odd(Block):
    """Another class, and so another structure."""


class Stack(nn.Module):
    def __init__(self, blocks: int, odd: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)] + [Odd() for _ in range(odd)])
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def settings(tmp_path: Path, backend: FakeBackend, **kwargs: Any) -> TuneConfig:
    kwargs = {"granularity": "blocks", "min_share": 0.0, "strategy": "first_working", **kwargs}
    return TuneConfig(backends=(backend,), cache_dir=tmp_path, progress=False, **kwargs)


def test_equal_blocks_are_built_once_and_each_uses_its_own_weights(tmp_path: Path) -> None:
    model, x, backend = Stack(6).eval(), torch.randn(3, 8), FakeBackend()
    expected = model(x).detach()
    report = tune(model, [x], settings(tmp_path, backend))
    assert report.builds == 1
    assert len(backend.engines) == 6
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
        counts = {path: one.engine_calls for path, one in stats(model).modules.items()}
        assert counts == {"Stack": 0, **{f"blocks.{index}": 1 for index in range(6)}}
        model.blocks[3].first.weight.mul_(2)
        other = model(x)
    assert not torch.allclose(other, expected)
    assert "blocks.0 and 5 like it" in report.table()
    assert "6 repeated blocks" in report.table()


def test_each_structure_has_an_engine_of_its_own(tmp_path: Path) -> None:
    model, x, backend = Stack(3, odd=2).eval(), torch.randn(3, 8), FakeBackend()
    expected = model(x).detach()
    report = tune(model, [x], settings(tmp_path, backend))
    assert report.builds == 2
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_another_fine_tune_builds_nothing(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    tune(Stack(4).eval(), [x], settings(tmp_path, FakeBackend()))
    # Neither does a deeper model of the same blocks.
    for depth in (4, 7):
        model, backend = Stack(depth).eval(), FakeBackend()
        expected = model(x).detach()
        assert tune(model, [x], settings(tmp_path, backend)).builds == 0
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)


def test_the_next_process_restores_every_block(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    model = Stack(5).eval()
    tune(model, [x], settings(tmp_path, FakeBackend()))
    twin, backend = Stack(5).eval(), FakeBackend()
    twin.load_state_dict(model.state_dict())
    restored = AITuneModel.from_model(twin, config=settings(tmp_path, backend))
    assert restored.tuning_stats().loads == 5
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(restored(x), model(x))
    assert restored.tuning_stats().engine_calls == 5


@pytest.mark.parametrize(("blocks", "whole"), [(2, True), (12, False)])
def test_auto_takes_blocks_where_there_are_many(tmp_path: Path, blocks: int, whole: bool) -> None:
    # Enough work per block, and enough calls, that observing them is not what takes the time.
    model, x, backend = Stack(blocks).eval(), torch.randn(20_000, 8), FakeBackend()
    tune(model, [x] * 10, settings(tmp_path, backend, granularity="auto"))
    assert (backend.builds == ["Stack"]) is whole
    assert (backend.builds == ["blocks.0"]) is not whole


def test_whole_is_whole(tmp_path: Path) -> None:
    model, backend = Stack(12).eval(), FakeBackend()
    tune(model, [torch.randn(3, 8)], settings(tmp_path, backend, granularity="whole"))
    assert backend.builds == ["Stack"]


def test_a_block_that_cannot_be_built_stays_eager_and_the_answer_right(tmp_path: Path) -> None:
    model, x = Stack(3, odd=2).eval(), torch.randn(3, 8)
    expected = model(x).detach()
    backend = FakeBackend(fail=lambda request: BuildError("no") if type(request.module) is Odd else None)
    tune(model, [x], settings(tmp_path, backend))
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert stats(model).engine_calls == 3


def test_blocks_that_are_slower_than_eager_are_not_taken_apart(tmp_path: Path) -> None:
    def slow(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        time.sleep(0.005)
        return leaves

    model, backend = Stack(3).eval(), FakeBackend(spoil=slow)
    config = settings(tmp_path, backend, strategy="max_throughput", timing_pairs=3)
    report = tune(model, [torch.randn(3, 8)], config)
    assert backend.builds == ["blocks.0"]
    assert {row.backend for row in report.rows} == {"eager"}


def test_a_hook_on_a_block_keeps_firing(tmp_path: Path) -> None:
    model, x, seen = Stack(3).eval(), torch.randn(3, 8), []
    tune(model, [x], settings(tmp_path, FakeBackend()))
    model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(x)
    assert seen == [1]
    assert stats(model).modules["blocks.1"].engine_calls == 1


def test_enable_tunes_what_is_constructed_within(tmp_path: Path) -> None:
    x, backend = torch.randn(3, 8), FakeBackend()
    with aitune_hf.jit.enable(settings(tmp_path, backend, granularity="whole")) as session:
        model = Stack(2).eval()
        expected = Stack.forward(model, x).detach()
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(model(x), expected)
    assert backend.builds == ["Stack"]
    assert stats(model).engine_calls == 1
    assert [head.name for head in session.heads] == ["Stack"]

    @aitune_hf.jit.enable(settings(tmp_path, backend, granularity="whole"))
    def run() -> nn.Module:
        again = Stack(2).eval()
        with torch.no_grad():
            again(x)
            again(x)
        return again

    # The structure is known: its first call takes the engine from the cache.
    assert stats(run()).engine_calls == 1
    assert backend.builds == ["Stack"]
