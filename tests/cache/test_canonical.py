from __future__ import annotations

import math
from collections import OrderedDict
from types import MappingProxyType

import pytest

from aitune_hf.cache.canonical import canonical_json, parse_json
from aitune_hf.cache.sealed import seal, unseal
from aitune_hf.errors import CacheError, CorruptEntryError


def test_equal_values_have_equal_bytes() -> None:
    assert canonical_json({"b": (1, 2), "a": "é"}) == '{"a":"é","b":[1,2]}'.encode()
    assert canonical_json(OrderedDict(a=1)) == canonical_json(MappingProxyType({"a": 1})) == b'{"a":1}'


@pytest.mark.parametrize("value", [math.nan, math.inf, {1: 2}, {"a": {3}}, b"bytes", object(), "\ud800"])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(CacheError):
        canonical_json({"value": value})


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CacheError, match="contains itself"):
        canonical_json(loop)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (b"", "not a JSON"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"x":{"b":1,"b":1}}', "twice"),
        (b'{"a":NaN}', "not JSON"),
        (b'{"a":-Infinity}', "not JSON"),
        (b'{"a":1e999}', "out of range"),
        (b'{"a":"\xff"}', "not a JSON"),
        (b'\xef\xbb\xbf{"a":1}', "not a JSON"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"\\udfff":1}', "surrogate"),
        (b'{"a":1} trailing', "not a JSON"),
        (b"[" * 100_000, "deeper|not a JSON"),
        (b"[" * 80 + b"]" * 80, "deeper"),
        (b'{"a":' * 80 + b"1" + b"}" * 80, "deeper"),
        (b'{"a":' + b"9" * 5000 + b"}", "not a JSON"),
        (b'"' + b"x" * (8 * 1024 * 1024) + b'"', "at most"),
    ],
)
def test_hostile_json_is_refused(attack: bytes, reason: str) -> None:
    with pytest.raises(CorruptEntryError, match=reason):
        parse_json(attack)


def test_a_sealed_document_opens_under_its_own_name_only() -> None:
    data = seal("pipelines/a.json", {"x": [1, 2.5, None], "y": {"digest": "é"}})
    assert unseal("pipelines/a.json", data) == {"x": [1, 2.5, None], "y": {"digest": "é"}}
    with pytest.raises(CorruptEntryError, match="another document"):
        unseal("pipelines/b.json", data)


def test_no_single_flipped_bit_and_no_cut_unseals() -> None:
    data = seal("r.json", {"seconds": 12.5, "winner": "inductor"})
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(CorruptEntryError):
                unseal("r.json", bytes(flipped))
        with pytest.raises(CorruptEntryError):
            unseal("r.json", data[:position])


def test_too_large_a_document_is_not_written() -> None:
    with pytest.raises(CacheError, match="at most"):
        seal("r.json", {"text": "x" * (8 * 1024 * 1024)})


@pytest.mark.parametrize(
    "attack",
    [
        b"[" + b"[]," * 400 + b"[]]",
        b"[" + b"1," * 1000 + b"1]",
        b'{"a":{' + b",".join(b'"%d":0' % number for number in range(400)) + b"}}",
    ],
)
def test_many_values_in_little_text_are_refused(attack: bytes) -> None:
    with pytest.raises(CorruptEntryError, match="more than 800 values"):
        parse_json(attack, max_nodes=800)


def test_values_are_counted_outside_of_strings() -> None:
    text = rb'["[[[[{{{{\"[[[[,,,,", "\\", {"]]\\\"]": "}}"}]'
    assert parse_json(text, max_depth=2, max_nodes=8) == ['[[[[{{{{"[[[[,,,,', "\\", {']]\\"]': "}}"}]


def test_depth_is_refused_before_the_parser_recurses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("the parser was asked"))
    for attack in (b"[" * 100, b'{"a":' * 100, b'"\\""' + b"[" * 100, b"]" * 100):
        with pytest.raises(CorruptEntryError, match=r"deeper|not a JSON"):
            parse_json(attack)
