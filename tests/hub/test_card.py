"""The model card of a repository with engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from sharing_kit import Block, Machine

from aitune_hf.hub.bundle import collect
from aitune_hf.hub.card import render_card
from aitune_hf.hub.record import PipelineRecord
from aitune_hf.tuning.results import Timing

Machines = Callable[[str], Machine]


@pytest.fixture
def record(machine: Machines, tmp_path: Path) -> PipelineRecord:
    record = collect(machine("mine").tuned(Block()), tmp_path / "copied").record
    tuned = record.tuned[0]
    structure, (verdict,) = next(iter(tuned.verdicts.items()))
    timing = Timing(eager_ms=2.0, engine_ms=1.0, speedup=2.0, low=1.9, high=2.1, sure=1.95, at_most=2.05, pairs=15)
    engine = verdict.engines[0]
    result = replace(engine.record.result, timing=timing, max_error=1.5e-6)
    timed = replace(engine, record=replace(engine.record, result=result))
    verdicts = {structure: (replace(verdict, engines=(timed,)),)}
    modules = {"unet.a": structure, "unet.b": structure}
    return replace(record, tuned=(replace(tuned, modules=modules, verdicts=verdicts),))


def metadata(card: str) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_it_says_what_there_is_how_fast_and_how_right(record: PipelineRecord) -> None:
    card = render_card(record, repo="me/tuned", base_model="org/base", license="apache-2.0")
    (row,) = [line for line in card.splitlines() if line.startswith("| `unet")]
    tag = record.tuned[0].environment.tag
    for cell in ("`unet.a` and 1 like it", "fake", f"`{tag}`", "2.00x [1.95, 2.05]", "1.5e-06", "fake 1"):
        assert cell in row
    assert f"torch {record.tuned[0].environment.torch}" in row
    assert metadata(card) == {
        "library_name": "aitune-hf",
        "base_model": "org/base",
        "license": "apache-2.0",
        "tags": ["aitune-hf", "inference-acceleration"],
    }
    assert 'trust="me/tuned@<40 hex digits of a commit>"' in card
    assert "$" not in card


def test_without_a_base_it_claims_none(record: PipelineRecord) -> None:
    card = render_card(record, repo="me/tuned", base_model=None, license=None)
    assert set(metadata(card)) == {"library_name", "tags"}


def test_the_words_and_metadata_of_others_stay(record: PipelineRecord) -> None:
    theirs = "---\nlicense: mit\nlibrary_name: diffusers\ntags:\n- mine\nwidget:\n- text: x\n---\n\n# Mine\n\nWords.\n"
    card = render_card(record, repo="me/tuned", base_model="org/base", license="apache-2.0", existing=theirs)
    assert card.index("Words.") < card.index("## Tuned engines for Block")
    found = metadata(card)
    assert (found["license"], found["library_name"], found["widget"]) == ("mit", "diffusers", [{"text": "x"}])
    assert found["tags"] == ["mine", "aitune-hf", "inference-acceleration"]
    edited = card.replace("Words.", "Other words.") + "\nAnd a last word.\n"
    again = render_card(record, repo="me/tuned", base_model="org/base", license=None, existing=edited)
    assert again.count("## Tuned engines for Block") == 1
    assert "Other words." in again
    assert "And a last word." in again


def test_rendering_again_changes_nothing(record: PipelineRecord) -> None:
    card = render_card(record, repo="me/tuned", base_model="org/base", license="mit")
    assert render_card(record, repo="me/tuned", base_model="org/base", license="mit", existing=card) == card


def test_names_cannot_break_out_of_the_table(record: PipelineRecord) -> None:
    tuned = record.tuned[0]
    structure = next(iter(tuned.verdicts))
    odd = replace(record, tuned=(replace(tuned, modules={"a|b\n## c": structure}),))
    card = render_card(odd, repo="me/tuned", base_model=None, license=None)
    assert "\n## c" not in card
    assert "`a\\|b ## c`" in card
