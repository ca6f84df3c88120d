from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitune_hf.cache import EngineKey, Entry, LocalStore, Miss
from aitune_hf.errors import CacheError

MakeKey = Callable[..., EngineKey]
Build = Callable[..., Entry]


@pytest.fixture
def blocked(tmp_path: Path) -> LocalStore:
    """A store whose folder cannot exist, since a file is in its way (this holds for root too)."""
    (tmp_path / "file").write_text("in the way")
    return LocalStore(tmp_path / "file" / "cache")


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, store: LocalStore) -> Callable[..., None]:
    """Let an operation fail for every path below the store's root."""

    def install(owner: Any, name: str, number: int) -> None:
        original = getattr(owner, name)

        def failing(*arguments: Any, **options: Any) -> Any:
            if any(str(argument).startswith(str(store.root)) for argument in arguments):
                raise OSError(number, os.strerror(number), str(arguments[0]))
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, failing)

    return install


def test_engines_live_for_the_process_and_one_warning_says_why(
    blocked: LocalStore, make_key: MakeKey, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        entries = [build(blocked, make_key(number), {"model.pt2": b"engine"}) for number in range(3)]
        blocked.write_record("pipelines/a.json", {"winner": "inductor"})
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert str(blocked.root) in message
    assert "AITUNE_HF_CACHE" in message
    assert blocked.unwritable_reason is not None
    assert blocked.unwritable_reason in message
    for number, entry in enumerate(entries):
        assert blocked.lookup(make_key(number)) == entry
        assert entry.read("model.pt2") == b"engine"
    assert blocked.read_record("pipelines/a.json") == {"winner": "inductor"}
    assert LocalStore(blocked.root).lookup(make_key(0)) == Miss(kind="absent", reason="absent")


def test_upkeep_of_an_unwritable_store_does_nothing_and_never_fails(blocked: LocalStore, make_key: MakeKey) -> None:
    assert blocked.verify() == []
    assert blocked.gc(0).entries == blocked.clear().entries == blocked.size() == blocked.sweep() == 0


def test_nothing_stays_in_the_temporary_directory_without_commit(blocked: LocalStore, make_key: MakeKey) -> None:
    with blocked.reserve(make_key()) as slot:
        workdir = slot.workdir
    assert not workdir.exists()


def test_private_engines_go_when_the_process_ends(
    blocked: LocalStore, make_key: MakeKey, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    process = spawn("private", blocked, make_key())
    output, _ = process.communicate(timeout=20)
    path = Path(output.splitlines()[0])
    assert process.returncode == 0
    assert not path.exists()
    assert not path.parent.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("operation", ["mkdir", "rename", "open", "replace"])
def test_any_failing_operation_costs_only_persistence(
    store: LocalStore,
    make_key: MakeKey,
    build: Build,
    fail: Callable[..., None],
    operation: str,
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build(store, make_key(9))
    fail(Path, operation, number)
    with caplog.at_level(logging.WARNING):
        entry = build(store, make_key(), {"model.pt2": b"engine"})
        store.write_record("a.json", {"x": 1})
    assert entry.read("model.pt2") == b"engine"
    assert store.lookup(make_key()) == entry
    assert store.read_record("a.json") == {"x": 1}
    assert len(caplog.records) == 1
    assert isinstance(store.lookup(make_key(9)), Entry)
    store.gc(0)
    store.clear()


def test_a_disk_that_fills_during_a_build_moves_the_build(
    store: LocalStore, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "second.bin" and path.is_relative_to(store.root):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with store.reserve(make_key()) as slot:
        slot.write("first.bin", b"1")
        slot.write("second.bin", b"2")
        entry = slot.commit(engine={})
    assert not entry.path.is_relative_to(store.root)
    assert (entry.read("first.bin"), entry.read("second.bin")) == (b"1", b"2")
    assert "free some room" in caplog.text
    assert list((store.root / "aitune/tmp").iterdir()) == []
    monkeypatch.undo()
    with LocalStore(store.root).reserve(make_key()) as slot:
        assert slot.entry is None  # another process builds it again, and can keep it
        slot.write("first.bin", b"1")
        assert slot.commit(engine={}).path.is_relative_to(store.root)


def test_no_room_anywhere_is_an_error_that_says_what_to_do(
    blocked: LocalStore, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(CacheError, match="TMPDIR"), blocked.reserve(make_key()):
        pass


def test_a_damaged_entry_in_a_read_only_cache_is_a_miss_and_is_built_privately(
    store: LocalStore, make_key: MakeKey, build: Build, fail: Callable[..., None]
) -> None:
    entry = build(store, make_key())
    (entry.path / "model.pt2").write_bytes(b"")
    for operation in ("mkdir", "rename", "replace"):
        fail(Path, operation, errno.EROFS)
    found = store.lookup(make_key())
    assert isinstance(found, Miss)
    assert "left in place" in found.reason
    built = build(store, make_key(), {"model.pt2": b"good"})
    assert not built.path.is_relative_to(store.root)
    assert store.lookup(make_key()) == built


def test_a_hit_in_a_read_only_cache_writes_nothing(
    store: LocalStore, make_key: MakeKey, build: Build, fail: Callable[..., None], tmp_path: Path
) -> None:
    build(store, make_key(), {"model.pt2": b"engine"})
    for owner, operation in ((Path, "mkdir"), (os, "utime"), (Path, "rename"), (Path, "replace")):
        fail(owner, operation, errno.EROFS)
    reader = LocalStore(store.root)
    with reader.reserve(make_key()) as slot:
        assert slot.entry is not None
    assert isinstance(reader.checkout(make_key(), tmp_path / "copy"), Entry)
    assert reader.unwritable_reason is None
