"""A file name that leads out of the entry."""

from __future__ import annotations

import hashlib

import pytest
from attack_kit import Victim, data_key, native_key, sealed_manifest

from aitune_hf.cache import EngineKey

ESCAPES = [
    "../evil.json",
    "..",
    ".",
    "a/../../evil.json",
    "sub/evil.json",
    "..\\evil.json",
    "a\\b.json",
    "evil.json/",
    "./evil.json",
    "%2e%2e%2fevil.json",
    "evil\x00.json",
    "",
]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("key", [native_key(), data_key()], ids=["native", "data"])
def test_a_name_that_leads_out_is_refused(victim: Victim, library: bytes, name: str, key: EngineKey) -> None:
    # The file is there, with right digest and size, so that only its name stands in the way.
    (victim.folder / "sub").mkdir()
    for place in (victim.folder.parent / "evil.json", victim.folder / "sub" / "evil.json"):
        place.write_bytes(library)
    digest = {"sha256": hashlib.sha256(library).hexdigest(), "size": len(library)}
    victim.lay({}, sealed_manifest(key, {name: digest}))
    victim.refused(key, "malformed", repr(name)[:20])


def test_the_entry_itself_may_not_be_a_link(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    real = victim.folder.rename(victim.folder.with_name("real"))
    victim.folder.symlink_to(real)
    victim.refused(native_key(), "malformed", "is a link")
