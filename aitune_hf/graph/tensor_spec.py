"""One tensor of a graph: its type, and the shapes it was seen with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aitune_hf.graph.values import decode_value

__all__ = ["TensorSpec"]


@dataclass
class TensorSpec:
    """A tensor input or output.

    Attributes:
        dtype: element type.
        device_type: ``"cpu"``, ``"cuda"``…; an index is never kept.
        min_shape: smallest size seen, per axis.
        max_shape: largest size seen, per axis.
        batch_axis: axis that counts batch items, where one was detected.
        batch_multiplier: rows of ``batch_axis`` per batch item (2 for a sample doubled by guidance).
    """

    dtype: torch.dtype
    device_type: str
    min_shape: list[int]
    max_shape: list[int] = field(default_factory=list)
    batch_axis: int | None = None
    batch_multiplier: int = 1

    def __post_init__(self) -> None:
        if not self.max_shape:
            self.max_shape = list(self.min_shape)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of one tensor."""
        return cls(tensor.dtype, tensor.device.type, list(tensor.shape))

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.min_shape)

    @property
    def dynamic_axes(self) -> tuple[int, ...]:
        """Axes that were seen with more than one size."""
        return tuple(i for i, (a, b) in enumerate(zip(self.min_shape, self.max_shape, strict=True)) if a != b)

    @property
    def shape(self) -> list[int | str]:
        """Sizes where they are fixed, ``"batch{axis}"`` or ``"dim{axis}"`` where they were seen to vary."""
        names: list[int | str] = list(self.min_shape)
        for axis in self.dynamic_axes:
            names[axis] = f"batch{axis}" if axis == self.batch_axis else f"dim{axis}"
        return names

    def matches(self, other: TensorSpec) -> bool:
        """True when both can belong to the same graph: equal rank, dtype and device type."""
        return (self.rank, self.dtype, self.device_type) == (other.rank, other.dtype, other.device_type)

    def update(self, shape: Sequence[int]) -> None:
        """Widen the bounds by one more shape of the same rank."""
        self.min_shape = [min(a, int(b)) for a, b in zip(self.min_shape, shape, strict=True)]
        self.max_shape = [max(a, int(b)) for a, b in zip(self.max_shape, shape, strict=True)]

    def identity(self) -> list[Any]:
        """What of it decides which graph a call belongs to, as JSON."""
        return [self.rank, str(self.dtype).removeprefix("torch."), self.device_type]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "device_type": self.device_type,
            "min_shape": list(self.min_shape),
            "max_shape": list(self.max_shape),
            "batch_axis": self.batch_axis,
            "batch_multiplier": self.batch_multiplier,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorSpec:
        """Inverse of :meth:`to_dict`."""
        return cls(
            decode_value({"t": "dtype", "v": data["dtype"]}),
            data["device_type"],
            [int(size) for size in data["min_shape"]],
            [int(size) for size in data["max_shape"]],
            data["batch_axis"],
            data["batch_multiplier"],
        )
