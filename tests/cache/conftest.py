"""Keys, environments and finished entries to test with, none of which needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aitune_hf.cache import EngineKey, Entry, Environment, LocalStore

WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture
def make_environment() -> Callable[..., Environment]:
    def make(**changes: Any) -> Environment:
        facts = {
            "device_type": "cpu",
            "arch": "x86_64",
            "os": "linux",
            "torch": "2.13.0",
            "cpu_isa": "avx512",
            "cpu_features": ("avx2", "avx512f"),
            "libc": "glibc2.36",
        }
        return Environment(**{**facts, **changes})

    return make


@pytest.fixture
def make_key(make_environment: Callable[..., Environment]) -> Callable[..., EngineKey]:
    def make(number: int = 0, *, environment: Mapping[str, Any] | None = None, **changes: Any) -> EngineKey:
        factors: dict[str, Any] = {
            "hierarchy_hash": f"{number:064x}",
            "graph_key": "ab" * 8,
            "environment": make_environment(**(environment or {})),
            "backend": "inductor",
            "backend_version": "2.13.0",
            "options": {"max_autotune": False, "level": 2},
        }
        return EngineKey(**{**factors, **changes})

    return make


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "cache")


@pytest.fixture
def build() -> Callable[..., Entry]:
    def build_entry(store: LocalStore, key: EngineKey, files: Mapping[str, bytes] | None = None) -> Entry:
        with store.reserve(key) as slot:
            if slot.entry is None:
                for name, data in (files or files_of(key)).items():
                    slot.write(name, data)
                slot.commit(engine={"outputs": ["Tensor"]}, results={"max_error": 1e-6})
        assert slot.entry is not None
        return slot.entry

    return build_entry


def files_of(key: EngineKey) -> dict[str, bytes]:
    return {
        "model.pt2": key.digest.encode() * 50,
        "constants.json": b'{"key": "' + key.digest.encode() + b'"}',
    }


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``worker.py`` in its own process."""
    started: list[subprocess.Popen[str]] = []

    def start(action: str, store: LocalStore, key: EngineKey, *arguments: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(WORKER),
            action,
            str(store.root),
            json.dumps(key.to_dict()),
            *arguments,
        ]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
