"""A link in place of a file: it would read, or later write, somewhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from attack_kit import Victim, data_key, digests, manifest_bytes, native_key


def test_a_linked_file_is_refused_even_with_the_right_bytes(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    target = (victim.folder / "model.pt2").rename(victim.root / "real.pt2")
    (victim.folder / "model.pt2").symlink_to(target)
    victim.refused(native_key(), "malformed", "model.pt2 is a symbolic link")


def test_a_secret_of_the_user_cannot_be_taken_into_the_cache(victim: Victim) -> None:
    secret = victim.root / "token"
    secret.write_bytes(b'{"token":"hf_secret"}')
    victim.lay({}, manifest_bytes(data_key(), digests({"map.json": secret.read_bytes()})))
    (victim.folder / "map.json").symlink_to(secret)
    victim.refused(data_key(), "malformed", "map.json is a symbolic link")


@pytest.mark.parametrize("target", ["manifest.real", "/dev/zero", "/dev/stdin", "missing", "manifest.json"])
def test_a_linked_manifest_is_refused(victim: Victim, engine: bytes, target: str) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    (victim.folder / "manifest.json").rename(victim.folder.parent / "manifest.real")
    (victim.folder / "manifest.json").symlink_to(Path("..") / target if "real" in target else target)
    victim.refused(native_key(), "malformed", "manifest.json is a symbolic link")
