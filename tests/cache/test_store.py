from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitune_hf.cache import EngineKey, Entry, KeyLockedError, LocalStore, Miss, default_cache_dir
from aitune_hf.errors import CacheError, ConfigError, CorruptEntryError

MakeKey = Callable[..., EngineKey]
Build = Callable[..., Entry]


def miss(found: Entry | Miss) -> Miss:
    assert isinstance(found, Miss), found
    return found


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"AITUNE_HF_CACHE": "/a", "HF_HOME": "/b"}, Path("/a")),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, Path("/b/aitune")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/huggingface/aitune")),
        ({"AITUNE_HF_CACHE": ""}, Path("~/.cache/huggingface/aitune").expanduser()),
        ({}, Path("~/.cache/huggingface/aitune").expanduser()),
    ],
)
def test_default_folder_follows_the_environment(env: dict[str, str], expected: Path) -> None:
    assert default_cache_dir(env) == expected


def test_an_empty_store_misses_and_creates_nothing(store: LocalStore, make_key: MakeKey) -> None:
    assert miss(store.lookup(make_key())) == Miss(kind="absent", reason="absent")
    assert store.read_record("pipelines/a.json") is None
    assert (store.entries(), store.records(), store.size(), store.verify()) == ([], [], 0, [])
    assert not store.root.exists()


def test_what_is_built_is_found_with_its_bytes_and_manifest(store: LocalStore, make_key: MakeKey, build: Build) -> None:
    key = make_key()
    built = build(store, key, {"model.pt2": b"engine"})
    found = LocalStore(store.root).lookup(key)
    assert found == built
    assert isinstance(found, Entry)
    assert found.path == store.root / key.entry_path
    assert found.read("model.pt2") == b"engine"
    assert found.manifest.engine == {"outputs": ["Tensor"]}
    assert found.manifest.results == {"max_error": 1e-6}
    assert found.manifest.key == key
    assert [entry.manifest.key for entry in store.entries()] == [key]
    assert store.verify() == []
    assert list((store.root / "aitune" / "tmp").iterdir()) == []


def test_the_second_reservation_finds_the_first_ones_entry(store: LocalStore, make_key: MakeKey, build: Build) -> None:
    built = build(store, make_key())
    with store.reserve(make_key()) as slot:
        assert slot.entry == built
        assert slot.miss is None
        with pytest.raises(CacheError, match="nothing to build"):
            _ = slot.workdir


def test_files_may_be_written_to_the_workdir_added_or_left_out(
    store: LocalStore, make_key: MakeKey, tmp_path: Path
) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(b"from elsewhere")
    with store.reserve(make_key()) as slot:
        (slot.workdir / "direct.bin").write_bytes(b"direct")
        slot.add("added.bin", source)
        slot.write("empty.bin", b"")
        entry = slot.commit(engine={})
    assert set(entry.manifest.files) == {"direct.bin", "added.bin", "empty.bin"}
    assert entry.read("added.bin") == b"from elsewhere"
    assert entry.read("empty.bin") == b""
    with store.reserve(make_key(1)) as slot:
        assert slot.commit(engine={}).manifest.files == {}


