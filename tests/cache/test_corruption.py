from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aitune_hf.cache import EngineKey, Entry, LocalStore, Miss
from aitune_hf.cache.sealed import seal

MakeKey = Callable[..., EngineKey]
Build = Callable[..., Entry]
Damage = Callable[[Path, Path], None]


def _flip(path: Path, position: float) -> None:
    data = bytearray(path.read_bytes())
    data[int((len(data) - 1) * position)] ^= 0x01
    path.write_bytes(bytes(data))


def _link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def _folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Damage] = {
    "empty": lambda path, other: path.write_bytes(b"") and None,
    "half": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) and None,
    "first byte flipped": lambda path, other: _flip(path, 0),
    "middle byte flipped": lambda path, other: _flip(path, 0.5),
    "last byte flipped": lambda path, other: _flip(path, 1),
    "longer": lambda path, other: path.write_bytes(path.read_bytes() + b"\0") and None,
    "deleted": lambda path, other: path.unlink(),
    "another entry's": lambda path, other: shutil.copy(other, path) and None,
    "link to a good one": _link,
    "a folder": _folder,
    "all zeros": lambda path, other: path.write_bytes(bytes(path.stat().st_size)) and None,
}


@pytest.mark.parametrize("looked_up_before", [False, True])
@pytest.mark.parametrize("name", ["manifest.json", "model.pt2", "constants.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_any_damage_to_any_file_is_a_quarantined_miss_and_is_repaired(
    store: LocalStore, make_key: MakeKey, build: Build, damage: str, name: str, looked_up_before: bool
) -> None:
    key, other = make_key(0), make_key(1)
    original, neighbour = build(store, key), build(store, other)
    reader = LocalStore(store.root)
    if looked_up_before:
        assert isinstance(reader.lookup(key), Entry)
    DAMAGE[damage](original.path / name, neighbour.path / name)

    found = reader.lookup(key)

    assert isinstance(found, Miss)
    assert found.kind == "corrupt"
    assert found.reason.startswith("corrupt: ")
    assert found.reason.endswith("(quarantined)")
    assert not original.path.exists()
    (cell,) = (store.root / "aitune/quarantine").iterdir()
    note = json.loads((cell / "reason.json").read_text())
    assert note["from"] == str(key.entry_path)
    assert (cell / "entry").is_dir()
    assert reader.lookup(key) == Miss(kind="absent", reason="absent")
    repaired = build(reader, key)
    assert repaired.read("model.pt2") == original.manifest.key.digest.encode() * 50
    assert reader.lookup(key) == repaired
    assert isinstance(reader.lookup(other), Entry)
    assert store.verify() == []


def test_an_unlisted_file_is_damage(store: LocalStore, make_key: MakeKey, build: Build) -> None:
    entry = build(store, make_key())
    (entry.path / "evil.so").write_bytes(b"x")
    found = store.lookup(make_key())
    assert isinstance(found, Miss)
    assert "evil.so is not listed" in found.reason


@pytest.mark.parametrize("kind", ["whole entry swapped", "a file", "a link", "an empty folder"])
def test_something_else_in_an_entrys_place_is_damage(
    store: LocalStore, make_key: MakeKey, build: Build, kind: str
) -> None:
    entry, other = build(store, make_key(0)), build(store, make_key(1))
    shutil.rmtree(entry.path)
    if kind == "whole entry swapped":
        shutil.copytree(other.path, entry.path)
    elif kind == "a file":
        entry.path.write_bytes(b"x")
    elif kind == "a link":
        entry.path.symlink_to(other.path)
    else:
        entry.path.mkdir()
    with store.reserve(make_key(0)) as slot:
        assert slot.entry is None
        assert slot.miss is not None
        assert slot.miss.kind == "corrupt"
        slot.write("model.pt2", b"again")
        slot.commit(engine={})
    found = store.lookup(make_key(0))
    assert isinstance(found, Entry)
    assert found.read("model.pt2") == b"again"
    assert isinstance(store.lookup(make_key(1)), Entry)


def test_a_manifest_of_another_schema_is_set_aside_by_name(store: LocalStore, make_key: MakeKey, build: Build) -> None:
    entry = build(store, make_key())
    newer = entry.manifest.to_dict() | {"schema": 2}
    (entry.path / "manifest.json").write_bytes(seal("manifest", newer))
    found = store.lookup(make_key())
    assert isinstance(found, Miss)
    assert "schema 2" in found.reason


def test_damaged_neighbours_do_not_disturb_a_miss(store: LocalStore, make_key: MakeKey, build: Build) -> None:
    entry = build(store, make_key())
    (entry.path / "manifest.json").write_bytes(b"[" * 100_000)
    assert store.lookup(make_key(options={})) == Miss(kind="absent", reason="absent")


def test_damage_found_while_the_key_is_being_rebuilt_is_left_to_the_builder(
    store: LocalStore, make_key: MakeKey, build: Build
) -> None:
    key = make_key()
    reader = LocalStore(store.root)
    with store.reserve(key) as slot:
        (store.root / key.entry_path).mkdir(parents=True)
        found = reader.lookup(key)
        assert isinstance(found, Miss)
        assert found.reason.endswith("(being rebuilt)")
        slot.write("model.pt2", b"right")
        slot.commit(engine={})
    found = reader.lookup(key)
    assert isinstance(found, Entry)
    assert found.read("model.pt2") == b"right"


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in {"deleted", "link to a good one"}])
def test_a_damaged_record_is_set_aside_and_counts_as_missing(store: LocalStore, damage: str) -> None:
    store.write_record("pipelines/a.json", {"winner": "inductor"})
    store.write_record("pipelines/b.json", {"winner": "openvino"})
    folder = store.root / "aitune/v1/pipelines"
    DAMAGE[damage](folder / "a.json", folder / "b.json")
    assert store.read_record("pipelines/a.json") is None
    assert not (folder / "a.json").exists()
    store.write_record("pipelines/a.json", {"winner": "eager"})
    assert store.read_record("pipelines/a.json") == {"winner": "eager"}
    assert store.read_record("pipelines/b.json") == {"winner": "openvino"}
