"""Nested JSON, to overflow the stack of whoever parses it."""

from __future__ import annotations

import sys

import pytest
from attack_kit import Victim, data_key, native_key

from aitune_hf.cache.sealed import seal
from aitune_hf.errors import CorruptEntryError
from aitune_hf.hub.untrusted_json import read_untrusted_json

DEEP = 200_000


@pytest.fixture
def generous_stack() -> object:
    """A program may have raised Python's own bound, which then no longer protects the C stack."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * DEEP)
    yield
    sys.setrecursionlimit(before)


ATTACKS = [b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b"[" * DEEP, b'{"x":[' * DEEP]


@pytest.mark.usefixtures("generous_stack")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_deep_record_is_refused(attack: bytes) -> None:
    with pytest.raises(CorruptEntryError, match=r"pipelines/x\.json: .*(deeper|values)"):
        read_untrusted_json(attack, "pipelines/x.json")


@pytest.mark.usefixtures("generous_stack")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_deep_manifest_is_refused(victim: Victim, attack: bytes) -> None:
    # Sealed like an honest one: the parser is reached.
    data = seal("manifest", {"x": 0}).replace(b'{"x":0}', attack)
    victim.lay({}, data)
    victim.refused(native_key(), "malformed", "manifest.json")
    victim.lay({}, attack)
    victim.refused(native_key(), "malformed", "manifest.json")


@pytest.mark.usefixtures("generous_stack")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_deep_file_of_an_entry_is_refused(victim: Victim, attack: bytes) -> None:
    victim.lay_entry(data_key(), {"map.json": attack})
    victim.refused(data_key(), "malformed", "map.json")
