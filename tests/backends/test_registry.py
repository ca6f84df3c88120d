"""Backends by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aitune_hf.backends import registry
from aitune_hf.backends.base import Backend
from aitune_hf.backends.inductor import InductorBackend
from aitune_hf.errors import ConfigError


class Third(InductorBackend):
    name = "third"

    def available(self) -> str | None:
        return None


class Failing(Third):
    name = "failing"

    def available(self) -> str | None:
        raise OSError("no such device")


class Point:
    """As an entry point, by what is asked of it."""

    def __init__(self, name: str, loaded: Any) -> None:
        self.name = name
        self.loaded = loaded

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


POINTS = [
    Point("third", Third),
    Point("failing", Failing),
    Point("broken", ImportError("no module named x")),
    Point("odd", lambda: object()),
    Point("misnamed", Third),
    Point("inductor", Third),
]


@pytest.fixture
def third_parties(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "entry_points", lambda group: POINTS if group == "aitune_hf.backends" else [])
    registry._third_party.cache_clear()
    yield
    registry._third_party.cache_clear()


def test_built_in() -> None:
    backend = registry.get_backend("inductor")
    assert isinstance(backend, InductorBackend)
    assert isinstance(backend, Backend)


def test_unknown() -> None:
    with pytest.raises(ConfigError, match=r"no backend 'inducter'; there are: .*inductor"):
        registry.get_backend("inducter")


@pytest.mark.usefixtures("third_parties")
def test_third_parties() -> None:
    assert type(registry.get_backend("third")) is Third
    assert type(registry.get_backend("inductor")) is InductorBackend
    assert "third" in [backend.name for backend in registry.available_backends()]


@pytest.mark.usefixtures("third_parties")
def test_a_broken_one_is_a_reason() -> None:
    reasons = registry.unavailable_backends()
    assert "no module named x" in reasons["broken"]
    assert "no such device" in reasons["failing"]
    assert "no backend of that name" in reasons["odd"]
    assert "no backend of that name" in reasons["misnamed"]
    assert "third" not in reasons
    with pytest.raises(ConfigError, match="cannot be imported: ImportError"):
        registry.get_backend("broken")
