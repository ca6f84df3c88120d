"""A valid entry in the place of another one."""

from __future__ import annotations

from typing import Any

import pytest
from attack_kit import Victim, data_key, native_key

from aitune_hf.hub.signature import PublicKey, generate_key, sign_manifest
from aitune_hf.hub.trust import Source


@pytest.mark.parametrize(
    "change",
    [
        {"hierarchy_hash": "ff" * 32},
        {"graph_key": "cd" * 8},
        {"backend_version": "2.12.0"},
        {"options": {"level": 3}},
        {"options": {"level": 2, "more": None}},
        {"weights_digest": "ee" * 32},
    ],
)
def test_an_engine_of_another_key_is_refused(victim: Victim, engine: bytes, change: dict[str, Any]) -> None:
    pair = generate_key()
    manifest = victim.lay_entry(native_key(**change), {"model.pt2": engine})
    # Even signed by whom the user trusts.
    source = Source(url="org/tuned", signature=sign_manifest(pair.private, manifest))
    trust = PublicKey.from_pem(pair.public)
    victim.refused(native_key(), "foreign", "manifest.json is of another engine", trust=trust, source=source)


def test_a_data_engine_cannot_take_the_place_of_a_native_one(victim: Victim) -> None:
    victim.lay_entry(data_key(), {"map.json": b"{}"})
    victim.refused(native_key(), "foreign", "manifest.json")


def test_a_native_engine_cannot_take_the_place_of_data(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(data_key(), "foreign", "manifest.json", trust=None)
