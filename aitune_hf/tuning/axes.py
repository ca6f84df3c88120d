"""Which axes of a graph an engine must take in more than one size, and samples of such sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aitune_hf.backends.base import AxisRange
from aitune_hf.graph.graph_spec import GraphSpec, resize_axis
from aitune_hf.graph.sample_store import Sample

__all__ = ["Axes", "axes_to_json", "example_for", "fixed_axes", "resized", "varying_axes"]

Axes = tuple[tuple[AxisRange | None, ...], ...]


def varying_axes(graph: GraphSpec, runs_at: Callable[[list[tuple[int, ...]]], bool] | None = None) -> Axes | None:
    """The range of each axis that was seen with two sizes or that the user has declared; None if there is none.

    Args:
        runs_at: tells whether eager runs with inputs of these shapes. Where it does, the lower end of the axes that
            were seen to vary is lowered to 1: short inputs are as likely as those in the samples.
    """
    axes: list[list[AxisRange | None]] = []
    for place, spec in graph.input_spec.tensors.items():
        row: list[AxisRange | None] = [None] * spec.rank
        for axis in spec.dynamic_axes:
            row[axis] = AxisRange(min=spec.min_shape[axis], max=spec.max_shape[axis])
        for axis, dim in (graph.get_shape_definition(place) or {}).items():
            fixed = dim.min == dim.max
            row[axis] = (
                None if fixed else AxisRange(min=dim.min, max=dim.max, multiple_of=dim.multiple_of, name=dim.name)
            )
        axes.append(row)
    if not any(axis for row in axes for axis in row):
        return None
    found = tuple(tuple(row) for row in axes)
    if runs_at is not None and not graph.dynamic_shapes:
        lowered = tuple(tuple(axis and AxisRange(min=1, max=axis.max) for axis in row) for row in found)
        smallest = [
            tuple(1 if axis else size for axis, size in zip(row, spec.min_shape, strict=True))
            for row, spec in zip(lowered, graph.input_spec.tensors.values(), strict=True)
        ]
        if runs_at(smallest):
            return lowered
    return found


def fixed_axes(shapes: Sequence[Sequence[int]]) -> Axes:
    """No axis varies."""
    return tuple((None,) * len(shape) for shape in shapes)


def axes_to_json(axes: Axes) -> list[Any]:
    """JSON form, for keys and verdicts."""
    return [
        [None if axis is None else [axis.min, axis.max, axis.multiple_of, axis.name] for axis in row] for row in axes
    ]


def resized(sample: Sample, shapes: Sequence[Sequence[int]]) -> Sample:
    """The sample with inputs of these shapes: its own rows, repeated or cut. It has no outputs."""
    inputs = []
    for leaf, shape in zip(sample.inputs, shapes, strict=True):
        for axis, size in enumerate(shape):
            leaf = resize_axis(leaf, axis, size)
        inputs.append(leaf.contiguous())
    return Sample(
        inputs=inputs,
        input_node=sample.input_node,
        outputs=[],
        output_node=sample.output_node,
        context=sample.context,
    )


def example_for(sample: Sample, axes: Axes) -> Sample:
    """The sample to trace with: at the largest size of each varying axis, at least 2, as size 1 would be frozen."""
    shapes = [
        tuple(size if axis is None else max(axis.max, 2) for size, axis in zip(leaf.shape, row, strict=True))
        for leaf, row in zip(sample.inputs, axes, strict=True)
    ]
    return resized(sample, shapes)
