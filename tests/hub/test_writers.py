"""Several people push at once, answers get lost, and repositories are large: nothing is, and it stays few requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hub_server import FakeHub, Fault
from sharing_kit import Block, Machine, Many

from aitune_hf.errors import HubError
from aitune_hf.hub import publish
from aitune_hf.hub.publish import PushResult
from aitune_hf.hub.record import PipelineRecord

REPO = "me/tuned"
Machines = Callable[[str], Machine]


def record_of(hub: FakeHub, machine: Machine, module: Block) -> PipelineRecord:
    pipeline_hash = machine.target(module).pipeline_hash
    data = hub.repos[REPO].head.files[f"aitune/v1/pipelines/{pipeline_hash}.json"][0]
    return PipelineRecord.from_bytes(pipeline_hash, data)


def test_ten_writers_of_different_engines_lose_nothing(hub: FakeHub, machine: Machines) -> None:
    hub.add(REPO)
    machines = [machine(f"m{number}").with_options(level=number) for number in range(10)]
    for one in machines:
        one.tuned(Block())
    barrier = threading.Barrier(10)

    def write(one: Machine) -> PushResult:
        barrier.wait()
        return one.push(Block(), REPO, sleep=lambda seconds: time.sleep(seconds / 10))

    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(write, machines))
    assert all(len(result.added) == 1 for result in results)
    engines = record_of(hub, machines[0], Block()).engines()
    assert sorted(key.options["level"] for key in engines) == list(range(10))
    files = hub.repos[REPO].head.files
    assert all(f"{key.entry_path}/manifest.json" in files for key in engines)
    assert len(hub.repos[REPO].history()) == 11


def test_two_writers_of_the_same_engine_make_one_commit(hub: FakeHub, machine: Machines) -> None:
    hub.add(REPO)
    first, second = machine("first"), machine("second")
    first.tuned(Block())
    second.tuned(Block())
    late: list[PushResult] = []

    def squeeze_in() -> None:
        hub.before_commit = lambda: None
        late.append(second.push(Block(), REPO))

    hub.before_commit = squeeze_in
    result = first.push(Block(), REPO)
    assert len(late[0].added) == 1
    assert (result.added, len(result.unchanged)) == ((), 1)
    assert len(hub.repos[REPO].history()) == 2
    # What is there fits together: the manifest is the one that the record promises.
    assert machine("theirs").pull(Block(), REPO).installed == 1


@pytest.mark.parametrize("exists", [True, False])
def test_fifty_engines_are_one_commit_and_few_requests(hub: FakeHub, machine: Machines, exists: bool) -> None:
    if exists:
        hub.add(REPO)
    machine("mine").stock(Many(50))
    with hub.counted() as requests:
        result = machine("mine").push(Many(50), REPO)
    assert len(result.added) == 50
    assert len(hub.repos[REPO].history()) == 2
    assert len(requests) <= 10, [str(each) for each in requests]
    found = machine("theirs").look_up(Many(50), REPO)
    assert len(found.hits) == 50


def test_a_commit_that_landed_without_an_answer_is_not_made_twice(hub: FakeHub, machine: Machines) -> None:
    hub.add(REPO)
    machine("mine").tuned(Block())
    hub.faults = [Fault("POST .*/commit/", "lands", 504, times=1)]
    result = machine("mine").push(Block(), REPO, sleep=lambda seconds: None)
    assert len(result.added) == 1
    assert result.commit == hub.repos[REPO].head.oid
    assert len(hub.repos[REPO].history()) == 2


def test_a_commit_that_did_not_land_is_made_again(hub: FakeHub, machine: Machines) -> None:
    hub.add(REPO)
    machine("mine").tuned(Block())
    hub.faults = [Fault("POST .*/commit/", "status", 503, times=2), Fault("POST .*/commit/", "drops", times=1)]
    result = machine("mine").push(Block(), REPO, sleep=lambda seconds: None)
    assert len(result.added) == 1
    assert len(hub.repos[REPO].history()) == 2


def test_a_commit_that_never_works_is_an_error_with_its_cause(
    hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_ATTEMPTS", 3)
    hub.add(REPO)
    machine("mine").tuned(Block())
    hub.faults = [Fault("POST .*/commit/", "status", 500)]
    with pytest.raises(HubError, match="HTTP 500"):
        machine("mine").push(Block(), REPO, sleep=lambda seconds: None)
    hub.faults = [Fault("POST .*/commit/", "status", 412)]
    with pytest.raises(HubError, match="changed by others each of"):
        machine("mine").push(Block(), REPO, sleep=lambda seconds: None)


def test_a_damaged_record_is_not_overwritten_in_silence(hub: FakeHub, machine: Machines) -> None:
    mine = machine("mine")
    mine.tuned(Block())
    mine.push(Block(), REPO)
    path = mine.target(Block()).pipeline_hash
    repo = hub.repos[REPO]
    repo.commit({**repo.head.files, f"aitune/v1/pipelines/{path}.json": (b"{}", False)}, "oops")
    with pytest.raises(HubError, match="cannot be read, so it cannot be added to"):
        mine.push(Block(), REPO)
    assert len(mine.push(Block(), REPO, force=True).added) == 1
    assert record_of(hub, mine, Block()).engines()


def test_what_others_keep_in_the_repository_stays(hub: FakeHub, machine: Machines) -> None:
    card = b"---\nlicense: mit\ntags:\n- mine\n---\n\n# My own words\n"
    hub.add(REPO, {"README.md": card, "weights.bin": b"1"})
    machine("mine").tuned(Block())
    machine("mine").push(Block(), REPO)
    files = hub.repos[REPO].head.files
    text = files["README.md"][0].decode()
    assert files["weights.bin"] == (b"1", False)
    assert "# My own words" in text
    assert "license: mit" in text
    assert "- mine" in text
    machine("mine").with_options(level=2).tuned(Block(3))
    machine("mine").with_options(level=2).push(Block(3), REPO)
    both = hub.repos[REPO].head.files["README.md"][0].decode()
    assert both.count("## Tuned engines for Block") == 2
    assert both.count("# My own words") == 1
