"""Whether what a stranger's record says of an engine can be: types, bounds, and texts that may be printed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from aitune_hf.errors import CorruptEntryError
from aitune_hf.tuning.results import CandidateResult, Timing
from aitune_hf.tuning.verdict import EngineRecord

__all__ = ["check_lost", "check_record", "check_text", "printable"]

_MAX_TEXT = 2000
_MAX_NUMBER = 1e15
_MAX_WHOLE = 2**53
_MAX_SIZE = 2**40
_MAX_ITEMS = 256
_WEIGHTS = frozenset({"bound", "filled", "baked"})
_ANSWERS = frozenset({"engine", "eager"})
_TIMES = ("eager_ms", "engine_ms", "speedup", "low", "high", "sure", "at_most", "slowest_ms")


def printable(text: str) -> str:
    """The text as :func:`check_text` takes it."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_MAX_TEXT]


def check_text(value: object, what: str) -> None:
    """Raise ``CorruptEntryError`` unless this is a short text without control characters: it may be printed."""
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise CorruptEntryError(f"{what}: expected a text of at most {_MAX_TEXT} printable characters")


def check_record(record: EngineRecord) -> None:
    """Raise ``CorruptEntryError`` unless what it says beside key and envelope can be compared, added up and printed."""
    _check_result(record.result)
    if len(record.eager_at) > _MAX_ITEMS:
        raise CorruptEntryError(f"eager_at: at most {_MAX_ITEMS} places")
    for place in record.eager_at:
        for number in place:
            _check_whole(number, "eager_at", most=_MAX_SIZE)
    if record.admitted is None:
        return
    if not isinstance(record.admitted, Mapping):
        raise CorruptEntryError("admitted: expected an object")
    for name, value in record.admitted.items():
        check_text(name, "admitted")
        if isinstance(value, str):
            check_text(value, "admitted")
        else:
            _check_number(value, "admitted", least=-_MAX_NUMBER)


def check_lost(item: object) -> dict[str, Any]:
    """Shape combinations for which eager stays: per combination and input, the sizes."""
    if not isinstance(item, dict):
        raise CorruptEntryError("lost: expected objects")
    check_text(item["reason"], "reason")
    for combination in _listed(item["shapes"], "shapes"):
        for shape in _listed(combination, "shapes"):
            for size in _listed(shape, "shapes"):
                _check_whole(size, "shapes", most=_MAX_SIZE)
    return item


def _check_result(result: CandidateResult) -> None:
    for name in ("backend", "outcome", "reason", "engine", "source"):
        check_text(getattr(result, name), name)
    if result.weights not in _WEIGHTS:
        raise CorruptEntryError(f"weights: expected one of {', '.join(sorted(_WEIGHTS))}")
    for name in ("lossy", "structural"):
        if not isinstance(getattr(result, name), bool):
            raise CorruptEntryError(f"{name}: expected true or false")
    if not isinstance(result.options, Mapping):
        raise CorruptEntryError("options: expected an object")
    for name in ("build_s", "load_s"):
        _check_number(getattr(result, name), name)
    if result.max_error is not None:
        _check_number(result.max_error, "max_error")
    if result.similarity is not None:
        _check_number(result.similarity, "similarity", least=-2, most=2)
    _check_whole(result.artifact_bytes, "artifact_bytes")
    if result.timing is not None:
        _check_timing(result.timing)
    if len(result.batches) > _MAX_ITEMS:
        raise CorruptEntryError(f"batches: at most {_MAX_ITEMS} sizes")
    for batch in result.batches:
        _check_whole(batch.batch_size, "batch_size", most=_MAX_SIZE)
        if batch.answers not in _ANSWERS:
            raise CorruptEntryError(f"answers: expected one of {', '.join(sorted(_ANSWERS))}")
        _check_timing(batch.timing)


def _check_timing(timing: Timing) -> None:
    for name in _TIMES:
        _check_number(getattr(timing, name), name)
    _check_whole(timing.pairs, "pairs")


def _check_number(value: object, name: str, *, least: float = 0, most: float = _MAX_NUMBER) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type, operator]
        raise CorruptEntryError(f"{name}: expected a number from {least:g} to {most:g}")


def _check_whole(value: object, name: str, *, most: int = _MAX_WHOLE) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise CorruptEntryError(f"{name}: expected a whole number from 0 to {most}")


def _listed(value: object, name: str) -> Iterable[object]:
    if not isinstance(value, list):
        raise CorruptEntryError(f"{name}: expected lists of whole numbers")
    return value
