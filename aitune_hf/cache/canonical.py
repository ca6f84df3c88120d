"""JSON with exactly one spelling: what the cache hashes, writes and accepts.

``canonical_json`` gives equal values equal bytes; ``parse_json`` takes bytes that somebody else may have
written and refuses everything that two parsers could read differently.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import NoReturn

from aitune_hf.errors import CacheError, CorruptEntryError

__all__ = ["MAX_DEPTH", "MAX_JSON_BYTES", "MAX_NODES", "canonical_json", "parse_json"]

MAX_JSON_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_NODES = 1_000_000
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"?')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile("[\ud800-\udfff]")


def canonical_json(obj: object) -> bytes:
    """``obj`` as UTF-8 JSON: sorted keys, no spaces, no NaN or infinity; tuples become lists.

    Raises ``CacheError`` for anything JSON cannot say, a mapping with keys other than strings included.
    """
    plain = _plain(obj, depth=0)
    try:
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except ValueError as error:  # NaN, infinity, or half of a surrogate pair
        raise CacheError(f"this value has no JSON form: {error}") from error


def parse_json(
    data: bytes, *, max_bytes: int = MAX_JSON_BYTES, max_depth: int = MAX_DEPTH, max_nodes: int = MAX_NODES
) -> object:
    """The value of a JSON document of unknown origin.

    Raises ``CorruptEntryError`` for a document that is too large, is too deep or has too many values (a key counts as
    one), is not UTF-8, repeats a key within an object, or holds a number that is not finite.
    """
    if len(data) > max_bytes:
        raise CorruptEntryError(f"JSON document of {len(data)} bytes; at most {max_bytes} are accepted")
    _check_structure(data, max_depth, max_nodes)
    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except RecursionError:
        raise CorruptEntryError(f"JSON document nested deeper than {max_depth} levels") from None
    except ValueError as error:
        raise CorruptEntryError(f"not a JSON document: {error}") from error
    _check_values(value, max_depth)
    return value


def _plain(obj: object, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise CacheError(f"this value is nested deeper than {MAX_DEPTH} levels, or contains itself")
    if obj is None or isinstance(obj, (bool, int, float, str)):
        return obj
    if isinstance(obj, Mapping):
        for key in obj:
            if not isinstance(key, str):
                raise CacheError(f"JSON keys are strings; got {key!r} of type {type(key).__name__}")
        return {key: _plain(value, depth + 1) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_plain(value, depth + 1) for value in obj]
    raise CacheError(f"{type(obj).__name__} has no JSON form; use None, bool, int, float, str, lists and mappings")


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated[:80]!r} appears twice in one object")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _check_structure(data: bytes, max_depth: int, max_nodes: int) -> None:
    """Bound what the parser will build before it does: short text can stand for many objects, or for a deep stack."""
    structure = _STRING.sub(b"", _ESCAPE.sub(b"", data) if b"\\" in data else data)
    nodes = 1 + sum(structure.count(mark) for mark in (b",", b":", b"[", b"{"))
    if nodes > max_nodes:
        raise CorruptEntryError(f"JSON document with more than {max_nodes} values")
    depth = 0
    for bracket in structure.translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth < 0:
            raise CorruptEntryError("not a JSON document: a bracket is closed that was not opened")
        if depth > max_depth + 1:
            raise CorruptEntryError(f"JSON document nested deeper than {max_depth} levels")


def _check_values(value: object, max_depth: int) -> None:
    level: list[object] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth + 1:
            raise CorruptEntryError(f"JSON document nested deeper than {max_depth} levels")
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item)
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, str) and not item.isascii() and _SURROGATE.search(item):
                raise CorruptEntryError("JSON document with half of a surrogate pair, which no encoding can write")
        level = inner
