"""The record of a pipeline: merged without loss, the same bytes whatever the order, and read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sharing_kit import Block, Machine, Many, elsewhere

from aitune_hf.cache import UnknownSchemaError
from aitune_hf.cache.sealed import seal
from aitune_hf.errors import CorruptEntryError
from aitune_hf.hub.bundle import collect
from aitune_hf.hub.record import PipelineRecord

Machines = Callable[[str], Machine]


def records(machine: Machines, tmp_path: Path, count: int) -> list[PipelineRecord]:
    found = []
    for number in range(count):
        one = machine(f"m{number}").with_options(level=number)
        target = one.tuned(Block())
        found.append(collect(target, tmp_path / f"copied{number}").record)
    return found


def test_merging_is_the_same_in_any_order(machine: Machines, tmp_path: Path) -> None:
    first, second, third = records(machine, tmp_path, 3)
    one = first.merged(second).merged(third)
    other = third.merged(first.merged(second)).merged(second)
    assert len(one.engines()) == 3
    assert one.to_bytes() == other.to_bytes()
    assert PipelineRecord.from_bytes(one.pipeline_hash, one.to_bytes()).to_bytes() == one.to_bytes()
    assert one.merged(one).to_bytes() == one.to_bytes()


def test_environments_stay_apart(machine: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for level in ("avx512", "avx2"):
        elsewhere(monkeypatch, cpu_isa=level)
        found.append(collect(machine(level).tuned(Block()), tmp_path / f"copied {level}").record)
    both = found[0].merged(found[1])
    assert sorted(str(tuned.environment.cpu_isa) for tuned in both.tuned) == ["avx2", "avx512"]
    assert len(both.engines()) == 2


def test_an_engine_that_is_there_keeps_its_digests(machine: Machines, tmp_path: Path) -> None:
    (mine,) = records(machine, tmp_path, 1)
    key, engine = next(iter(mine.engines().items()))
    changed = replace(engine, files={name: replace(one, sha256="0" * 64) for name, one in engine.files.items()})
    tuned = mine.tuned[0]
    structure, verdicts = next(iter(tuned.verdicts.items()))
    theirs = replace(mine, tuned=(replace(tuned, verdicts={structure: (replace(verdicts[0], engines=(changed,)),)}),))
    assert mine.merged(theirs).engines()[key].files == engine.files
    assert theirs.merged(mine).engines()[key].files == changed.files


def spoil(record: PipelineRecord, change: Callable[[dict[str, Any]], None]) -> bytes:
    body = json.loads(record.to_bytes())["body"]
    change(body)
    return seal(f"pipelines/{record.pipeline_hash}.json", body)


def verdict_in(body: dict[str, Any]) -> dict[str, Any]:
    verdict: dict[str, Any] = next(iter(body["tuned"][0]["verdicts"].values()))[0]
    return verdict


def engine_in(body: dict[str, Any]) -> dict[str, Any]:
    engine: dict[str, Any] = verdict_in(body)["engines"][0]
    return engine


def other_graph(engine: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in engine.items() if name != "files"}
    return {**plain, "key": {**engine["key"], "graph_key": "0" * 32}}


TIMING = {
    **dict.fromkeys(("eager_ms", "engine_ms", "speedup", "low", "high", "sure", "at_most", "slowest_ms"), 1.0),
    "pairs": 3,
}


def test_a_result_with_times_is_read(machine: Machines, tmp_path: Path) -> None:
    """The parts that the refusals below spoil are right by themselves."""
    (record,) = records(machine, tmp_path, 1)

    def change(body: dict[str, Any]) -> None:
        batch = {"batch_size": 1, "timing": TIMING, "answers": "engine"}
        engine_in(body)["result"].update(timing=TIMING, batches=[batch])
        engine_in(body).update(eager_at=[[0, 0, 1]], admitted={"metric": "psnr", "value": 40.5, "weights": "0" * 64})

    read = PipelineRecord.from_bytes(record.pipeline_hash, spoil(record, change))
    assert next(iter(read.engines().values())).speedup == 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(extra=1),
        lambda body: body.pop("tuned"),
        lambda body: body.update(tuned=5),
        lambda body: body.update(tuned=[{}]),
        lambda body: body.update(pipeline_hash="0" * 64),
        lambda body: body["roots"].update({"": "not a hash"}),
        lambda body: body["tuned"][0].update(environment={}),
        lambda body: body["tuned"][0]["modules"].update({"": 7}),
        lambda body: body["tuned"][0].update(verdicts={"0" * 64: next(iter(body["tuned"][0]["verdicts"].values()))}),
        lambda body: engine_in(body).pop("key"),
        lambda body: engine_in(body).update(envelope={"inputs": "x"}),
        lambda body: engine_in(body)["key"].update(hierarchy_hash="0" * 64),
        lambda body: engine_in(body)["key"].update(graph_key="0" * 32),
        lambda body: engine_in(body).update(files={}),
        lambda body: engine_in(body)["result"].update(max_error="large"),
        lambda body: engine_in(body)["result"].update(backend=["x"]),
        lambda body: engine_in(body)["result"].update(timing={"speedup": "2"}),
        lambda body: engine_in(body)["result"].update(timing={**TIMING, "speedup": True}),
        lambda body: engine_in(body)["result"].update(timing={**TIMING, "engine_ms": -1.0}),
        lambda body: engine_in(body)["result"].update(timing={**TIMING, "pairs": 1.5}),
        lambda body: engine_in(body)["result"].update(timing={**TIMING, "slowest_ms": 10**400}),
        lambda body: engine_in(body)["result"].update(
            batches=[{"batch_size": "1", "timing": TIMING, "answers": "engine"}]
        ),
        lambda body: engine_in(body)["result"].update(batches=[{"batch_size": 1, "timing": TIMING, "answers": "me"}]),
        lambda body: engine_in(body)["result"].update(
            batches=[{"batch_size": 1, "timing": {**TIMING, "low": "x"}, "answers": "engine"}]
        ),
        lambda body: engine_in(body)["result"].update(batches=[{"batch_size": 1, "answers": "engine"}]),
        lambda body: engine_in(body)["result"].update(weights=["bound"]),
        lambda body: engine_in(body)["result"].update(structural=1),
        lambda body: engine_in(body)["result"].update(build_s="long"),
        lambda body: engine_in(body)["result"].update(artifact_bytes=-1),
        lambda body: engine_in(body)["result"].update(similarity=9),
        lambda body: engine_in(body)["result"].update(options=[1]),
        lambda body: engine_in(body)["result"].update(source=5),
        lambda body: engine_in(body)["result"].update(reason="a\x1b[31mred"),
        lambda body: engine_in(body)["result"].update(unknown=1),
        lambda body: engine_in(body).update(eager_at=[[0, 0, 1e308]]),
        lambda body: engine_in(body).update(eager_at=[[0, 0, -1]]),
        lambda body: engine_in(body).update(admitted=["x"]),
        lambda body: engine_in(body).update(admitted={"value": None}),
        lambda body: body["tuned"][0]["modules"].update({"unet\nWARNING all is well": "0" * 64}),
        lambda body: body["tuned"][0]["verdicts"].update({"\x1b[2J": []}),
        lambda body: body["roots"].update({"a\rb": "0" * 64}),
        lambda body: body.update(pipeline="Block\x1b]0;owned\x07"),
        lambda body: engine_in(body).update(fallback=other_graph(engine_in(body))),
        lambda body: verdict_in(body).update(lost=[{"shapes": 3, "reason": ""}]),
        lambda body: verdict_in(body).update(lost=[{"shapes": [[["4"]]], "reason": ""}]),
        lambda body: verdict_in(body).update(lost=[{}]),
        lambda body: verdict_in(body)["graph"].pop("input_spec"),
        lambda body: engine_in(body)["files"].update({"../../evil": {"sha256": "0" * 64, "size": 1}}),
        lambda body: engine_in(body)["files"].update({"/etc/passwd": {"sha256": "0" * 64, "size": 1}}),
        lambda body: engine_in(body)["files"].update({"big": {"sha256": "0" * 64, "size": 2**52}}),
        lambda body: engine_in(body)["files"].update({"bad": {"sha256": "zz", "size": 1}}),
    ],
)
def test_a_record_that_says_something_else_is_refused(
    machine: Machines, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    (record,) = records(machine, tmp_path, 1)
    with pytest.raises(CorruptEntryError):
        PipelineRecord.from_bytes(record.pipeline_hash, spoil(record, change))


def test_a_record_of_a_later_version_is_told_apart(machine: Machines, tmp_path: Path) -> None:
    (record,) = records(machine, tmp_path, 1)
    with pytest.raises(UnknownSchemaError, match="upgrade aitune-hf"):
        PipelineRecord.from_bytes(record.pipeline_hash, spoil(record, lambda body: body.update(schema=3)))


def test_one_flipped_byte_is_noticed(machine: Machines, tmp_path: Path) -> None:
    (record,) = records(machine, tmp_path, 1)
    data = record.to_bytes()
    for place in range(0, len(data), 97):
        wrong = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(CorruptEntryError):
            PipelineRecord.from_bytes(record.pipeline_hash, wrong)


def test_structures_alike_are_listed_once(machine: Machines, tmp_path: Path) -> None:
    target = machine("mine").stock(Many(5))
    record = collect(target, tmp_path / "copied").record
    assert len(record.tuned[0].modules) == 5
    assert len(record.engines()) == 5
    assert "/tmp" not in record.to_bytes().decode()
