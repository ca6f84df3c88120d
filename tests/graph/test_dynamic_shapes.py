"""What a user says about sizes: checked at once, exact as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aitune_hf.errors import ConfigError
from aitune_hf.graph.dynamic_shapes import BatchDim, DynamicDim, DynamicShapes
from aitune_hf.graph.locator import Locator


@st.composite
def dims(draw: st.DrawFn) -> DynamicDim:
    step = draw(st.integers(1, 4))
    low, opt, high = sorted(draw(st.tuples(*[st.integers(1, 9)] * 3)))
    sizes: dict[str, Any] = {"min": low * step, "max": high * step, "multiple_of": step}
    if draw(st.booleans()):
        sizes["opt"] = opt * step
    return BatchDim(**sizes) if draw(st.booleans()) else DynamicDim(draw(st.text(min_size=1, max_size=5)), **sizes)


shapes = st.dictionaries(st.text(max_size=5), st.dictionaries(st.integers(-4, 4), dims(), max_size=3), max_size=3).map(
    DynamicShapes
)


@given(declared=shapes)
def test_shapes_survive_json(declared: DynamicShapes) -> None:
    again = DynamicShapes.from_dict(json.loads(json.dumps(declared.to_dict())))
    assert again == declared
    assert [type(dim) for axes in again.values() for dim in axes.values()] == [
        type(declared[name][axis]) for name, axes in again.items() for axis in axes
    ]


@pytest.mark.parametrize(
    "sizes",
    [
        {"min": 0, "max": 4},
        {"min": 5, "max": 4},
        {"min": 1, "max": 4, "opt": 5},
        {"min": 2, "max": 4, "opt": 1},
        {"min": 1, "max": 4, "multiple_of": 0},
        {"min": 2, "max": 5, "multiple_of": 2},
        {"min": 2, "max": 6, "opt": 3, "multiple_of": 2},
        {"min": 1.0, "max": 4},
        {"min": True, "max": 4},
        {"min": "1", "max": 4},
    ],
)
def test_bounds_that_make_no_sense_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="height"):
        DynamicDim("height", **sizes)


def test_a_dimension_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="dynamic dimension"):
        DynamicDim("", min=1, max=2)


def test_the_largest_size_is_the_optimum_unless_said_otherwise() -> None:
    assert DynamicDim("h", min=1, max=8).optimum == 8
    assert DynamicDim("h", min=1, max=8, opt=4).optimum == 4


def test_definitions_are_found_by_the_readable_place() -> None:
    axes = {0: BatchDim(max=4)}
    declared = DynamicShapes({"x": axes, "cond.text": axes, "res[1]": axes})
    assert declared.definition(Locator(("x",))) is axes
    assert declared.definition(Locator(("cond", "text"))) is axes
    assert declared.definition(Locator(("res", 1))) is axes
    assert declared.definition(Locator(("y",))) is None
