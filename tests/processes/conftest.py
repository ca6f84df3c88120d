"""Puts the kits of these tests (``launch_kit``, ``ranks_kit``) within reach."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch_kit import TORCHRUN, Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    made = Launch(tmp_path / "launch")
    yield made
    made.end()


@pytest.fixture(scope="session")
def real_launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Two ranks under torchrun that tune two small modules with the real compiler, on an empty cache."""
    made = Launch(tmp_path_factory.mktemp("real") / "launch")
    try:
        made.run(*TORCHRUN, *made.worker("real", "--accelerate"))
    finally:
        made.end()
    return made


@pytest.fixture
def torchrun() -> Callable[..., tuple[str, ...]]:
    return lambda *options: (*TORCHRUN, *options)
