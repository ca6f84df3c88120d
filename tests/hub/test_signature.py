"""Signatures over manifests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from aitune_hf.errors import ConfigError
from aitune_hf.hub.signature import SIGNATURE_SIZE, KeyPair, PublicKey, generate_key, sign_manifest, verify

MANIFEST = b'{"body":{}}'


@pytest.fixture(scope="module")
def pair() -> KeyPair:
    return generate_key()


def test_what_was_signed_is_verified_and_nothing_else(pair: KeyPair) -> None:
    key = PublicKey.from_pem(pair.public)
    signature = sign_manifest(pair.private, MANIFEST)
    assert len(signature) == SIGNATURE_SIZE
    assert verify(key, MANIFEST, signature)
    assert not verify(key, MANIFEST + b" ", signature)
    assert not verify(key, MANIFEST, signature[:-1])
    assert not verify(PublicKey.from_pem(generate_key().public), MANIFEST, signature)


def test_a_published_example(tmp_path: Path) -> None:
    # RFC 8032, 7.1, test 2.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )
    expected = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert sign_manifest(private, b"\x72") == expected
    assert verify(PublicKey.of(private.public_key()), b"\x72", expected)


def test_openssl_reads_keys_and_signatures(tmp_path: Path, pair: KeyPair) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl")
    for name, data in (("key", pair.public), ("manifest", MANIFEST), ("sig", sign_manifest(pair.private, MANIFEST))):
        (tmp_path / name).write_bytes(data)
    command = ["pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", "key", "-sigfile", "sig", "-in", "manifest"]
    run = subprocess.run([openssl, *command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr


def test_keys_differ_and_do_not_show_their_secret(pair: KeyPair) -> None:
    other = generate_key()
    assert other.private != pair.private
    assert "PRIVATE" not in repr(pair)
    assert PublicKey.from_pem(pair.public).fingerprint != PublicKey.from_pem(other.public).fingerprint


def test_other_kinds_of_keys_are_refused() -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ConfigError, match="Ed25519"):
        sign_manifest(private, MANIFEST)
    with pytest.raises(ConfigError, match="Ed25519"):
        PublicKey.from_pem(public)
    with pytest.raises(ConfigError, match="32 bytes"):
        PublicKey(raw=b"short")


@pytest.mark.parametrize("junk", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_broken_signing_key_is_refused_without_being_quoted(junk: bytes) -> None:
    with pytest.raises(ConfigError, match="no PEM private key") as caught:
        sign_manifest(junk, MANIFEST)
    assert "AAAA" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_key_with_a_password_is_refused(pair: KeyPair) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(pair.private, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )
    with pytest.raises(ConfigError, match="without password"):
        sign_manifest(locked, MANIFEST)
