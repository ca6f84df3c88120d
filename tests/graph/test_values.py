"""Plain values: exact as JSON, and equal only to themselves."""

from __future__ import annotations

import enum
import itertools
import json
from typing import Any

import pytest
import torch
from graph_strategies import Access, Level, Mode, values
from hypothesis import given

from aitune_hf.graph.values import EnumName, decode_value, encode_value, is_value, same_value

DISTINCT = [
    *(None, False, True, 0, 1, 0.0, -0.0, 1.0, 0j, complex(0.0, -0.0), complex(-0.0, 0.0), 1 + 0j, "", "1", "None"),
    *(b"", b"1", ..., float("nan"), float("inf"), float("-inf"), 2**64, 2**64 + 1, torch.float32, torch.float64),
    *(torch.strided, torch.channels_last, torch.device("cpu"), torch.device("cuda"), torch.Size([]), torch.Size([1])),
    *(slice(None), slice(0), slice(0.0), slice(-0.0), slice(0, None), range(0), range(1), range(0, 2, 2)),
    *(Mode.FAST, Mode.EXACT, Level.LOW, Access(0), Access.READ, Access.READ | Access.WRITE),
]


class Kept(enum.IntFlag):
    A = 1


@given(value=values)
def test_a_value_survives_json(value: Any) -> None:
    data = json.loads(json.dumps(encode_value(value), allow_nan=False))
    assert same_value(decode_value(data), value)
    assert encode_value(decode_value(data)) == data


def test_values_of_other_type_or_sign_are_not_the_same() -> None:
    assert [(a, b) for a, b in itertools.permutations(DISTINCT, 2) if same_value(a, b)] == []


@pytest.mark.parametrize("value", DISTINCT)
def test_a_value_is_the_same_as_itself(value: Any) -> None:
    assert same_value(value, decode_value(encode_value(value)))


def test_flags_without_a_name_are_told_apart() -> None:
    unnamed = [Kept(0), Kept(8), Kept(4), Kept(12)]
    assert len({json.dumps(encode_value(flag)) for flag in unnamed}) == len(unnamed)


def test_an_enum_read_from_a_file_equals_its_member_only() -> None:
    read = decode_value(encode_value(Mode.FAST))
    assert isinstance(read, EnumName)
    assert read == Mode.FAST
    assert read != Mode.EXACT
    assert read != 1
    assert hash(read) == hash(decode_value(encode_value(Mode.FAST)))
    assert "FAST" in repr(read)


def test_a_slice_of_enums_survives_json_twice() -> None:
    once = encode_value(slice(Mode.FAST, None))
    assert encode_value(decode_value(once)) == once


@pytest.mark.parametrize("thing", [object(), [1], (1,), {}, torch.zeros(1), slice(torch.zeros(1)), slice([])])
def test_other_objects_are_not_values(thing: Any) -> None:
    assert not is_value(thing)
    with pytest.raises(TypeError, match="plain value"):
        encode_value(thing)


def test_a_subclass_of_a_plain_type_is_not_a_value() -> None:
    class Loud(str):
        pass

    assert not is_value(Loud("x"))


def test_a_device_loses_its_index() -> None:
    assert decode_value(encode_value(torch.device("cuda", 1))) == torch.device("cuda")


@pytest.mark.parametrize(
    "data",
    [
        {"t": "spell", "v": 1},
        {"t": "dtype", "v": "save"},
        {"t": "dtype", "v": "strided"},
        {"t": "layout", "v": "nothing_here"},
    ],
)
def test_a_name_that_is_not_what_it_says_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown value type|torch has no"):
        decode_value(data)
