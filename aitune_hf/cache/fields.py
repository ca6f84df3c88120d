"""Typed reading of parsed JSON: every wrong type is a ``CorruptEntryError`` that names the field."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from aitune_hf.errors import CorruptEntryError

__all__ = ["exact_fields", "object_field", "optional_text", "text_field", "text_list", "whole_number"]

_TEXT_LIMIT = 1024


def exact_fields(data: object, names: Collection[str], what: str) -> dict[str, object]:
    """``data`` as an object that has these fields and no other."""
    if not isinstance(data, dict):
        raise CorruptEntryError(f"{what}: expected an object, found {type(data).__name__}")
    missing, unknown = sorted(set(names) - set(data)), sorted(set(data) - set(names))
    if missing or unknown:
        raise CorruptEntryError(f"{what}: missing fields {missing}, unknown fields {unknown[:5]}")
    return data


def text_field(data: Mapping[str, object], name: str, pattern: str | None = None) -> str:
    """A string of at most 1024 characters which ``pattern``, if given, matches from end to end."""
    value = data[name]
    if not isinstance(value, str) or len(value) > _TEXT_LIMIT:
        raise CorruptEntryError(f"{name}: expected a string of at most {_TEXT_LIMIT} characters")
    if pattern is not None and not re.fullmatch(pattern, value):
        raise CorruptEntryError(f"{name}: {value[:80]!r} does not have the form {pattern}")
    return value


def optional_text(data: Mapping[str, object], name: str, pattern: str | None = None) -> str | None:
    """As ``text_field``, or None."""
    return None if data[name] is None else text_field(data, name, pattern)


def text_list(data: Mapping[str, object], name: str) -> tuple[str, ...]:
    """A list of strings."""
    value = data[name]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CorruptEntryError(f"{name}: expected a list of strings")
    return tuple(value)


def object_field(data: Mapping[str, object], name: str) -> dict[str, object]:
    """A JSON object."""
    value = data[name]
    if not isinstance(value, dict):
        raise CorruptEntryError(f"{name}: expected an object, found {type(value).__name__}")
    return value


def whole_number(data: Mapping[str, object], name: str) -> int:
    """An integer from 0 to 2**53 - 1."""
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise CorruptEntryError(f"{name}: expected a whole number from 0 to 2**53 - 1")
    return value
