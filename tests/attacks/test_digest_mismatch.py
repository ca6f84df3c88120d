"""Bytes that are not those the manifest promises, or a manifest that is not the promised one."""

from __future__ import annotations

import hashlib

import pytest
from attack_kit import Victim, native_key


def test_one_flipped_bit_is_refused(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    flipped = bytearray(engine)
    flipped[len(flipped) // 2] ^= 1
    victim.lay({"model.pt2": bytes(flipped)})
    victim.refused(native_key(), "damaged", "model.pt2 does not have the sha256")


def test_another_library_of_the_same_size_is_refused(victim: Victim, library: bytes) -> None:
    victim.lay_entry(native_key(), {"model.so": bytes(len(library))})
    victim.lay({"model.so": library})
    victim.refused(native_key(), "damaged", "model.so")
    assert victim.trials == []


@pytest.mark.parametrize("change", [-1, 1])
def test_another_size_is_refused(victim: Victim, engine: bytes, change: int) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.lay({"model.pt2": engine[:change] if change < 0 else engine + b"x"})
    victim.refused(native_key(), "damaged", "model.pt2 has")


def test_a_manifest_other_than_the_promised_one_is_refused(victim: Victim, engine: bytes) -> None:
    manifest = victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "damaged", "manifest.json", manifest_sha256="ab" * 32)
    victim.admitted(native_key(), manifest_sha256=hashlib.sha256(manifest).hexdigest())


def test_no_damage_to_a_manifest_goes_unseen(victim: Victim, engine: bytes) -> None:
    manifest = victim.lay_entry(native_key(), {"model.pt2": engine})
    for position in range(0, len(manifest), 17):
        damaged = bytearray(manifest)
        damaged[position] ^= 1
        victim.lay({}, bytes(damaged))
        victim.refused(native_key(), "malformed", "manifest.json")
