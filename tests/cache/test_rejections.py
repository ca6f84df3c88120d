"""Entries of others that failed here are set aside and remembered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aitune_hf.cache import EngineKey, Entry, FileDigest, LocalStore, Manifest
from aitune_hf.errors import CorruptEntryError

MakeKey = Callable[..., EngineKey]
Build = Callable[..., Entry]
FILES = {"model.pt2": FileDigest(sha256="ab" * 32, size=6)}


def reject(store: LocalStore, manifest: Manifest) -> None:
    with store.reserve(manifest.key) as slot:
        slot.write("model.pt2", b"engine")
        store.reject(slot, manifest, "it crashed")


def test_what_failed_is_remembered_by_key_and_files(store: LocalStore, make_key: MakeKey) -> None:
    manifest = Manifest(key=make_key(), files=FILES)
    assert store.rejection(manifest) is None
    reject(store, manifest)
    again = LocalStore(store.root)
    assert again.rejection(Manifest(key=make_key(), files=FILES, results={"other": "times"})) == "it crashed"
    assert again.rejection(Manifest(key=make_key(1), files=FILES)) is None
    assert again.rejection(Manifest(key=make_key(), files={"b": FILES["model.pt2"]})) is None


def test_the_files_lie_in_quarantine_and_the_key_can_still_be_built(
    store: LocalStore, make_key: MakeKey, build: Build
) -> None:
    manifest = Manifest(key=make_key(), files=FILES)
    reject(store, manifest)
    (kept,) = (store.root / "aitune" / "quarantine").glob("*/entry/model.pt2")
    assert kept.read_bytes() == b"engine"
    assert not list((store.root / "aitune" / "tmp").iterdir())
    assert build(store, make_key()).read("model.pt2")


def test_gc_forgets_no_rejection_and_clear_does(store: LocalStore, make_key: MakeKey) -> None:
    manifest = Manifest(key=make_key(), files=FILES)
    reject(store, manifest)
    store.gc(0)
    assert store.rejection(manifest) == "it crashed"
    store.clear()
    assert store.rejection(manifest) is None


def test_without_a_writable_cache_it_is_remembered_for_the_process(store: LocalStore, make_key: MakeKey) -> None:
    store.root.parent.joinpath("file").write_text("in the way")
    blocked = LocalStore(store.root.parent / "file" / "cache")
    manifest = Manifest(key=make_key(), files=FILES)
    reject(blocked, manifest)
    assert blocked.rejection(manifest) == "it crashed"
    assert LocalStore(blocked.root).rejection(manifest) is None


def test_a_commit_takes_the_files_it_was_promised_and_no_others(store: LocalStore, make_key: MakeKey) -> None:
    with store.reserve(make_key()) as slot:
        slot.write("model.pt2", b"engine")
        with pytest.raises(CorruptEntryError, match=r"model\.pt2 is not what it should be"):
            slot.commit(engine={}, files=FILES)
    assert store.entries() == []
