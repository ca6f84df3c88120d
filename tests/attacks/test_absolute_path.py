"""A file name that is a place on this machine."""

from __future__ import annotations

import pytest
from attack_kit import Victim, digests, native_key, sealed_manifest


@pytest.mark.parametrize("form", ["{}", "file://{}", "C:{}", "//localhost{}", "~{}", "\\\\host{}"])
def test_an_absolute_name_is_refused(victim: Victim, library: bytes, form: str) -> None:
    target = victim.root / "elsewhere.so"
    target.write_bytes(library)
    name = form.format(target)
    digest = digests({"x": library})["x"]
    victim.lay({}, sealed_manifest(native_key(), {name: {"sha256": digest.sha256, "size": digest.size}}))
    victim.refused(native_key(), "malformed", repr(name)[:12])
