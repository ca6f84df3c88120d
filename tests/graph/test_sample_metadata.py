"""What is known of inputs without the tensors: identity, bounds, batch axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from graph_strategies import Mode, nested
from hypothesis import given

from aitune_hf.graph import sample_metadata
from aitune_hf.graph.locator import Locator
from aitune_hf.graph.sample_metadata import SampleMetadata


def seen(*calls: Sequence[Sequence[int]]) -> SampleMetadata:
    """Metadata of calls of ``t0``, ``t1``… with these shapes."""
    described = [SampleMetadata.of({f"t{i}": torch.zeros(tuple(s)) for i, s in enumerate(call)}) for call in calls]
    for other in described[1:]:
        described[0].update(other)
    return described[0]


def batches(metadata: SampleMetadata) -> list[int | None]:
    """Rows per batch item of each input, None where no batch axis was found."""
    return [None if spec.batch_axis is None else spec.batch_multiplier for spec in metadata.tensors.values()]


@given(value=nested)
def test_metadata_survives_json(value: Any) -> None:
    metadata = SampleMetadata.of(value)
    again = SampleMetadata.from_dict(json.loads(json.dumps(metadata.to_dict(), allow_nan=False)))
    assert again == metadata
    assert again.identity() == metadata.identity()


def test_values_and_opaque_objects_are_listed_by_place() -> None:
    metadata = SampleMetadata.of({"x": torch.zeros(1), "scale": 1.5, "cache": object(), "mode": [Mode.FAST]})
    assert metadata.values == {Locator(("scale",)): 1.5, Locator(("mode", 0)): Mode.FAST}
    assert metadata.opaque == {Locator(("cache",)): "builtins:object"}
    assert list(metadata.tensors) == [Locator(("x",))]


def test_bounds_and_shape_combinations_are_kept() -> None:
    metadata = seen([(1, 4), (3,)], [(2, 8), (3,)], [(1, 4), (3,)], [(2, 6), (3,)])
    spec = metadata.tensors[Locator(("t0",))]
    assert (spec.min_shape, spec.max_shape) == ([1, 4], [2, 8])
    assert metadata.shapes == [((1, 4), (3,)), ((2, 8), (3,)), ((2, 6), (3,))]
    assert metadata.has_dynamic_axis
    assert not seen([(1, 4)], [(1, 4)]).has_dynamic_axis


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([[(1, 4)], [(3, 4)]], [1]),
        ([[(2, 4), (1, 4)], [(6, 4), (3, 4)]], [2, 1]),
        ([[(1,), (2, 7), (8, 9)], [(2,), (4, 7), (16, 9)]], [1, 2, 8]),
        ([[(1, 5), (77,)], [(4, 9), (77,)]], [1, None]),
        ([[(1, 4), ()], [(3, 4), ()]], [1, None]),
        # Not in proportion.
        ([[(1, 4), (2, 4)], [(2, 4), (3, 4)]], [1, None]),
        ([[(2, 4), (3, 4)], [(4, 4), (6, 4)]], [1, None]),
        ([[(1, 4), (2, 4)], [(2, 4), (4, 4)], [(4, 4), (9, 4)]], [1, None]),
        # Only another axis varies.
        ([[(1, 4)], [(1, 8)]], [None]),
        # No rows to count by.
        ([[(0, 4), (0, 4)], [(2, 4), (2, 4)]], [None, None]),
    ],
)
def test_leading_axes_that_grow_in_proportion_count_a_batch(calls: Any, expected: list[int | None]) -> None:
    assert batches(seen(*calls)) == expected


def test_a_batch_axis_is_given_up_when_growth_stops_being_proportional() -> None:
    metadata = seen([(1, 4), (2, 4)], [(2, 4), (4, 4)])
    assert batches(metadata) == [1, 2]
    metadata.update(seen([(3, 4), (5, 4)]))
    assert batches(metadata) == [1, None]


def test_shape_combinations_are_bounded_and_bounds_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_metadata, "MAX_SHAPES_KEPT", 3)
    metadata = seen(*([(size, 2)] for size in range(1, 9)))
    assert len(metadata.shapes) == 3
    assert next(iter(metadata.tensors.values())).max_shape == [8, 2]
