"""A hard link: a second name by which the file can be changed after it was checked, or a file that is not theirs."""

from __future__ import annotations

import os

import pytest
from attack_kit import Victim, native_key


@pytest.mark.parametrize("name", ["manifest.json", "model.pt2"])
def test_a_file_with_another_name_elsewhere_is_refused(victim: Victim, engine: bytes, name: str) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    os.link(victim.folder / name, victim.root / "other-name")
    victim.refused(native_key(), "malformed", f"{name} is a hard link")
