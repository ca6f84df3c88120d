"""Real native engines: pulled, tried in a child process, and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sharing_kit import Block, X, call

from aitune_hf import TuneConfig, pull_tuned, push_tuned, tune
from aitune_hf.cache import LocalStore

pytestmark = pytest.mark.slow


def config(folder: Path) -> TuneConfig:
    return TuneConfig(backends=("inductor",), strategy="first_working", cache_dir=folder, progress=False, effort="fast")


def test_an_inductor_engine_goes_round(engine_cache: Path, tmp_path: Path) -> None:
    module = Block(5)
    tune(module, [X], config(engine_cache))
    pushed = push_tuned(module, tmp_path / "shared", config(engine_cache))
    assert len(pushed.added) == 1

    other, theirs = Block(5), config(tmp_path / "theirs")
    untrusted = pull_tuned(other, tmp_path / "shared", theirs)
    assert [outcome.answer for outcome in untrusted.modules] == ["recipe"]
    assert LocalStore(tmp_path / "theirs").entries() == []

    result = pull_tuned(other, tmp_path / "shared", theirs, trust=True)
    assert [outcome.answer for outcome in result.modules] == ["hit"], result.summary()
    eager = other.linear(X).relu()
    call(other)
    assert torch.allclose(call(other), eager, atol=1e-5)
    assert result.confirm(), result.confirm().summary()
