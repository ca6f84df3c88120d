"""Folders and other file systems instead of the Hub, by the same rules."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from filelock import FileLock
from sharing_kit import Block, Machine, Many, call

from aitune_hf.cache import FileDigest
from aitune_hf.errors import ConfigError, HubError
from aitune_hf.hub import fsspec_remote
from aitune_hf.hub.remote import Addition, Head, RemoteConflictError, RemoteError, open_remote

Machines = Callable[[str], Machine]


@pytest.fixture(params=["folder", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | Path]:
    if request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/shared"
        return
    folder = tmp_path / "shared folder"
    yield folder if request.param == "folder" else folder.as_uri()


def test_round_trip(machine: Machines, place: str | Path) -> None:
    machine("mine").stock(Many(4))
    pushed = machine("mine").push(Many(4), place)
    assert len(pushed.added) == 4
    again = machine("mine").push(Many(4), place)
    assert (again.added, len(again.unchanged)) == ((), 4)
    assert machine("wary").pull(Many(4), place, trust=None).installed == 0
    module = Many(4)
    result = machine("theirs").pull(module, place, trust=True)
    assert result.installed == 4
    for _ in range(2):
        call(module)
    assert result.confirm()


def test_ten_writers_lose_nothing(machine: Machines, tmp_path: Path) -> None:
    machines = [machine(f"m{number}").with_options(level=number) for number in range(10)]
    for one in machines:
        one.tuned(Block())
    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(lambda one: one.push(Block(), tmp_path / "shared"), machines))
    assert all(len(result.added) == 1 for result in results)
    found = machine("m0").look_up(Block(), tmp_path / "shared")
    assert len(found.findings) == 1
    manifests = list((tmp_path / "shared").rglob("manifest.json"))
    assert len(manifests) == 10
    assert not list((tmp_path / "shared").rglob("*.tmp"))


def test_a_folder_can_be_used_as_a_cache(machine: Machines, tmp_path: Path) -> None:
    """The layout is that of a local cache."""
    machine("mine").tuned(Block())
    machine("mine").push(Block(), tmp_path / "shared")
    assert Machine(tmp_path / "shared").target(Block()).store.verify() == []
    assert len(Machine(tmp_path / "shared").target(Block()).store.entries()) == 1


def test_wrong_bytes_are_refused(machine: Machines, tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    machine("mine").tuned(Block())
    machine("mine").push(Block(), tmp_path / "shared")
    for path in (tmp_path / "shared").rglob("engine.json"):
        path.write_bytes(b"x" * path.stat().st_size)
    result = machine("theirs").pull(Block(), tmp_path / "shared")
    assert "other bytes than its record says" in result.problems[0]
    assert len(lines()) == 1


def test_what_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    remote = open_remote(tmp_path)
    head = Head(commit="")
    remote.commit([Addition(path="a.json", source=b"1", replaces=b"")], parent=head, revision=None, message="")
    with pytest.raises(RemoteConflictError):
        remote.commit([Addition(path="a.json", source=b"2", replaces=b"")], parent=head, revision=None, message="")
    remote.commit([Addition(path="a.json", source=b"2", replaces=b"1")], parent=head, revision=None, message="")
    assert remote.read("a.json", revision=None, max_bytes=10).data == b"2"
    assert remote.read("b.json", revision=None, max_bytes=10).data is None
    assert "a.json" in remote.names("", revision=None)
    assert remote.names("nowhere", revision=None) == []


def test_bounds_and_refusals(tmp_path: Path) -> None:
    remote = open_remote(tmp_path)
    (tmp_path / "big").write_bytes(b"12345")
    with pytest.raises(RemoteError, match="larger than the 4 bytes"):
        remote.read("big", revision=None, max_bytes=4)
    with pytest.raises(ConfigError, match="keeps no history"):
        remote.read("big", revision="main", max_bytes=10)
    with pytest.raises(RemoteError, match="no pull requests"):
        remote.commit([], parent=Head(commit=""), revision=None, message="", create_pr=True)
    with pytest.raises(RemoteError, match="it is not there"):
        remote.fetch({"gone": FileDigest(sha256="0" * 64, size=1)}, commit="", folder=tmp_path)
    with pytest.raises(ConfigError, match=r"nosuch"):
        open_remote("nosuch://place/x")


def test_what_is_not_on_this_machine_is_not_read_offline(machine: Machines, lines: Callable[[], list[str]]) -> None:
    result = machine("theirs").pull(Block(), "memory://somewhere/x", local_only=True)
    assert result.installed == 0
    assert "not on this machine" in lines()[0]


def test_a_folder_without_permission_is_a_clear_error(machine: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("mine").tuned(Block())
    place = f"memory://{uuid.uuid4().hex}"
    fs = fsspec.filesystem("memory")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(type(fs), "makedirs", refuse)
    with pytest.raises(HubError, match="no permission to write"):
        machine("mine").push(Block(), place)


@pytest.mark.parametrize("name", ["*.json", "manifest.json"])
def test_a_named_pipe_is_not_waited_for(
    machine: Machines, tmp_path: Path, lines: Callable[[], list[str]], name: str
) -> None:
    machine("mine").tuned(Block())
    machine("mine").push(Block(), tmp_path / "shared")
    where = tmp_path / "shared/aitune/v1/pipelines" if name == "*.json" else tmp_path / "shared"
    for path in list(where.rglob(name)):
        path.unlink()
        os.mkfifo(path)
    result = machine("theirs").pull(Block(), tmp_path / "shared")
    assert "is not a regular file" in result.problems[0]
    assert len(lines()) == 1


def test_a_folder_that_somebody_writes_to_for_long_is_an_error(
    machine: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_remote, "_LOCK_S", 0.05)
    machine("mine").tuned(Block())
    with FileLock(tmp_path / ".aitune-hf.lock"):
        with ThreadPoolExecutor(1) as pool:
            pushed = pool.submit(machine("mine").push, Block(), tmp_path)
        with pytest.raises(HubError, match="another process has been writing to it"):
            pushed.result()
    assert machine("mine").push(Block(), tmp_path).added


def test_a_file_system_that_cannot_be_made_is_one_line(
    machine: Machines, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ImportError("Install cloudfs to access cloud")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    assert open_remote("memory://x/y").url == "memory://x/y"
    result = machine("theirs").pull(Block(), "memory://x/y")
    assert result.installed == 0
    assert "Install cloudfs" in lines()[0]
    assert len(lines()) == 1
    machine("mine").tuned(Block())
    with pytest.raises(HubError, match="Install cloudfs"):
        machine("mine").push(Block(), "memory://x/y")


def test_secrets_in_a_url_are_never_shown(machine: Machines) -> None:
    remote = open_remote("memory://me:secret@somewhere/x")
    assert "secret" not in remote.url
