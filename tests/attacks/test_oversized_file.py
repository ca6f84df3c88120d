"""Files that would fill the disk, or claim to."""

from __future__ import annotations

import os

from attack_kit import Victim, data_key, digests, manifest_bytes, native_key

from aitune_hf.cache import FileDigest
from aitune_hf.hub.objection import Limits

TIB = 1 << 40


def test_a_sparse_file_of_a_terabyte_is_not_copied(victim: Victim) -> None:
    files = {"model.bin": FileDigest(sha256="ab" * 32, size=TIB)}
    victim.lay({"model.bin": b""}, manifest_bytes(native_key(), files))
    os.truncate(victim.folder / "model.bin", TIB)
    victim.refused(native_key(), "malformed", f"model.bin has {TIB} bytes")


def test_a_file_larger_than_its_manifest_says_is_not_copied(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    os.truncate(victim.folder / "model.pt2", TIB)
    victim.refused(native_key(), "damaged", f"model.pt2 has {TIB} bytes")


def test_many_files_count_together(victim: Victim) -> None:
    files = {f"part{number}.json": b"[1,2,3]" for number in range(4)}
    victim.lay_entry(data_key(), files)
    victim.refused(data_key(), "malformed", "28 bytes", limits=Limits(file_bytes=7, total_bytes=27))
    victim.refused(data_key(), "malformed", "part0.json", limits=Limits(file_bytes=6))
    victim.admitted(data_key(), limits=Limits(file_bytes=7, total_bytes=28))


def test_more_files_than_an_entry_may_have_are_refused(victim: Victim) -> None:
    files = digests({f"f{number}.json": b"1" for number in range(300)})
    victim.lay({}, manifest_bytes(data_key(), files))
    victim.refused(data_key(), "malformed", "more than 256 files")


def test_a_folder_with_many_names_is_refused_at_the_first_wrong_one(victim: Victim) -> None:
    victim.lay_entry(data_key(), {"map.json": b"{}"})
    victim.lay({f"x{number}": b"" for number in range(2000)})
    victim.refused(data_key(), "malformed", "is not listed")
