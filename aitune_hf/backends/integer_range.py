"""What the integers of a program may be: ranges, and the arguments of an operator as ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["Call", "IntegerRange", "hull", "range_of_type", "size_ranges"]

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class IntegerRange:
    """From ``low`` to ``high``, both inclusive."""

    low: int
    high: int

    @property
    def largest(self) -> int:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


def hull(*values: Any) -> IntegerRange | None:
    """The range that has all of these in it: ranges, tuples of them, or None for what is no integer; None for nothing."""
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,)) if part is not None]
    if not parts:
        return None
    return IntegerRange(min(part.low for part in parts), max(part.high for part in parts))


def range_of_type(value: Any) -> IntegerRange | None:
    """What a tensor may hold whose type has few bits; None for all others."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _INTEGERS or value.dtype in (torch.int32, torch.int64):
        return None
    if value.dtype is torch.bool:
        return IntegerRange(0, 1)
    info = torch.iinfo(value.dtype)
    return IntegerRange(info.min, info.max)


def size_ranges(program: ExportedProgram, envelope: ShapeEnvelope) -> dict[Any, Any]:
    """What each symbol of a program's sizes may be. Its own constraints are wider than the envelope."""
    from torch.utils._sympy.value_ranges import ValueRanges

    found: dict[Any, Any] = dict(program.range_constraints)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for name, extents in zip(program.graph_signature.user_inputs, envelope.inputs, strict=True):
        for size, extent in zip(nodes[str(name)].meta["val"].shape, extents, strict=True):
            if isinstance(size, torch.SymInt) and len(size.node.expr.free_symbols) == 1:
                (symbol,) = size.node.expr.free_symbols
                factor = int(size.node.expr.coeff(symbol)) or 1
                low, high = _bounds(extent, envelope)
                found[symbol] = ValueRanges(low // factor, high // factor)
    return found


def _bounds(extent: Extent, envelope: ShapeEnvelope) -> tuple[int, int]:
    low, high = (0, 0) if extent.symbol is None else envelope.ranges[extent.symbol]
    return extent.scale * low + extent.offset, extent.scale * high + extent.offset


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One operator of a program.

    Attributes:
        node: the operator.
        ranges: what the nodes before it may be: a range, one per result where there are several, None for no integers.
        sizes: from :func:`size_ranges`.
        unknown: what integers are taken for that come from floating point.
    """

    node: fx.Node
    ranges: Mapping[fx.Node, Any]
    sizes: Mapping[Any, Any]
    unknown: IntegerRange

    @property
    def name(self) -> str:
        """The operator's name, without its overload."""
        target: Any = self.node.target
        packet = getattr(target, "overloadpacket", None)
        name = str(packet if packet is not None else getattr(target, "__name__", target)).rpartition(".")[2]
        return name if name.startswith("_") else name.rstrip("_")

    def is_integer(self, value: Any) -> bool:
        """True for a tensor of integers."""
        return isinstance(value, torch.Tensor) and value.dtype in _INTEGERS

    def held(self, node: fx.Node) -> IntegerRange | None:
        """What a node before this one may be; None where it holds no integers."""
        return hull(self.ranges.get(node)) or range_of_type(node.meta.get("val"))

    def raw(self, index: int, name: str = "", default: Any = None) -> Any:
        """An argument as it stands."""
        return self.node.args[index] if index < len(self.node.args) else self.node.kwargs.get(name, default)

    def argument(self, index: int, name: str = "", default: Any = None) -> IntegerRange:
        """The range of an argument: of a tensor, a size or a number."""
        value = self.raw(index, name, default)
        if isinstance(value, fx.Node):
            return self.held(value) or self.unknown
        return self.number(0 if value is None else value)

    def number(self, value: Any) -> IntegerRange:
        """The range of a number that stands in the program."""
        if isinstance(value, (int, float)) and math.isfinite(value):
            return IntegerRange(math.floor(value), math.ceil(value))
        return self.unknown

    def size(self, value: int | torch.SymInt) -> IntegerRange:
        """The range of a size, or of what is computed from sizes."""
        from torch.utils._sympy.value_ranges import bound_sympy

        if isinstance(value, int):
            return IntegerRange(value, value)
        bound = bound_sympy(value.node.expr, dict(self.sizes))
        # Sizes that depend on values have no end; those that are real are far from this one.
        low = int(bound.lower) if bound.lower.is_Integer else 0
        return IntegerRange(low, int(bound.upper) if bound.upper.is_Integer else max(low, self.unknown.high))

    def count(self, index: int) -> int:
        """The most numbers that a tensor argument may have."""
        return math.prod(max(1, self.size(size).high) for size in self._shape(index))

    def length(self, index: int, axis: int) -> int:
        """The most numbers that a tensor argument may have along an axis."""
        shape = self._shape(index)
        return max(1, self.size(shape[axis]).high) if len(shape) else 1

    def _shape(self, index: int) -> Any:
        value = self.node.args[index]
        held = value.meta.get("val") if isinstance(value, fx.Node) else None
        return held.shape if isinstance(held, torch.Tensor) else ()
