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
    torch.manual_seed(0)
    yield
