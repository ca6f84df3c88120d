"""Files that change between the check and the load."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from attack_kit import Victim, native_key

from aitune_hf.hub import admission, intake
from aitune_hf.hub.admission import Admitted


def test_what_changes_in_the_download_after_the_check_is_not_loaded(
    victim: Victim, library: bytes, engine: bytes
) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    path = victim.folder / "model.pt2"

    def swap() -> None:
        path.write_bytes(library)

    entry = victim.admitted(native_key(), meddles=swap, changes=[path]).entry
    assert path.read_bytes() == library
    assert entry.read("model.pt2") == engine


def test_what_changes_in_the_copy_after_the_check_is_refused(victim: Victim, library: bytes, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})

    def swap() -> None:
        (copy,) = (victim.store.root / "aitune" / "tmp").glob("*/model.pt2")
        copy.write_bytes(library)

    victim.refused(native_key(), "damaged", "model.pt2 is not what it should be", meddles=swap)


def test_what_is_added_to_the_copy_after_the_check_is_refused(victim: Victim, library: bytes, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})

    def add() -> None:
        (copy,) = (victim.store.root / "aitune" / "tmp").glob("*/model.pt2")
        copy.with_name("libc.so").write_bytes(library)

    victim.refused(native_key(), "damaged", "libc.so", meddles=add)


def test_a_folder_swapped_for_another_after_it_was_opened_changes_nothing(
    victim: Victim, library: bytes, engine: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    evil = victim.folder.with_name("evil")
    evil.mkdir()
    (evil / "model.pt2").write_bytes(library)
    check = intake.check_file_set

    def swap_then_check(*arguments: Any, **options: Any) -> None:
        victim.folder.rename(victim.folder.with_name("gone"))
        evil.rename(victim.folder)
        check(*arguments, **options)

    monkeypatch.setattr(admission, "check_file_set", swap_then_check)
    entry = victim.admitted(native_key(), changes=[victim.folder.parent]).entry
    assert entry.read("model.pt2") == engine


def test_a_link_put_in_place_of_a_file_after_the_listing_is_refused(
    victim: Victim, engine: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    path, target = victim.folder / "model.pt2", victim.root / "real"
    check = intake.check_file_set

    def check_then_swap(*arguments: Any, **options: Any) -> None:
        check(*arguments, **options)
        path.rename(target)
        path.symlink_to(target)

    monkeypatch.setattr(admission, "check_file_set", check_then_swap)
    victim.refused(native_key(), "malformed", "model.pt2 is a symbolic link", changes=[victim.folder, target])


def test_a_file_that_changes_all_the_time_is_taken_right_or_not_at_all(victim: Victim, library: bytes) -> None:
    evil = library * 8
    good = b"good" * (len(evil) // 4)
    evil = evil[: len(good)]
    victim.lay_entry(native_key(), {"model.bin": good})
    path, stop = victim.folder / "model.bin", threading.Event()

    def flicker() -> None:
        # In place, so that also the file that is already open changes.
        with path.open("r+b", buffering=0) as file:
            while not stop.is_set():
                for data in (evil, good):
                    file.seek(0)
                    file.write(data)

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        for _ in range(20):
            result = victim.admit(native_key(), changes=[path])
            if isinstance(result, Admitted):
                assert result.entry.read("model.bin") == good
                break
            assert result.kind == "damaged"
    finally:
        stop.set()
        thread.join()


def test_the_store_holds_what_was_checked_and_nothing_of_the_source(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    entry = victim.admitted(native_key()).entry
    stored: Path = entry.path / "model.pt2"
    assert stored.stat().st_nlink == 1
    assert stored.stat().st_ino != (victim.folder / "model.pt2").stat().st_ino
    assert sorted(item.name for item in entry.path.iterdir()) == ["manifest.json", "model.pt2"]
