"""What is known of a call's inputs, or of its outputs, without the tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aitune_hf.graph.locator import Locator
from aitune_hf.graph.structure import Node, flatten
from aitune_hf.graph.tensor_spec import TensorSpec

__all__ = ["SampleMetadata"]

#: Distinct shape combinations that are kept one by one; beyond that only the bounds are exact.
MAX_SHAPES_KEPT = 256

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class SampleMetadata:
    """Structure, tensor specs and plain values of nested inputs or outputs.

    Attributes:
        node: the structure, with its plain values.
        tensors: locator → spec, in the order of ``node.leaves()``.
        shapes: the distinct combinations of shapes seen, in the same order.
    """

    node: Node
    tensors: dict[Locator, TensorSpec]
    shapes: list[Shapes] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> SampleMetadata:
        """Describe one nested value."""
        node, leaves = flatten(value)
        return cls.of_leaves(node, leaves)

    @classmethod
    def of_leaves(cls, node: Node, leaves: Sequence[torch.Tensor]) -> SampleMetadata:
        """Describe a value that was already taken apart by :func:`.structure.flatten`."""
        places = [place for place, leaf in node.leaves() if leaf.kind == "tensor"]
        tensors = {place: TensorSpec.of(leaf) for place, leaf in zip(places, leaves, strict=True)}
        return cls(node, tensors, [tuple(tuple(leaf.shape) for leaf in leaves)])

    @property
    def values(self) -> dict[Locator, Any]:
        """The plain values, by locator."""
        return {place: leaf.value for place, leaf in self.node.leaves() if leaf.kind == "value"}

    @property
    def opaque(self) -> dict[Locator, str]:
        """Objects that are neither tensors nor plain values: locator → type name."""
        return {place: leaf.type_name or "?" for place, leaf in self.node.leaves() if leaf.kind == "opaque"}

    @property
    def has_dynamic_axis(self) -> bool:
        """True when at least one axis of one tensor was seen with two sizes."""
        return any(spec.dynamic_axes for spec in self.tensors.values())

    def identity(self) -> dict[str, Any]:
        """What decides which graph a call belongs to, as JSON: structure, values, and rank, dtype and device type."""
        return {
            "node": self.node.to_json(),
            "tensors": [spec.identity() for spec in self.tensors.values()],
        }

    def update(self, other: SampleMetadata) -> None:
        """Widen the bounds by what ``other``, of the same identity, has seen."""
        for place, spec in other.tensors.items():
            self.tensors[place].update(spec.min_shape)
            self.tensors[place].update(spec.max_shape)
        for shapes in other.shapes:
            if shapes not in self.shapes and len(self.shapes) < MAX_SHAPES_KEPT:
                self.shapes.append(shapes)
        self._detect_batch_axes()

    def _detect_batch_axes(self) -> None:
        """Leading axes that grow in proportion to each other count batch items (the smallest is one item each)."""
        columns: dict[Locator, list[int]] = {}
        for index, (place, spec) in enumerate(self.tensors.items()):
            spec.batch_axis, spec.batch_multiplier = None, 1
            if spec.rank and 0 in spec.dynamic_axes:
                columns[place] = [shapes[index][0] for shapes in self.shapes]
        if not columns:
            return
        base = min(columns.values(), key=sum)
        for place, column in columns.items():
            multiplier = column[0] // base[0] if base[0] else 0
            if multiplier and all(size == multiplier * unit for size, unit in zip(column, base, strict=True)):
                self.tensors[place].batch_axis = 0
                self.tensors[place].batch_multiplier = multiplier

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "node": self.node.to_json(),
            "tensors": [[place.to_json(), spec.to_dict()] for place, spec in self.tensors.items()],
            "shapes": [[list(shape) for shape in shapes] for shapes in self.shapes],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SampleMetadata:
        """Inverse of :meth:`to_dict`."""
        return cls(
            Node.from_json(data["node"]),
            {Locator.from_json(place): TensorSpec.from_dict(spec) for place, spec in data["tensors"]},
            [tuple(tuple(int(size) for size in shape) for shape in shapes) for shapes in data["shapes"]],
        )
