"""One key, several builds: two builds differ in their bytes, and a record must say those that are there."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hub_server import FakeHub
from sharing_kit import Machine, Many

from aitune_hf.errors import HubError
from aitune_hf.hub import publish
from aitune_hf.hub.fsspec_remote import FsspecRemote
from aitune_hf.hub.publish import PushResult
from aitune_hf.hub.remote import Addition, Head, RemoteConflictError, open_remote

Machines = Callable[[str], Machine]


@pytest.fixture(params=["hub", "folder", "memory"])
def place(request: pytest.FixtureRequest, hub: FakeHub, tmp_path: Path) -> str | Path:
    return {"hub": "me/tuned", "folder": tmp_path / "shared", "memory": f"memory://{uuid.uuid4().hex}/x"}[request.param]


def built(machine: Machines, name: str, parts: int = 1) -> Machine:
    """A machine whose engines have bytes of their own."""
    machine(name).stock(Many(parts), data=b"\0built by " + name.encode())
    return machine(name)


def is_whole(machine: Machines, place: str | Path, parts: int = 1) -> bool:
    result = machine(f"reader {uuid.uuid4().hex}").pull(Many(parts), place)
    return result.installed == parts and not result.problems


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_two_pushers_of_one_key_leave_one_whole_engine(
    machine: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = tmp_path / "shared" if kind == "folder" else f"memory://{uuid.uuid4().hex}/x"
    first, second = built(machine, "first"), built(machine, "second")
    commit = FsspecRemote.commit
    late: list[PushResult] = []

    def squeeze_in(remote: FsspecRemote, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(FsspecRemote, "commit", commit)
        late.append(second.push(Many(1), place))
        return commit(remote, *args, **kwargs)

    monkeypatch.setattr(FsspecRemote, "commit", squeeze_in)
    result = first.push(Many(1), place, sleep=lambda seconds: None)
    assert len(late[0].added) == 1
    assert (result.added, len(result.unchanged), result.bytes) == ((), 1, 0)
    assert is_whole(machine, place)


def test_an_engine_that_another_pipeline_has_is_listed_as_it_is(machine: Machines, place: str | Path) -> None:
    assert len(built(machine, "first", 1).push(Many(1), place).added) == 1
    pushed = built(machine, "second", 2).push(Many(2), place)  # has the same block, and one more
    assert len(pushed.added) == 2
    assert is_whole(machine, place, 1)
    assert is_whole(machine, place, 2)


def test_force_replaces_what_is_there(machine: Machines, place: str | Path) -> None:
    built(machine, "first").push(Many(1), place)
    again = built(machine, "second").push(Many(1), place)
    assert (again.bytes, again.url) == (0, "")
    forced = machine("second").push(Many(1), place, force=True)
    assert forced.bytes > 0
    assert is_whole(machine, place)
    reader = machine("theirs")
    reader.pull(Many(1), place)
    (entry,) = reader.target(Many(1)).store.entries()
    assert entry.read("model.bin").startswith(b"\0built by second")


def test_what_a_killed_push_has_left_in_a_folder_is_replaced(machine: Machines, tmp_path: Path) -> None:
    mine = built(machine, "mine")
    (key,) = (
        entry.manifest.key for entry in mine.target(Many(1)).store.entries() if "model.bin" in entry.manifest.files
    )
    left = tmp_path / "shared" / key.entry_path / "model.bin"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half of a fi")
    assert len(mine.push(Many(1), tmp_path / "shared").added) == 1
    assert is_whole(machine, tmp_path / "shared")


def test_without_a_lock_nobodys_bytes_are_replaced(machine: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = open_remote(f"memory://{uuid.uuid4().hex}/x")
    head = Head(commit="")
    remote.commit([Addition(path="e/model.bin", source=b"1")], parent=head, revision=None, message="")
    remote.commit([Addition(path="e/model.bin", source=b"1")], parent=head, revision=None, message="")
    with pytest.raises(RemoteConflictError, match="there with other bytes"):
        remote.commit([Addition(path="e/model.bin", source=b"2")], parent=head, revision=None, message="")
    remote.commit([Addition(path="e/model.bin", source=b"2", force=True)], parent=head, revision=None, message="")
    assert remote.read("e/model.bin", revision=None, max_bytes=10).data == b"2"


def test_a_conflict_that_stays_is_named(machine: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_ATTEMPTS", 2)
    place = f"memory://{uuid.uuid4().hex}/x"
    mine = built(machine, "mine")
    key = next(e.manifest.key for e in mine.target(Many(1)).store.entries() if "model.bin" in e.manifest.files)
    left = [Addition(path=str(key.entry_path / "model.bin"), source=b"half")]
    open_remote(place).commit(left, parent=Head(commit=""), revision=None, message="")
    with pytest.raises(HubError, match=r"model\.bin is there with other bytes"):
        mine.push(Many(1), place, sleep=lambda seconds: None)
    assert mine.push(Many(1), place, force=True).bytes > 0
    assert is_whole(machine, place)


def test_a_damaged_entry_of_another_pipeline_is_an_error(machine: Machines, tmp_path: Path) -> None:
    mine = built(machine, "mine")
    key = next(e.manifest.key for e in mine.target(Many(1)).store.entries() if "model.bin" in e.manifest.files)
    there = tmp_path / "shared" / key.entry_path
    there.mkdir(parents=True)
    (there / "manifest.json").write_bytes(b"{}")
    with pytest.raises(HubError, match="force=True to replace"):
        mine.push(Many(1), tmp_path / "shared")
    assert mine.push(Many(1), tmp_path / "shared", force=True).added
    assert is_whole(machine, tmp_path / "shared")


def test_a_signature_is_added_to_an_engine_that_is_there(machine: Machines, place: str | Path) -> None:
    pytest.importorskip("cryptography")
    from aitune_hf.hub.signature import PublicKey, generate_key

    pair = generate_key()
    key = PublicKey.from_pem(pair.public)
    mine = built(machine, "mine")
    mine.push(Many(1), place)
    assert machine("wary").pull(Many(1), place, trust=key).installed == 0
    signed = mine.push(Many(1), place, signing_key=pair.private)
    assert (signed.added, signed.unsigned, signed.bytes) == ((), (), 64)
    assert machine("theirs").pull(Many(1), place, trust=key).installed == 1
    assert mine.push(Many(1), place, signing_key=pair.private).url == ""


def test_what_somebody_else_built_is_not_signed(machine: Machines, place: str | Path) -> None:
    pytest.importorskip("cryptography")
    from aitune_hf.hub.signature import PublicKey, generate_key

    pair = generate_key()
    built(machine, "first").push(Many(1), place)
    result = built(machine, "second").push(Many(1), place, signing_key=pair.private)
    assert len(result.unsigned) == 1
    assert "got no signature (force=True replaces them)" in result.summary()
    key = PublicKey.from_pem(pair.public)
    assert machine("wary").pull(Many(1), place, trust=key).installed == 0
    machine("second").push(Many(1), place, signing_key=pair.private, force=True)
    assert machine("theirs").pull(Many(1), place, trust=key).installed == 1


class RememberingFileSystem(MemoryFileSystem):
    """Remembers what is there and what is not, as clients of buckets do."""

    protocol = "remembering"
    seen: ClassVar[dict[str, bool]] = {}

    def exists(self, path: str, **kwargs: Any) -> bool:
        return self.seen.setdefault(path, super().exists(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        self.seen.clear()


def test_what_a_client_remembers_of_a_bucket_is_looked_at_anew(machine: Machines) -> None:
    fsspec.register_implementation("remembering", RememberingFileSystem, clobber=True)
    place = f"remembering://{uuid.uuid4().hex}/x"
    first, second = built(machine, "first"), built(machine, "second")
    for entry in first.target(Many(1)).store.entries():
        path = str(entry.manifest.key.entry_path / "manifest.json")
        assert open_remote(place).present([path], revision=None) == set()
    assert first.push(Many(1), place).added
    assert second.push(Many(1), place, sleep=lambda seconds: None).unchanged
    assert is_whole(machine, place)