def test_nothing_stays_without_commit(store: LocalStore, make_key: MakeKey) -> None:
    def break_off() -> None:
        with store.reserve(make_key()) as slot:
            slot.write("model.pt2", b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    with store.reserve(make_key()) as slot:
        assert list(slot.workdir.iterdir()) == []
    assert miss(store.lookup(make_key())).kind == "absent"
    assert list((store.root / "aitune" / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "../x", "a/b", ".x"])
def test_odd_file_names_cannot_be_written(store: LocalStore, make_key: MakeKey, name: str) -> None:
    with store.reserve(make_key()) as slot, pytest.raises(CacheError):
        slot.write(name, b"x")


def test_folders_and_links_cannot_be_committed(store: LocalStore, make_key: MakeKey, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with store.reserve(make_key()) as slot:
        (slot.workdir / "link").symlink_to(tmp_path / "secret")
        with pytest.raises(CacheError, match="link"):
            slot.commit(engine={})
    with store.reserve(make_key()) as slot:
        (slot.workdir / "folder").mkdir()
        with pytest.raises(CacheError):
            slot.commit(engine={})


def test_an_engine_record_without_json_form_is_refused_and_nothing_stays(store: LocalStore, make_key: MakeKey) -> None:
    with store.reserve(make_key()) as slot, pytest.raises(CacheError, match="no JSON form"):
        slot.commit(engine={"error": float("nan")})
    assert miss(store.lookup(make_key())).kind == "absent"


def test_a_builder_that_was_faster_around_the_lock_wins(
    store: LocalStore, make_key: MakeKey, tmp_path: Path, build: Build
) -> None:
    key = make_key()
    elsewhere = LocalStore(tmp_path / "elsewhere")
    theirs = build(elsewhere, key, {"model.pt2": b"theirs"})
    with store.reserve(key) as slot:
        slot.write("model.pt2", b"ours")
        target = store.root / key.entry_path
        target.parent.mkdir(parents=True)
        theirs.path.rename(target)
        entry = slot.commit(engine={})
    assert entry.read("model.pt2") == b"theirs"
    assert list((store.root / "aitune" / "tmp").iterdir()) == []


def test_a_thread_that_reserves_a_key_twice_is_told(store: LocalStore, make_key: MakeKey) -> None:
    with (
        store.reserve(make_key()),
        pytest.raises(CacheError, match="this thread is building it already"),
        store.reserve(make_key()),
    ):
        pass
    with store.reserve(make_key()), store.reserve(make_key(1)):
        pass


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (
            {"environment": {"cpu_isa": "avx2"}},
            "foreign",
            "foreign environment: built for avx512, this machine has avx2",
        ),
        (
            {"environment": {"torch": "2.14.0"}},
            "foreign",
            "foreign environment: built with torch 2.13, here 2.14",
        ),
        (
            {"environment": {"torch": "2.13.1"}},
            "foreign",
            "foreign environment: built with torch 2.13.0, here 2.13.1",
        ),
        ({"options": {"level": 3}}, "absent", "absent; the nearest one was built with option level=2"),
        ({"backend_version": "2.14"}, "absent", "absent; the nearest one was built with inductor 2.13.0"),
        ({"weights_digest": "a" * 64}, "absent", "absent; the nearest one was built for other weights"),
        ({"backend": "openvino"}, "absent", "absent"),
        ({"graph_key": "cd" * 8}, "absent", "absent"),
    ],
)
def test_a_miss_names_what_the_nearest_engine_was_built_for(
    store: LocalStore, make_key: MakeKey, build: Build, change: dict[str, Any], kind: str, reason: str
) -> None:
    build(store, make_key(options={"level": 2}))
    found = miss(store.lookup(make_key(**{"options": {"level": 2}, **change})))
    assert found.kind == kind
    assert found.reason.startswith(reason)


def test_a_private_copy_outlives_its_entry(store: LocalStore, make_key: MakeKey, build: Build, tmp_path: Path) -> None:
    entry = build(store, make_key(), {"model.pt2": b"engine"})
    copy = entry.private_copy(tmp_path / "copy")
    store.clear()
    assert (copy / "model.pt2").read_bytes() == b"engine"
    with pytest.raises(CacheError, match="evicted"):
        entry.private_copy(tmp_path / "again")
    with pytest.raises(CacheError, match="evicted"):
        entry.read("model.pt2")
    with pytest.raises(CacheError, match="no file"):
        entry.read("other")


