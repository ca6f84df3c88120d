"""Detached signatures over a manifest: who made an entry, whatever repo it comes from.

A signature is the 64 bytes of Ed25519 (RFC 8032) over the very bytes of ``manifest.json``; it lies beside it as
``manifest.json.sig``. The manifest holds the digest and size of every file and the whole key of the engine, so it
stands for all of the entry, and a signature cannot be moved to another one.

Plain Ed25519 through ``cryptography`` (extra ``signing``) was chosen over the ``model-signing`` package: what is signed
is one small document which already lists its files, users need no identity provider and no network, a key pair is two
text files, and ``openssl pkeyutl -verify -rawin`` can check a signature. ``model-signing`` hashes model folders again
in its own bundle format, and brings the Sigstore client with it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aitune_hf.cache.manifest import MANIFEST_NAME
from aitune_hf.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["SIGNATURE_NAME", "SIGNATURE_SIZE", "KeyPair", "PublicKey", "generate_key", "sign_manifest", "verify"]

#: The file beside the manifest that holds its signature.
SIGNATURE_NAME = f"{MANIFEST_NAME}.sig"
#: Bytes of a signature.
SIGNATURE_SIZE = 64

_INSTALL = "signatures need the package 'cryptography': pip install 'aitune-hf[signing]'"
_KEY_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A new key pair as PEM text: keep ``private`` to yourself, hand ``public`` out."""

    private: bytes = field(repr=False)
    public: bytes


@dataclass(frozen=True, kw_only=True)
class PublicKey:
    """An Ed25519 public key, 32 bytes. Raises ``ConfigError`` for anything else."""

    raw: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.raw, bytes) or len(self.raw) != _KEY_SIZE:
            raise ConfigError(f"an Ed25519 public key has {_KEY_SIZE} bytes; got {self.raw!r:.80}")
        self.native()  # says at once when signatures cannot be checked here

    @property
    def fingerprint(self) -> str:
        """A short name of the key for messages and provenance: ``ed25519:`` and 16 hex digits of its SHA-256."""
        return f"ed25519:{hashlib.sha256(self.raw).hexdigest()[:16]}"

    def native(self) -> Ed25519PublicKey:
        """The same key for ``cryptography``. Raises ``ConfigError`` where that is not installed."""
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError as error:
            raise ConfigError(_INSTALL) from error
        return Ed25519PublicKey.from_public_bytes(self.raw)

    @classmethod
    def from_pem(cls, text: bytes, what: str = "public key") -> PublicKey:
        """The key in a PEM file. Raises ``ConfigError`` for a private key, another kind of key, or no key at all."""
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization
        except ImportError as error:
            raise ConfigError(_INSTALL) from error
        if b"PRIVATE KEY" in text:
            raise ConfigError(f"{what} holds a private key: give the public one, and keep that one to whoever signs")
        try:
            key = serialization.load_pem_public_key(text)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{what} is no PEM public key: {error}") from error
        return cls.of(key, what)

    @classmethod
    def of(cls, key: object, what: str = "public key") -> PublicKey:
        """The key that ``cryptography`` holds as ``key``. Raises ``ConfigError`` for another kind of key."""
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError as error:
            raise ConfigError(_INSTALL) from error
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"{what}: manifests are signed with Ed25519 keys; this is a {type(key).__name__}")
        return cls(raw=key.public_bytes_raw())


def generate_key() -> KeyPair:
    """A new Ed25519 key pair, unencrypted."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    private = Ed25519PrivateKey.generate()
    return KeyPair(
        private=private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        public=private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    )


def sign_manifest(private_key: bytes | Ed25519PrivateKey, manifest_bytes: bytes) -> bytes:
    """The 64 bytes to put into ``manifest.json.sig``.

    ``private_key`` is PEM text without a password, or a key of ``cryptography``. Raises ``ConfigError`` for another
    kind of key.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    key: object = private_key
    if isinstance(private_key, bytes):
        try:
            key = serialization.load_pem_private_key(private_key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            # Without the cause, whose text may quote the key.
            raise ConfigError(
                f"the signing key is no PEM private key without password ({type(error).__name__})"
            ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"manifests are signed with Ed25519 keys; this is a {type(key).__name__}")
    return key.sign(manifest_bytes)


def verify(public_key: PublicKey, manifest_bytes: bytes, signature: bytes) -> bool:
    """Whether the owner of ``public_key`` signed exactly these bytes."""
    from cryptography.exceptions import InvalidSignature

    if len(signature) != SIGNATURE_SIZE:
        return False
    try:
        public_key.native().verify(signature, manifest_bytes)
    except InvalidSignature:
        return False
    return True
