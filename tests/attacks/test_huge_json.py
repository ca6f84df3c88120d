"""Large JSON, or small JSON that becomes many objects."""

from __future__ import annotations

import os

import pytest
from attack_kit import Victim, data_key, native_key, sealed_manifest

from aitune_hf.errors import CorruptEntryError
from aitune_hf.hub.untrusted_json import read_untrusted_json


def test_a_huge_manifest_is_not_read(victim: Victim) -> None:
    victim.lay({"manifest.json": b"{"})
    os.truncate(victim.folder / "manifest.json", 1 << 40)
    victim.refused(native_key(), "malformed", "manifest.json has more than")


@pytest.mark.parametrize("field", ["engine", "results", "provenance", "factors"])
def test_many_values_in_a_manifest_are_refused(victim: Victim, field: str) -> None:
    victim.lay({}, sealed_manifest(native_key(), {}, **{field: {"a": [[]] * 600_000}}))
    victim.refused(native_key(), "malformed", "manifest.json: JSON document with more than")


@pytest.mark.parametrize(
    ("attack", "bounds", "reason"),
    [
        (b'"' + b"x" * 100 + b'"', {"max_bytes": 100}, "102 bytes; at most 100"),
        (b"[" + b"1," * 100 + b"1]", {"max_nodes": 100}, "more than 100 values"),
        (b"[" + b"[]," * 300_000 + b"[]]", {}, "more than 200000 values"),
        (b"[[[[1]]]]", {"max_depth": 3}, "deeper than 3"),
        (b"1" * 10_000, {}, "not a JSON"),
        (b"1e400", {}, "out of range"),
        (b"[NaN]", {}, "not JSON"),
        (b"[-Infinity]", {}, "not JSON"),
        (b"\xff\xfe[\x00]\x00", {}, "JSON"),
        (b'"\\ud800"', {}, "surrogate"),
        (b"", {}, "not a JSON"),
    ],
)
def test_a_record_beyond_its_bounds_is_refused(attack: bytes, bounds: dict[str, int], reason: str) -> None:
    with pytest.raises(CorruptEntryError, match=f"verdict.json: .*{reason}"):
        read_untrusted_json(attack, "verdict.json", **bounds)


def test_a_record_within_its_bounds_is_read() -> None:
    assert read_untrusted_json(b'{"a":[1,2.5,null,"\\u00e9"]}', "r", max_nodes=7) == {"a": [1, 2.5, None, "é"]}


def test_huge_json_in_an_entry_is_refused(victim: Victim) -> None:
    victim.lay_entry(data_key(), {"map.json": b"[" + b"1," * 300_000 + b"1]"})
    victim.refused(data_key(), "malformed", "map.json: JSON document with more than")
