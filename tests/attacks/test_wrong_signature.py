"""Signatures that are missing, of something else, or of somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from attack_kit import SOURCE, Victim, data_key, native_key

from aitune_hf.hub.signature import KeyPair, PublicKey, generate_key, sign_manifest
from aitune_hf.hub.trust import Source


@pytest.fixture
def pair() -> KeyPair:
    return generate_key()


@pytest.fixture
def trust(pair: KeyPair) -> PublicKey:
    return PublicKey.from_pem(pair.public)


def source(signature: bytes | None) -> Source:
    return Source(url=SOURCE.url, commit=SOURCE.commit, signature=signature)


def test_no_signature(victim: Victim, engine: bytes, trust: PublicKey) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "untrusted", "There is no manifest.json.sig", trust=trust)


def test_of_another_manifest(victim: Victim, engine: bytes, pair: KeyPair, trust: PublicKey) -> None:
    other = victim.lay_entry(native_key(), {"model.pt2": b"harmless"})
    signature = sign_manifest(pair.private, other)
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "untrusted", "manifest.json.sig", trust=trust, source=source(signature))


def test_of_another_key(victim: Victim, engine: bytes, trust: PublicKey) -> None:
    manifest = victim.lay_entry(native_key(), {"model.pt2": engine})
    signature = sign_manifest(generate_key().private, manifest)
    victim.refused(native_key(), "untrusted", "manifest.json.sig", trust=trust, source=source(signature))


def test_a_right_signature_does_not_cover_other_files(
    victim: Victim, engine: bytes, pair: KeyPair, trust: PublicKey
) -> None:
    manifest = victim.lay_entry(native_key(), {"model.pt2": bytes(len(engine))})
    victim.lay({"model.pt2": engine})
    signed = source(sign_manifest(pair.private, manifest))
    victim.refused(native_key(), "damaged", "model.pt2", trust=trust, source=signed)


@pytest.mark.parametrize("position", [0, 31, 32, 63])
def test_one_flipped_bit(victim: Victim, engine: bytes, pair: KeyPair, trust: PublicKey, position: int) -> None:
    manifest = victim.lay_entry(native_key(), {"model.pt2": engine})
    signature = bytearray(sign_manifest(pair.private, manifest))
    signature[position] ^= 1
    victim.refused(native_key(), "untrusted", "manifest.json.sig", trust=trust, source=source(bytes(signature)))


@pytest.mark.parametrize("junk", [b"", b"\x00" * 64, b"x" * 63, b"x" * 65, b"x" * 1_000_000, b"\xff" * 64])
def test_junk(victim: Victim, engine: bytes, trust: PublicKey, junk: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "untrusted", "manifest.json.sig", trust=trust, source=source(junk))


def test_a_key_that_comes_with_the_entry_is_not_believed(victim: Victim, engine: bytes, trust: PublicKey) -> None:
    mallory = generate_key()
    manifest = victim.lay_entry(native_key(), {"model.pt2": engine}, provenance={"signer": trust.fingerprint})
    signed = source(sign_manifest(mallory.private, manifest))
    victim.refused(native_key(), "untrusted", "manifest.json.sig", trust=trust, source=signed)


def test_a_trusted_repo_is_no_trusted_key(victim: Victim, engine: bytes, tmp_path: Path) -> None:
    pair = generate_key()
    manifest = victim.lay_entry(native_key(), {"model.pt2": engine})
    signed = source(sign_manifest(pair.private, manifest))
    victim.refused(native_key(), "untrusted", "not among the 1 trusted repos", trust="other/repo", source=signed)


def test_data_is_read_without_a_signature_also_where_keys_are_asked_for(victim: Victim, trust: PublicKey) -> None:
    victim.lay_entry(data_key(), {"map.json": b"{}"})
    assert victim.admitted(data_key(), trust=trust, source=source(b"x" * 64)).policy == "data"
