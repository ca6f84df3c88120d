"""Eight processes tune one target on one empty cache, and one of them is killed: nothing is lost and nothing breaks."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pytest
from launch_kit import HERE, Launch

PROCESSES = 8
PARTS = {"part14", "part15", "part16"}


def rounds_of(launch: Launch, count: int, seed: int) -> list[dict[str, Any]]:
    command = (str(HERE / "crash_rounds.py"), str(launch.folder / "rounds"), str(count), str(PROCESSES), str(seed))
    process = launch.start(sys.executable, *command)
    output, _ = process.communicate(timeout=30 * count + 60)
    assert process.returncode == 0, output
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def check(facts: dict[str, Any]) -> None:
    survivors = facts["survivors"]
    assert facts["codes"] == [0] * (PROCESSES - 1)  # All but the victim, which may have ended before its turn.
    assert len(survivors) == PROCESSES - facts["killed"]
    assert all(one["right"] for one in survivors)
    assert all(set(one["decisions"]) == PARTS for one in survivors)
    # Over all that survived, each part was built once at most: not at all, if the victim had done it.
    built = Counter(part for one in survivors for part in one["built"])
    assert set(built.values()) <= {1}
    completed = Counter(part for event, part, _, _ in facts["log"] if event == "built")
    assert set(completed) == PARTS
    assert completed.total() <= len(PARTS) + facts["killed"]
    # All take what one of them measured.
    assert all(one["decisions"] == survivors[0]["decisions"] for one in survivors)
    assert facts["entries"] == len(PARTS)
    assert facts["problems"] == facts["held"] == facts["left"] == []
    assert not facts["quarantined"]


def tell(rounds: list[dict[str, Any]]) -> None:
    in_a_build = sum(facts["killed_in_a_build"] for facts in rounds)
    builds = Counter(sum(len(one["built"]) for one in facts["survivors"]) for facts in rounds)
    print(
        f"{len(rounds)} rounds of {PROCESSES} processes: {sum(facts['killed'] for facts in rounds)} killed, {in_a_build} "
        f"in a build; builds by survivors of {len(PARTS)} parts: {dict(sorted(builds.items()))}"
    )


@pytest.mark.parametrize(
    ("count", "seed"), [pytest.param(3, 1, id="3 rounds"), pytest.param(50, 2, id="50 rounds", marks=pytest.mark.soak)]
)
def test_a_process_killed_at_any_moment_costs_nobody_anything(launch: Launch, count: int, seed: int) -> None:
    rounds = rounds_of(launch, count, seed)
    tell(rounds)
    assert len(rounds) == count
    for facts in rounds:
        check(facts)
    assert any(facts["killed_in_a_build"] for facts in rounds)
