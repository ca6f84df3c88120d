"""One small file decides; offline, pinned and cached look-ups ask nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import FakeHub
from huggingface_hub import constants, snapshot_download
from sharing_kit import Block, Machine, Many

from aitune_hf.hub.remote import open_remote

REPO = "me/tuned"
Machines = Callable[[str], Machine]


@pytest.fixture
def pushed(hub: FakeHub, machine: Machines) -> str:
    machine("mine").stock(Many(3))
    return machine("mine").push(Many(3), REPO).commit


@pytest.mark.parametrize("known", [True, False])
def test_a_lookup_among_100_000_entries_is_one_request(hub: FakeHub, machine: Machines, known: bool) -> None:
    machine("mine").stock(Many(3))
    if known:
        machine("mine").push(Many(3), REPO)
    else:
        hub.add(REPO)
    repo = hub.repos[REPO]
    others = {f"aitune/v1/{n % 256:02x}/{n:064x}/{n:032x}/tag/b/manifest.json": (b"{}", False) for n in range(100_000)}
    repo.commit({**repo.head.files, **others}, "the others'")
    with hub.counted() as requests:
        found = machine("theirs").look_up(Many(3), REPO)
    assert len(requests) == 1
    assert len(found.hits) == (3 if known else 0)
    assert ("3 of 3" if known else "no engines for this pipeline structure") in found.summary()


def test_a_pinned_commit_that_was_pulled_asks_nobody(hub: FakeHub, machine: Machines, pushed: str) -> None:
    first = machine("theirs").pull(Many(3), REPO, revision=pushed)
    assert first.installed == 3
    with hub.counted() as requests:
        again = machine("theirs").pull(Many(3), REPO, revision=pushed)
    assert requests == []
    assert again.installed == 3
    assert again.repos == (f"{REPO}@{pushed[:12]}",)


def test_a_miss_at_a_pinned_commit_is_asked_for_once(hub: FakeHub, machine: Machines, pushed: str) -> None:
    for count in (1, 0):
        with hub.counted() as requests:
            found = machine("theirs").look_up(Block(), REPO, revision=pushed)
        assert found.reason == "no engines for this pipeline structure"
        assert found.commit == pushed
        assert len(requests) == count


def test_a_miss_at_a_branch_is_asked_for_again(hub: FakeHub, machine: Machines, pushed: str) -> None:
    assert machine("theirs").look_up(Block(), REPO).reason
    machine("mine").tuned(Block())
    machine("mine").push(Block(), REPO)
    assert machine("theirs").look_up(Block(), REPO).hits


def test_the_clients_own_cache_serves_offline(
    hub: FakeHub, machine: Machines, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_download(REPO, endpoint=hub.endpoint)  # as `hf download` does
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub.counted() as requests:
        result = machine("theirs").pull(Many(3), REPO, trust=f"{REPO}@{pushed}")
    assert requests == []
    assert [outcome.answer for outcome in result.modules] == ["hit"] * 3
    assert result.installed == 3


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "local_files_only"])
def test_offline_with_nothing_cached_is_one_line(
    hub: FakeHub,
    machine: Machines,
    pushed: str,
    monkeypatch: pytest.MonkeyPatch,
    lines: Callable[[], list[str]],
    how: str,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "HF_HUB_OFFLINE")
    with hub.counted() as requests:
        result = machine("theirs").pull(Many(3), REPO, local_only=how == "local_files_only")
    assert requests == []
    assert result.installed == 0
    assert len(lines()) == 1
    assert "offline" in lines()[0]


def test_offline_after_a_pull_uses_what_it_left(
    hub: FakeHub, machine: Machines, pushed: str, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    machine("theirs").pull(Many(3), REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = machine("theirs").pull(Many(3), REPO)
    assert result.installed == 3
    assert lines() == []


def test_a_wrong_file_in_the_clients_cache_is_fetched_anew(hub: FakeHub, machine: Machines, pushed: str) -> None:
    folder = Path(snapshot_download(REPO, endpoint=hub.endpoint))
    for path in folder.rglob("model.bin"):
        path.resolve().write_bytes(b"something else")
    result = machine("theirs").pull(Many(3), REPO, revision=pushed)
    assert [outcome.answer for outcome in result.modules] == ["hit"] * 3


def test_a_record_that_is_too_large_is_refused(hub: FakeHub, machine: Machines, lines: Callable[[], list[str]]) -> None:
    path = f"aitune/v1/pipelines/{machine('theirs').target(Block()).pipeline_hash}.json"
    hub.add(REPO, {path: b" " * (9 * 2**20)})
    result = machine("theirs").pull(Block(), REPO)
    assert "larger than" in result.problems[0]
    assert len(lines()) == 1


def test_a_long_listing_comes_in_pages(hub: FakeHub) -> None:
    paths = [f"aitune/v1/pipelines/{number:064x}.json" for number in range(2500)]
    hub.add(REPO, dict.fromkeys([*paths, "README.md"], b"{}"))
    with hub.counted() as requests:
        assert sorted(open_remote(REPO).names("aitune/v1/pipelines", revision=None)) == paths
        assert open_remote(REPO).names("nowhere", revision=None) == []
    assert len(requests) == 3 + 1
