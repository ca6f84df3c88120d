"""A Hub on this machine, and targets with engines to share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

sys.path.insert(0, str(Path(__file__).parent))

from hub_server import FakeHub
from sharing_kit import TOKEN, Machine

from aitune_hf.backends.isolation import IsolatedBuilder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub that the client of this process talks to, logged in."""
    server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.endpoint)  # of the client's plain functions
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    huggingface_hub.utils.disable_progress_bars()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_first_load(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fake engines have no constants to make a stand-in of; ``test_native`` tries real ones in a child process."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(IsolatedBuilder, "try_engine", lambda *args, **kwargs: None)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Machine]:
    """Machines by name, each with an engine cache of its own."""
    return lambda name: Machine(tmp_path / name)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was warned of."""
    caplog.set_level(logging.DEBUG)
    return lambda: [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
