"""The sizes an engine was built and verified for, and whether a call lies within them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Extent", "ShapeEnvelope"]


@dataclass(frozen=True)
class Extent:
    """The size of one axis: ``scale * symbol + offset``, or ``offset`` alone where ``symbol`` is None.

    Raises:
        ValueError: if ``scale`` < 1.
    """

    offset: int = 0
    symbol: str | None = None
    scale: int = 1

    def __post_init__(self) -> None:
        if self.scale < 1:
            raise ValueError(f"the scale of an extent is at least 1, got {self.scale}")

    def to_json(self) -> int | list[Any]:
        """A fixed size as an integer, else ``[symbol, scale, offset]``."""
        return self.offset if self.symbol is None else [self.symbol, self.scale, self.offset]

    @classmethod
    def from_json(cls, data: int | Sequence[Any]) -> Extent:
        """Inverse of :meth:`to_json`."""
        if isinstance(data, int):
            return cls(data)
        symbol, scale, offset = data
        return cls(int(offset), str(symbol), int(scale))


@dataclass(frozen=True, kw_only=True)
class ShapeEnvelope:
    """Shapes that an engine takes.

    Attributes:
        inputs: per tensor input, the extent of each axis.
        ranges: symbol → smallest and largest value, both inclusive. Axes that share a symbol vary together.

    Raises:
        ValueError: if a symbol has no range, or an empty one.
    """

    inputs: tuple[tuple[Extent, ...], ...]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        symbols = {extent.symbol for extents in self.inputs for extent in extents if extent.symbol is not None}
        if not symbols <= set(self.ranges) or any(low > high for low, high in self.ranges.values()):
            raise ValueError(f"each of {sorted(symbols)} needs a range from low to high, got {dict(self.ranges)}")

    @classmethod
    def fixed(cls, shapes: Sequence[Sequence[int]]) -> ShapeEnvelope:
        """The envelope of exactly these shapes."""
        return cls(inputs=tuple(tuple(Extent(int(size)) for size in shape) for shape in shapes))

    @property
    def is_static(self) -> bool:
        """True when exactly one combination of shapes fits."""
        return not self.ranges

    def mismatch(self, shapes: Sequence[Sequence[int]], names: Sequence[str] = ()) -> str | None:
        """None when ``shapes`` fit, else a sentence that says which axis does not and why.

        Args:
            shapes: one shape per tensor input.
            names: what to call the inputs in the sentence.
        """
        if len(shapes) != len(self.inputs):
            return f"{len(shapes)} tensor inputs, the engine takes {len(self.inputs)}"
        values: dict[str, int] = {}
        for index, (shape, extents) in enumerate(zip(shapes, self.inputs, strict=True)):
            name = names[index] if index < len(names) else f"input {index}"
            if len(shape) != len(extents):
                return f"{name} has {len(shape)} axes, the engine takes {len(extents)}"
            for axis, (size, extent) in enumerate(zip(shape, extents, strict=True)):
                problem = self._axis_mismatch(size, extent, values)
                if problem:
                    return f"{name} axis {axis} has size {size}, {problem}"
        return None

    def _axis_mismatch(self, size: int, extent: Extent, values: dict[str, int]) -> str | None:
        if extent.symbol is None:
            return None if size == extent.offset else f"the engine takes {extent.offset}"
        value, rest = divmod(size - extent.offset, extent.scale)
        low, high = self.ranges[extent.symbol]
        sizes = f"{extent.scale * low + extent.offset} to {extent.scale * high + extent.offset}"
        if rest:
            return f"the engine takes {sizes} in steps of {extent.scale}"
        if not low <= value <= high:
            return f"the engine takes {sizes}"
        if values.setdefault(extent.symbol, value) != value:
            return f"which does not agree with another axis (both depend on {extent.symbol})"
        return None

    def corners(self) -> list[list[tuple[int, ...]]]:
        """The smallest and the largest combination of shapes (one combination if static)."""
        ends = [0] if self.is_static else [0, 1]
        return [[tuple(self._size(extent, end) for extent in extents) for extents in self.inputs] for end in ends]

    def _size(self, extent: Extent, end: int) -> int:
        if extent.symbol is None:
            return extent.offset
        return extent.scale * self.ranges[extent.symbol][end] + extent.offset

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "inputs": [[extent.to_json() for extent in extents] for extents in self.inputs],
            "ranges": {symbol: list(bounds) for symbol, bounds in sorted(self.ranges.items())},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShapeEnvelope:
        """Inverse of :meth:`to_dict`."""
        return cls(
            inputs=tuple(tuple(Extent.from_json(item) for item in extents) for extents in data["inputs"]),
            ranges={symbol: (int(low), int(high)) for symbol, (low, high) in data["ranges"].items()},
        )
