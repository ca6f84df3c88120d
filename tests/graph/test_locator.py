"""Locators: readable, ordered, exact as JSON, and never into a leaf."""

from __future__ import annotations

import itertools
import json
from collections import namedtuple
from typing import Any

import pytest
import torch
from graph_strategies import keys
from hypothesis import given
from hypothesis import strategies as st

from aitune_hf.graph.locator import Locator

paths = st.lists(keys, max_size=4).map(tuple)


@given(path=paths)
def test_a_locator_survives_json(path: tuple[str | int, ...]) -> None:
    place = Locator(path)
    again = Locator.from_json(json.loads(json.dumps(place.to_json())))
    assert again == place
    assert list(map(type, again.path)) == list(map(type, path))


@given(a=paths, b=paths)
def test_two_locators_read_the_same_only_if_they_are(a: tuple[str | int, ...], b: tuple[str | int, ...]) -> None:
    assert (str(Locator(a)) == str(Locator(b))) is (a == b)


@given(places=st.lists(paths.map(Locator), max_size=5))
def test_order_is_total(places: list[Locator]) -> None:
    ordered = sorted(places)
    places.reverse()
    assert sorted(places) == ordered
    assert all(not b < a for a, b in itertools.pairwise(ordered))


@pytest.mark.parametrize(
    ("path", "text"),
    [((), "<root>"), (("x",), "x"), (("x", "y", 0), "x.y[0]"), (("a b",), "['a b']"), (("x", "0"), "x['0']")],
)
def test_it_reads_like_python(path: tuple[str | int, ...], text: str) -> None:
    assert str(Locator(path)) == text


def test_it_finds_a_leaf() -> None:
    point = namedtuple("point", ["keys", "y"])  # A field named like a method of mappings.
    tree = {"a": [1, (2, {"0": 3, 0: 4})], "p": point(5, 6)}
    assert Locator(("a", 1, 1, "0")).get(tree) == 3
    assert Locator(("a", 1, 1, 0)).get(tree) == 4
    assert Locator(("p", "keys")).get(tree) == 5
    assert Locator(("p", 1)).get(tree) == 6
    assert Locator().child("p").child("y").get(tree) == 6


@pytest.mark.parametrize(
    ("path", "tree"),
    [
        (("x",), {}),
        ((3,), [1]),
        (("x", 0), {"x": torch.ones(2)}),
        (("x", 0), {"x": "text"}),
        (("x", "shape"), {"x": torch.ones(2)}),
        (("x", "y"), {"x": None}),
    ],
)
def test_a_path_that_does_not_exist_is_a_lookup_error(path: tuple[str | int, ...], tree: Any) -> None:
    with pytest.raises(LookupError):
        Locator(path).get(tree)


def test_it_has_no_order_with_other_things() -> None:
    with pytest.raises(TypeError):
        _ = Locator() < 1
