"""Names that are one file on some systems, mean a device there, or only look like another name."""

from __future__ import annotations

import pytest
from attack_kit import Victim, digests, native_key, sealed_manifest


@pytest.mark.parametrize(
    "names",
    [
        ("model.pt2", "Model.pt2"),
        ("Manifest.json",),
        ("MANIFEST.JSON",),
        ("model.pt2", "m\u043edel.pt2"),  # a Cyrillic letter
        ("model\u200b.pt2",),
        ("mode\u0301l.pt2",),
        ("\uff4dodel.pt2",),
        ("model.pt2\u202e",),
        ("con",),
        ("NUL.json",),
        ("com1.txt.json",),
        ("model.",),
        (".model",),
        ("model ",),
        ("model:stream",),
        ("model\n.json",),
        ("-rf",),
    ],
)
def test_clashing_reserved_and_odd_names_are_refused(victim: Victim, library: bytes, names: tuple[str, ...]) -> None:
    digest = digests({"x": library})["x"]
    listing = {name: {"sha256": digest.sha256, "size": digest.size} for name in names}
    victim.lay({}, sealed_manifest(native_key(), listing))
    for name in names:
        if name.lower() != "manifest.json":
            victim.lay({name: library})
    victim.refused(native_key(), "malformed", "file name")
