"""A small JSON document that knows its own digest.

A sealed document is the JSON object ``{"body": …, "digest": sha256, "name": …}``, spelled exactly so. One
flipped byte, a cut, or another document put in its place does not unseal. A seal is against accidents: it
proves no authorship.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from aitune_hf.cache.canonical import MAX_JSON_BYTES, canonical_json, parse_json
from aitune_hf.errors import CacheError, CorruptEntryError

__all__ = ["seal", "unseal"]

_HEAD = b'{"body":'
_DIGEST = b',"digest":"'


def seal(name: str, body: Mapping[str, object]) -> bytes:
    """``body`` as a document that only ``unseal(name, …)`` opens. Raises ``CacheError`` beyond 8 MiB."""
    content = canonical_json(body)
    data = _HEAD + content + _tail(name, content)
    if len(data) > MAX_JSON_BYTES:
        raise CacheError(
            f"{name}: a document of {len(data)} bytes; the cache reads at most {MAX_JSON_BYTES}. "
            "Store large data as a file of the entry instead."
        )
    return data


def unseal(name: str, data: bytes) -> dict[str, object]:
    """The body sealed under ``name``. Raises ``CorruptEntryError`` for any other bytes."""
    if len(data) > MAX_JSON_BYTES:
        raise CorruptEntryError(f"{name}: a document of more than {MAX_JSON_BYTES} bytes")
    end = data.rfind(_DIGEST)
    if end < 0 or not data.startswith(_HEAD):
        raise CorruptEntryError(f"{name}: not a sealed document, or cut short ({len(data)} bytes)")
    content = data[len(_HEAD) : end]
    if data[end:] != _tail(name, content):
        raise CorruptEntryError(f"{name}: its bytes do not match its digest, or belong to another document")
    body = parse_json(content)
    if not isinstance(body, dict):
        raise CorruptEntryError(f"{name}: its body is not an object")
    return body


def _tail(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0" + content).hexdigest()
    return _DIGEST + digest.encode() + b'","name":' + canonical_json(name) + b"}"
