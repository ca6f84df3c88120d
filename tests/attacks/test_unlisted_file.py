"""A file that the manifest, and so its signature, does not speak of."""

from __future__ import annotations

import pytest
from attack_kit import Victim, data_key, digests, native_key, sealed_manifest

from aitune_hf.cache import EngineKey


@pytest.mark.parametrize("name", ["libevil.so", ".hidden", "model.pt2.bak", "MANIFEST.JSON", "manifest.json.SIG"])
@pytest.mark.parametrize("key", [native_key(), data_key()], ids=["native", "data"])
def test_an_unlisted_file_is_refused(victim: Victim, library: bytes, name: str, key: EngineKey) -> None:
    victim.lay_entry(key, {"map.json": b"{}"})
    victim.lay({name: library})
    victim.refused(key, "malformed", repr(name))


def test_an_unlisted_folder_is_refused(victim: Victim, library: bytes) -> None:
    victim.lay_entry(native_key(), {"map.json": b"{}"})
    (victim.folder / "model").mkdir()
    (victim.folder / "model" / "evil.so").write_bytes(library)
    victim.refused(native_key(), "malformed", "'model'")


@pytest.mark.parametrize("name", ["manifest.json.sig", "Manifest.json.Sig"])
def test_the_signature_cannot_be_a_file_of_the_engine(victim: Victim, library: bytes, name: str) -> None:
    digest = digests({name: library})[name]
    listing = {name: {"sha256": digest.sha256, "size": digest.size}}
    victim.lay({name: library}, sealed_manifest(native_key(), listing))
    victim.refused(native_key(), "malformed", name)