def test_what_is_copied_is_what_is_checked(store: LocalStore, make_key: MakeKey, build: Build, tmp_path: Path) -> None:
    entry = build(store, make_key(), {"a.bin": b"right", "b.bin": b"right"})
    (entry.path / "b.bin").write_bytes(b"wrong")
    with pytest.raises(CorruptEntryError, match=r"b\.bin"):
        entry.private_copy(tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    with pytest.raises(CorruptEntryError):
        entry.read("b.bin")


def test_checkout_copies_and_reports_like_lookup(
    store: LocalStore, make_key: MakeKey, build: Build, tmp_path: Path
) -> None:
    assert miss(store.checkout(make_key(), tmp_path / "copy")).kind == "absent"
    build(store, make_key(), {"model.pt2": b"engine"})
    found = store.checkout(make_key(), tmp_path / "copy")
    assert isinstance(found, Entry)
    assert found.path == tmp_path / "copy"
    assert found.read("model.pt2") == b"engine"


def test_a_wrong_engine_is_evicted_unless_it_was_replaced(store: LocalStore, make_key: MakeKey, build: Build) -> None:
    old = build(store, make_key(), {"model.pt2": b"old"})
    store.evict(old, "outputs differ from eager")
    assert miss(store.lookup(make_key())).kind == "absent"
    new = build(store, make_key(), {"model.pt2": b"new"})
    store.evict(old, "outputs differ from eager")
    assert store.lookup(make_key()) == new
    assert "outputs differ" in next((store.root / "aitune/quarantine").glob("*/reason.json")).read_text()


def test_an_unchanged_file_is_hashed_once_per_process(
    store: LocalStore, make_key: MakeKey, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aitune_hf.cache import digests

    build(store, make_key())
    settled = time.time_ns() + 10**10
    monkeypatch.setattr(time, "time_ns", lambda: settled)
    hashed: list[Path] = []
    original = digests.digest_of
    monkeypatch.setattr(digests, "digest_of", lambda path: (hashed.append(path), original(path))[1])
    for _ in range(3):
        assert isinstance(store.lookup(make_key()), Entry)
    assert sorted(path.name for path in hashed) == ["constants.json", "model.pt2"]


class TestRecords:
    def test_are_read_back_and_overwritten(self, store: LocalStore) -> None:
        for value in (1, 2):
            store.write_record("pipelines/abc.json", {"winner": value})
            assert LocalStore(store.root).read_record("pipelines/abc.json") == {"winner": value}
        assert store.records() == ["pipelines/abc.json"]

    def test_may_lie_beside_entries(self, store: LocalStore, make_key: MakeKey, build: Build) -> None:
        build(store, make_key())
        name = str(make_key().entry_path.parent.relative_to("aitune/v1") / "verdict.json")
        store.write_record(name, {"winner": "inductor"})
        assert store.read_record(name) == {"winner": "inductor"}
        assert store.records() == [name]
        assert len(store.entries()) == 1
        assert store.verify() == []

    @pytest.mark.parametrize("name", ["../x.json", "/x.json", "a//b.json", "x", "a/../b.json", ".x.json",
                                      "a/manifest.json", "a\\b.json", "a/./b.json", "x.json\n"])  # fmt: skip
    def test_names_that_could_leave_the_cache_are_refused(self, store: LocalStore, name: str) -> None:
        with pytest.raises(ConfigError):
            store.write_record(name, {})
        with pytest.raises(ConfigError):
            store.read_record(name)

    def test_values_without_json_form_are_refused(self, store: LocalStore) -> None:
        with pytest.raises(ConfigError, match=r"r\.json"):
            store.write_record("r.json", {"x": float("inf")})


class TestUpkeep:
    def test_gc_evicts_what_was_used_longest_ago(self, store: LocalStore, make_key: MakeKey, build: Build) -> None:
        entries = [build(store, make_key(number), {"model.pt2": b"x" * 10_000}) for number in range(4)]
        for number, entry in enumerate(entries):
            age(entry.path, 1000 - number)
        assert isinstance(store.lookup(make_key(0)), Entry)
        collected = store.gc(25_000)
        assert (collected.entries, collected.busy) == (2, 0)
        assert collected.bytes > 20_000
        assert store.size() < 25_000
        kept = [number for number in range(4) if isinstance(store.lookup(make_key(number)), Entry)]
        assert kept == [0, 3]
        assert list((store.root / "aitune" / "tmp").iterdir()) == []

    def test_gc_below_the_limit_removes_nothing(self, store: LocalStore, make_key: MakeKey, build: Build) -> None:
        build(store, make_key())
        assert store.gc(10**9).entries == 0
        with pytest.raises(CacheError, match="needs a size"):
            store.gc()

    def test_gc_takes_quarantined_remains_first(self, store: LocalStore, make_key: MakeKey, build: Build) -> None:
        store.evict(build(store, make_key(0), {"model.pt2": b"x" * 10_000}), "wrong")
        build(store, make_key(1), {"model.pt2": b"x" * 10_000})
        assert store.gc(15_000).entries == 0
        assert isinstance(store.lookup(make_key(1)), Entry)
        assert not (store.root / "aitune/quarantine").exists()

    def test_a_capped_store_evicts_after_each_build_but_not_what_was_built(
        self, tmp_path: Path, make_key: MakeKey, build: Build
    ) -> None:
        store = LocalStore(tmp_path / "cache", max_bytes=15_000)
        for number in range(3):
            build(store, make_key(number), {"model.pt2": b"x" * 10_000})
            assert isinstance(store.lookup(make_key(number)), Entry)
            assert len(store.entries()) == 1
        build(store, make_key(9), {"model.pt2": b"x" * 50_000})
        assert isinstance(store.lookup(make_key(9)), Entry)

    def test_an_entry_being_built_stays(self, store: LocalStore, make_key: MakeKey, build: Build) -> None:
        build(store, make_key(1))
        with store.reserve(make_key()) as slot:
            slot.write("model.pt2", b"x")
            assert store.clear().entries == 1
            assert store.sweep() == 0
            slot.commit(engine={})
        assert isinstance(store.lookup(make_key()), Entry)

    def test_clear_leaves_nothing(self, store: LocalStore, make_key: MakeKey, build: Build) -> None:
        build(store, make_key())
        store.write_record("pipelines/a.json", {})
        assert store.clear().bytes > 0
        assert (store.entries(), store.records(), store.size()) == ([], [], 0)
        assert not (store.root / "aitune/v1/00").exists()

    def test_verify_names_what_is_wrong_and_changes_nothing(
        self, store: LocalStore, make_key: MakeKey, build: Build
    ) -> None:
        entry = build(store, make_key())
        build(store, make_key(1))
        store.write_record("pipelines/a.json", {})
        (entry.path / "model.pt2").write_bytes(b"")
        (store.root / "aitune/v1/pipelines/a.json").write_bytes(b"{")
        for _ in range(2):
            problems = {problem.path: problem.reason for problem in store.verify()}
            assert set(problems) == {str(make_key().entry_path), "aitune/v1/pipelines/a.json"}
            assert "model.pt2" in problems[str(make_key().entry_path)]

    def test_verify_finds_an_entry_in_another_ones_place(
        self, store: LocalStore, make_key: MakeKey, build: Build
    ) -> None:
        entry = build(store, make_key())
        entry.path.rename(entry.path.with_name("inductor-00000000"))
        assert "belongs to" in store.verify()[0].reason


def test_waiting_names_the_holder_and_ends(
    store: LocalStore, make_key: MakeKey, spawn: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    holder = spawn("hold", store, make_key())
    assert holder.stdout.readline() == "holding\n"
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(KeyLockedError, match=f"process {holder.pid} on"),
        store.reserve(make_key(), timeout_s=0.5, warn_after_s=0.1),
    ):
        pass
    assert f"waiting for process {holder.pid}" in caplog.text
    with pytest.raises(KeyLockedError), store.reserve(make_key(), timeout_s=0):
        pass
