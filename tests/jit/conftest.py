"""Puts the kit of these tests (``jit_kit``) within reach of the test modules beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from jit_kit import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Tunes things into ``tmp_path``."""
    return Bench(tmp_path)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Equal numbers in every run, and one thread: these models are too small for more."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
