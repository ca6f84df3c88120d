"""The model card of a repository with tuned engines: what is in it, how fast and how right, how to use and trust it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

from aitune_hf.hub.record import PipelineRecord, SharedEngine, TunedIn

__all__ = ["CARD_PATH", "render_card"]

CARD_PATH = "README.md"
_TEMPLATE_NAME = "tuned_engines.md"
_COLUMNS = ("module", "backend", "environment", "speed-up", "max error", "size", "weights", "versions")


def render_card(
    record: PipelineRecord, *, repo: str, base_model: str | None, license: str | None, existing: str | None = None
) -> str:
    """The card's text.

    The part for this pipeline structure is new; everything else in ``existing``, its metadata included, stays.
    """
    before, section = _template_parts()
    start, end = _markers(record)
    values = {
        "pipeline": record.pipeline,
        "base": f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "a local model",
        "load_name": f'"{base_model}"' if base_model else '"path-of-the-pipeline"',
        "repo": repo,
        "table": _table(record),
        "pipeline_hash": record.pipeline_hash,
        "title": f"Tuned engines for {base_model or record.pipeline}",
        "section_start": start,
        "section_end": end,
    }
    section = Template(section).substitute(values).strip()
    if existing is None or not existing.strip():
        text = Template(before).substitute(values).strip() + f"\n\n{section}\n"
    elif start in existing and end in existing.partition(start)[2]:
        head, _, rest = existing.partition(start)
        text = f"{head}{section}{rest.partition(end)[2]}"
    else:
        text = f"{existing.rstrip()}\n\n{section}\n"
    return _with_metadata(text, base_model=base_model, license=license)


def _template_parts() -> tuple[str, str]:
    here = Path(__file__)
    # Beside this file in an installed package, in the project's folder of cards in a checkout.
    places = (here.with_name(_TEMPLATE_NAME), here.parents[2] / "model_cards" / _TEMPLATE_NAME)
    text = next(place for place in places if place.is_file()).read_text(encoding="utf-8")
    before, mark, section = text.partition("$section_start")
    return before.partition("---\n\n")[2], mark + section


def _markers(record: PipelineRecord) -> tuple[str, str]:
    name = f"aitune-hf {record.pipeline_hash[:16]}"
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def _with_metadata(text: str, *, base_model: str | None, license: str | None) -> str:
    from huggingface_hub import ModelCard

    if not text.startswith("---"):
        text = f"---\nlibrary_name: aitune-hf\n---\n\n{text}"
    card = ModelCard(text, ignore_metadata_errors=True)
    data: Any = card.data
    data.library_name = data.library_name or "aitune-hf"
    data.base_model = data.base_model or base_model
    data.license = data.license or license
    data.tags = list(dict.fromkeys([*(data.tags or []), "aitune-hf", "inference-acceleration"]))
    return str(card)


def _table(record: PipelineRecord) -> str:
    rows = sorted({row for tuned in record.tuned for row in _rows(tuned)})
    lines = [_COLUMNS, tuple("---" for _ in _COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _rows(tuned: TunedIn) -> Iterator[tuple[str, ...]]:
    for structure, verdicts in tuned.verdicts.items():
        paths = sorted(path for path, found in tuned.modules.items() if found == structure)
        if not paths:
            continue
        name = f"`{_cell(paths[0] or 'the model')}`" + (f" and {len(paths) - 1} like it" if len(paths) > 1 else "")
        for verdict in verdicts:
            for engine in verdict.engines:
                yield (name, *_engine_cells(engine, tuned))


def _engine_cells(engine: SharedEngine, tuned: TunedIn) -> tuple[str, ...]:
    key, result = engine.key, engine.record.result
    timing = result.timing
    return (
        key.backend,
        f"`{key.environment.tag}`" + (" (data)" if key.environment.is_data else ""),
        f"{timing.speedup:.2f}x [{timing.sure:.2f}, {timing.at_most:.2f}]" if timing else "not timed",
        f"{result.max_error:.1e}" if result.max_error is not None else "-",
        f"{engine.size / 1e6:.2f} MB",
        "its own" if key.weights_digest else "the pipeline's",
        _cell(f"torch {tuned.environment.torch}, {key.backend} {key.backend_version}"),
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
