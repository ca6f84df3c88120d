"""A pinned repo whose content was replaced by a later, or an earlier, commit."""

from __future__ import annotations

import pytest
from attack_kit import COMMIT, Victim, native_key

from aitune_hf.errors import ConfigError
from aitune_hf.hub.trust import Source, Trust


@pytest.mark.parametrize(
    "commit", ["1" * 40, None, "", "main", COMMIT[:39], COMMIT + "0", COMMIT.upper(), f" {COMMIT}", f"{COMMIT}\n"]
)
def test_another_commit_is_refused(victim: Victim, engine: bytes, commit: str | None) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    source = Source(url="org/tuned", commit=commit)
    victim.refused(
        native_key(), "untrusted", "org/tuned is trusted at commit", trust=f"org/tuned@{COMMIT}", source=source
    )


def test_the_same_commit_of_another_repo_is_refused(victim: Victim, engine: bytes) -> None:
    # A fork has the commits of its parent.
    victim.lay_entry(native_key(), {"model.pt2": engine})
    source = Source(url="mallory/tuned", commit=COMMIT)
    victim.refused(native_key(), "untrusted", "mallory/tuned", trust=f"org/tuned@{COMMIT}", source=source)


@pytest.mark.parametrize(
    "pin", ["main", "v1.0", COMMIT[:7], COMMIT[:39], COMMIT + "0", COMMIT.upper(), "", "refs/pr/1"]
)
def test_what_can_be_moved_is_no_pin(pin: str) -> None:
    with pytest.raises(ConfigError, match="no full commit"):
        Trust.parse(f"org/tuned@{pin}")
