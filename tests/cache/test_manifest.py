from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aitune_hf.cache import EngineKey, FileDigest, Manifest, UnknownSchemaError
from aitune_hf.cache.sealed import seal
from aitune_hf.errors import CacheError

MakeKey = Callable[..., EngineKey]


@pytest.fixture
def manifest(make_key: MakeKey) -> Manifest:
    return Manifest(
        key=make_key(),
        files={
            "model.pt2": FileDigest(sha256="0" * 64, size=12),
            "map.json": FileDigest(sha256="1" * 64, size=0),
        },
        engine={"constants": [{"name": "weight", "shape": [2, 3]}]},
        results={"speedup": 1.5},
        provenance={"package": "0.1.0"},
        factors={"hierarchy": {"class": "Block"}},
    )


def test_round_trips_through_its_bytes(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.to_bytes() == manifest.to_bytes()
    assert manifest.size == 12


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/etc/passwd", "a/b", "a\\b", "..", ".", "", ".hidden", "x.", "C:x", "a b", "nul\0", "é"),
        *("manifest.json", "Manifest.JSON", "x" * 129),
    ],
)
def test_file_names_that_could_leave_the_entry_are_refused(manifest: Manifest, name: str) -> None:
    data = manifest.to_dict() | {"files": {name: {"sha256": "0" * 64, "size": 1}}}
    with pytest.raises(CacheError):
        Manifest.from_dict(data)


@pytest.mark.parametrize(
    "damage",
    [
        {"files": {"a": {"sha256": "0" * 64, "size": 1}, "A": {"sha256": "0" * 64, "size": 1}}},
        {"files": {f"f{i}": {"sha256": "0" * 64, "size": 1} for i in range(257)}},
        {"files": {"a": {"sha256": "0" * 63, "size": 1}}},
        {"files": {"a": {"sha256": "0" * 64, "size": -1}}},
        {"files": {"a": {"sha256": "0" * 64, "size": True}}},
        {"files": {"a": {"sha256": "0" * 64, "size": 2**53}}},
        {"files": {"a": {"sha256": "0" * 64}}},
        {"files": []},
        {"engine": []},
        {"key": {}},
        {"extra": 1},
    ],
)
def test_malformed_manifests_are_refused(manifest: Manifest, damage: dict[str, Any]) -> None:
    with pytest.raises(CacheError):
        Manifest.from_dict(manifest.to_dict() | damage)


def test_a_missing_field_is_refused(manifest: Manifest) -> None:
    data = manifest.to_dict()
    del data["results"]
    with pytest.raises(CacheError, match="results"):
        Manifest.from_dict(data)


def test_another_schema_is_named(manifest: Manifest) -> None:
    newer = seal("manifest", manifest.to_dict() | {"schema": 2, "new_field": 1})
    with pytest.raises(UnknownSchemaError, match="schema 2, this version reads schema 1"):
        Manifest.from_bytes(newer)
