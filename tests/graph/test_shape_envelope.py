"""Envelopes: which shapes fit, and a sentence where they do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope

BATCH, WIDTH = Extent(symbol="b"), Extent(symbol="w", scale=8, offset=1)
ENVELOPE = ShapeEnvelope(
    inputs=((Extent(symbol="b", scale=2), Extent(3), WIDTH), (BATCH,)), ranges={"b": (1, 4), "w": (2, 8)}
)

extents = st.one_of(
    st.builds(Extent, st.integers(0, 9)),
    st.builds(Extent, st.integers(-4, 4), st.sampled_from(["s0", "s1"]), st.integers(1, 8)),
)


@st.composite
def envelopes(draw: st.DrawFn) -> ShapeEnvelope:
    low = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    ranges = {f"s{i}": (low[i], low[i] + draw(st.integers(0, 5))) for i in range(2)}
    inputs = draw(st.lists(st.lists(extents, max_size=3).map(tuple), max_size=3).map(tuple))
    return ShapeEnvelope(inputs=inputs, ranges=ranges)


def shapes_at(envelope: ShapeEnvelope, values: dict[str, int]) -> list[tuple[int, ...]]:
    return [
        tuple(e.offset if e.symbol is None else e.scale * values[e.symbol] + e.offset for e in row)
        for row in envelope.inputs
    ]


@given(extent=extents)
def test_an_extent_survives_json(extent: Extent) -> None:
    assert Extent.from_json(json.loads(json.dumps(extent.to_json()))) == extent


def test_a_fixed_extent_is_a_number() -> None:
    assert Extent(7).to_json() == 7
    assert WIDTH.to_json() == ["w", 8, 1]


@given(envelope=envelopes())
def test_an_envelope_survives_json(envelope: ShapeEnvelope) -> None:
    assert ShapeEnvelope.from_dict(json.loads(json.dumps(envelope.to_dict()))) == envelope


@given(envelope=envelopes(), data=st.data())
def test_every_size_within_the_ranges_fits_and_none_beyond(envelope: ShapeEnvelope, data: st.DataObject) -> None:
    values = {symbol: data.draw(st.integers(low - 2, high + 2)) for symbol, (low, high) in envelope.ranges.items()}
    used = {e.symbol for row in envelope.inputs for e in row if e.symbol}
    inside = all(envelope.ranges[s][0] <= values[s] <= envelope.ranges[s][1] for s in used)
    problem = envelope.mismatch(shapes_at(envelope, values))
    assert (problem is None) is inside


@given(envelope=envelopes())
def test_corners_are_the_ends_and_fit(envelope: ShapeEnvelope) -> None:
    corners = envelope.corners()
    assert [envelope.mismatch(corner) for corner in corners] == [None, None]
    for end, corner in enumerate(corners):
        assert corner == shapes_at(envelope, {s: bounds[end] for s, bounds in envelope.ranges.items()})


def test_a_fixed_envelope_takes_one_combination() -> None:
    envelope = ShapeEnvelope.fixed([(2, 3), ()])
    assert envelope.is_static
    assert envelope.corners() == [[(2, 3), ()]]
    assert envelope.mismatch([(2, 3), ()]) is None
    assert envelope.mismatch([(2, 4), ()]) == "input 0 axis 1 has size 4, the engine takes 3"


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ([(4, 3, 17), (2,)], None),
        ([(4, 3, 17)], "1 tensor inputs, the engine takes 2"),
        ([(4, 3), (2,)], "sample has 2 axes, the engine takes 3"),
        ([(4, 5, 17), (2,)], "sample axis 1 has size 5, the engine takes 3"),
        ([(10, 3, 17), (5,)], "sample axis 0 has size 10, the engine takes 2 to 8"),
        ([(0, 3, 17), (0,)], "sample axis 0 has size 0, the engine takes 2 to 8"),
        ([(3, 3, 17), (2,)], "sample axis 0 has size 3, the engine takes 2 to 8 in steps of 2"),
        ([(4, 3, 18), (2,)], "sample axis 2 has size 18, the engine takes 17 to 65 in steps of 8"),
        (
            [(4, 3, 17), (3,)],
            "timestep axis 0 has size 3, which does not agree with another axis (both depend on b)",
        ),
    ],
)
def test_a_mismatch_says_which_axis_and_why(shapes: Any, sentence: str | None) -> None:
    assert ENVELOPE.mismatch(shapes, ["sample", "timestep"]) == sentence


def test_inputs_without_a_name_are_numbered() -> None:
    assert str(ENVELOPE.mismatch([(4, 3, 17), (9,)], ["sample"])).startswith("input 1 axis 0 has size 9")


@pytest.mark.parametrize("scale", [0, -1])
def test_a_scale_that_divides_nothing_is_refused(scale: int) -> None:
    with pytest.raises(ValueError, match="scale"):
        Extent.from_json(["s", scale, 0])


@pytest.mark.parametrize("ranges", [{}, {"b": (3, 2)}])
def test_a_symbol_needs_a_range(ranges: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="range"):
        ShapeEnvelope(inputs=((BATCH,),), ranges=ranges)
