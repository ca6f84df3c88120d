"""A file that is promised and not there."""

from __future__ import annotations

import shutil

from attack_kit import Victim, native_key


def test_a_missing_file_is_refused(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine, "map.json": b"{}"})
    (victim.folder / "map.json").unlink()
    victim.refused(native_key(), "damaged", "map.json is missing")


def test_a_missing_manifest_is_refused(victim: Victim, engine: bytes) -> None:
    victim.lay({"model.pt2": engine})
    victim.refused(native_key(), "damaged", "manifest.json cannot be read")


def test_a_missing_entry_is_refused(victim: Victim) -> None:
    shutil.rmtree(victim.folder)
    victim.refused(native_key(), "damaged", "entry")
