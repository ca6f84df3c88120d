"""One name twice: one reader sees the good value, another the bad one."""

from __future__ import annotations

import hashlib

import pytest
from attack_kit import Victim, data_key, digests, manifest_bytes, native_key

from aitune_hf.cache.sealed import seal
from aitune_hf.errors import CorruptEntryError
from aitune_hf.hub.untrusted_json import read_untrusted_json


def resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """A manifest in other words, with a right seal."""
    body = data[len(b'{"body":') : data.rfind(b',"digest":"')].replace(old, new, 1)
    stand_in = seal("manifest", {"stand": "in"}).replace(b'{"stand":"in"}', body)
    right = hashlib.sha256(b"manifest\0" + body).hexdigest().encode()
    start = stand_in.rfind(b',"digest":"') + len(b',"digest":"')
    return stand_in[:start] + right + stand_in[start + 64 :]


def test_resealing_is_right(victim: Victim, engine: bytes) -> None:
    honest = victim.lay_entry(native_key(), {"model.pt2": engine})
    assert resealed(honest, b"unet", b"unet") == honest


@pytest.mark.parametrize("name", [b'"engine"', b'"schema"', b'"backend"', b'"model.pt2"', b'"sha256"'])
def test_a_repeated_key_in_a_manifest_is_refused(victim: Victim, engine: bytes, name: bytes) -> None:
    honest = victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.lay({}, resealed(honest, name + b":", name + b":0," + name + b":"))
    victim.refused(native_key(), "malformed", "appears twice")


def test_a_repeated_key_spelled_otherwise_is_refused(victim: Victim, engine: bytes) -> None:
    honest = victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.lay({}, resealed(honest, b'"engine":', b'"\\u0065ngine":0,"engine":'))
    victim.refused(native_key(), "malformed", "appears twice")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"engine":', b'"engine": '),
        (b"unet", b"\\u0075net"),
        (b'"schema":1', b'"schema":1.0'),
        (b'"x":1', b'"x":10e-1'),
        (b'"provenance":', b'"more":{},"provenance":'),
        (b'"results":{},', b""),
        (b'"schema":1', b'"schema":true'),
    ],
)
def test_another_spelling_or_other_fields_are_refused(victim: Victim, engine: bytes, old: bytes, new: bytes) -> None:
    honest = victim.lay_entry(native_key(), {"model.pt2": engine})
    assert old in honest
    victim.lay({}, resealed(honest, old, new))
    result = victim.admit(native_key())
    assert (getattr(result, "kind", None), "manifest.json" in getattr(result, "reason", "")) in {
        ("malformed", True),
        ("foreign", True),  # another schema
    }


def test_a_repeated_key_in_a_record_is_refused() -> None:
    with pytest.raises(CorruptEntryError, match="appears twice"):
        read_untrusted_json(b'{"winner":{"backend":"eager","backend":"evil"}}', "verdict.json")


def test_a_repeated_key_in_a_file_is_refused(victim: Victim) -> None:
    files = {"map.json": b'{"a":1,"a":2}'}
    victim.lay(files, manifest_bytes(data_key(), digests(files)))
    victim.refused(data_key(), "malformed", "map.json")
