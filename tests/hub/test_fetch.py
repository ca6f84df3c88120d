"""What is fetched, in which order, and what is refused before it is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace

import pytest
from hub_server import FakeHub
from sharing_kit import Machine, Many

from aitune_hf.cache import FileDigest
from aitune_hf.cache.layout import Layout
from aitune_hf.hub.record import PipelineRecord

REPO = "me/tuned"
Machines = Callable[[str], Machine]
Files = dict[str, FileDigest]


@pytest.fixture
def lie(hub: FakeHub, machine: Machines) -> Callable[[Callable[[Files], Files]], None]:
    """A repository with an engine, whose record says something else of its files."""
    machine("mine").stock(Many(1), data=bytes(100_000))
    machine("mine").push(Many(1), REPO)
    repo = hub.repos[REPO]

    def rewrite(change: Callable[[Files], Files]) -> None:
        pipeline = machine("mine").target(Many(1)).pipeline_hash
        path = f"aitune/v1/pipelines/{pipeline}.json"
        record = PipelineRecord.from_bytes(pipeline, repo.head.files[path][0])
        (engine,) = record.engines().values()
        new = record.with_files({engine.key: change(dict(engine.files))})
        repo.commit({**repo.head.files, path: (new.to_bytes(), False)}, "a lie")

    return rewrite


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("model.bin", 9 * 2**30, "model.bin has 9663676416 bytes; at most"),
        ("manifest.json", 9 * 2**20, "manifest.json has 9437184 bytes; at most"),
        ("manifest.json.sig", 65, "manifest.json.sig has 65 bytes; at most 64"),
        ("manifest.json.sig", 5, "is no signature: those have 64 bytes"),
    ],
)
def test_sizes_beyond_all_bounds_are_refused_unseen(
    hub: FakeHub, machine: Machines, lie: Callable[[Callable[[Files], Files]], None], name: str, size: int, said: str
) -> None:
    lie(lambda files: {**files, name: FileDigest(sha256="0" * 64, size=size)})
    with hub.counted() as requests:
        result = machine("theirs").pull(Many(1), REPO)
    assert said in result.misses["parts.0"]
    assert len(requests) == 1


def test_many_files_that_are_too_large_together_are_refused_unseen(
    hub: FakeHub, machine: Machines, lie: Callable[[Callable[[Files], Files]], None]
) -> None:
    one = FileDigest(sha256="0" * 64, size=8 * 2**30)
    lie(lambda files: {**files, "a.bin": one, "b.bin": one, "c.bin": one})
    with hub.counted() as requests:
        result = machine("theirs").pull(Many(1), REPO)
    assert "its files have" in result.misses["parts.0"]
    assert len(requests) == 1


@pytest.mark.parametrize("kind", ["more", "fewer", "other"])
def test_the_rest_is_fetched_only_if_record_and_manifest_agree(
    hub: FakeHub, machine: Machines, lie: Callable[[Callable[[Files], Files]], None], kind: str
) -> None:
    changes: dict[str, Callable[[Files], Files]] = {
        "more": lambda files: {**files, "extra.bin": FileDigest(sha256="0" * 64, size=1)},
        "fewer": lambda files: {name: one for name, one in files.items() if name == "manifest.json"},
        "other": lambda files: {**files, "model.bin": replace(files["model.bin"], size=7)},
    }
    lie(changes[kind])
    with hub.counted() as requests:
        result = machine("theirs").pull(Many(1), REPO)
    assert "lists other files than the record" in result.misses["parts.0"]
    assert [each.path.rpartition("/")[2] for each in requests[1:]] == ["manifest.json"]


def test_engines_are_fetched_onto_the_disk_of_the_cache(
    hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("mine").stock(Many(2))
    machine("mine").push(Many(2), REPO)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    theirs = machine("theirs")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryDirectory", refuse)
        result = theirs.pull(Many(2), REPO)
    assert [outcome.answer for outcome in result.modules] == ["hit", "hit"], result.summary()
    assert list(Layout(root=theirs.cache).temporaries()) == []


def test_a_cache_that_takes_no_files_still_gives_engines(hub: FakeHub, machine: Machines, tmp_path: object) -> None:
    machine("mine").stock(Many(1))
    machine("mine").push(Many(1), REPO)
    theirs = machine("theirs")
    theirs.cache.write_bytes(b"a file where the folder should be")
    result = theirs.pull(Many(1), REPO)
    assert [outcome.answer for outcome in result.modules] == ["hit"], result.summary()
