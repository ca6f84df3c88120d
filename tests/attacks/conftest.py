"""A machine under attack, and payloads that would show if they ran."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import attack_kit as kit

from aitune_hf.backends import registry


class _Point:
    """As an entry point, by what is asked of it."""

    name = kit.DataBackend.name

    def load(self) -> Any:
        return kit.DataBackend


@pytest.fixture(autouse=True)
def data_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registered backend whose artefacts are data."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [_Point()])
    registry._third_party.cache_clear()
    yield
    registry._third_party.cache_clear()


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that payloads create when they run."""
    path = tmp_path / "canary"
    monkeypatch.setenv("AITUNE_CANARY", str(path))
    return path


@pytest.fixture
def victim(tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> kit.Victim:
    monkeypatch.chdir(tmp_path)  # whatever is written to a relative path is seen
    return kit.Victim(tmp_path, canary)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shared library that creates the canary as soon as it is loaded."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "pounce.c").write_text(kit.LIBRARY_SOURCE)
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    assert compiler is not None, "no compiler"
    command = [compiler, "-shared", "-fPIC", "-o", "pounce.so", "pounce.c"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return (folder / "pounce.so").read_bytes()


@pytest.fixture(scope="session")
def engine(library: bytes) -> bytes:
    """A package as AOTInductor writes it, with that library in it."""
    return kit.package({"model/data/aotinductor/model/model.wrapper.so": library, "model/version": b"1"})
