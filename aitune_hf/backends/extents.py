"""What a captured program says about sizes, brought to a :class:`ShapeEnvelope`.

``torch.export`` gives each axis that may vary an expression (``s0``, ``2*s0``) and collects *guards*: what it took for
true about sizes while it traced. A program is valid where all guards hold, so the envelope is cut down to that.

Sizes 0 and 1 are special to ``torch.export``: it assumes that sizes that may vary are at least 2, and says so in
guards (``Ne(s0, 1)``, ``s0//2 > 1``). Code made for other sizes is nearly always right for 1 too; such *unit guards*
are left out here, and whether an engine is right at size 1 is for the tuner to measure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]

from aitune_hf.backends.base import AxisRange, BuildRequest
from aitune_hf.errors import BuildError
from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["envelope_of", "input_names"]

#: Values of a symbol for which guards are evaluated one by one, at least; the pattern found is continued from there.
_WINDOW = 64
#: Combinations of sizes at which guards over several symbols are tried.
_MAX_POINTS = 81


def input_names(request: BuildRequest) -> list[str]:
    """What to call the tensor inputs in messages, in their order."""
    return [str(place) for place in request.graph.input_spec.tensors]


class _Unfit(Exception):
    """Why the sizes that a program takes cannot be described."""


@dataclass
class _Axis:
    """One axis that may vary, as the program sees it: ``scale * symbol + offset``."""

    label: str
    wanted: AxisRange
    symbol: Any
    scale: int
    offset: int
    place: tuple[int, int]

    def admits(self, value: int) -> bool:
        size = self.scale * value + self.offset
        return self.wanted.min <= size <= self.wanted.max and size % self.wanted.multiple_of == 0


@dataclass
class _Sizes:
    """The varying axes of a program and the values their symbols may take."""

    axes: list[_Axis]
    values: dict[Any, range] = field(default_factory=dict)


def envelope_of(program: ExportedProgram, request: BuildRequest) -> ShapeEnvelope:
    """The shapes that ``program`` takes, within the ranges that ``request`` asks for.

    Raises:
        BuildError: if an axis that must vary is fixed by the forward, depends on another one in a way that is not
            affine, or takes no regular set of sizes; or if calls that were recorded fall outside.
    """
    shapes = _program_shapes(program)
    try:
        sizes = _Sizes(_varying_axes(shapes, request))
        guards = _guards(shapes)
        for symbol in dict.fromkeys(axis.symbol for axis in sizes.axes):
            sizes.values[symbol] = _values(symbol, sizes.axes, guards, program)
        _check_joint_guards(guards, sizes)
        envelope = _assemble(sizes, request)
        _check_recorded(envelope, request)
    except _Unfit as error:
        raise BuildError(f"{request.path}: {error}. Build this graph for fixed shapes.") from None
    return envelope


def _program_shapes(program: ExportedProgram) -> list[tuple[Any, ...]]:
    metas = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    return [tuple(metas[str(name)].shape) for name in program.graph_signature.user_inputs]


def _expression(size: Any) -> Any:
    """The sympy expression of a symbolic size, or the integer."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def _varying_axes(shapes: Sequence[tuple[Any, ...]], request: BuildRequest) -> list[_Axis]:
    axes: list[_Axis] = []
    for index, (name, shape, ranges) in enumerate(zip(input_names(request), shapes, request.axes, strict=True)):
        for axis, (size, wanted) in enumerate(zip(shape, ranges, strict=True)):
            if wanted is None or wanted.min == wanted.max:
                continue
            label = f"{name} axis {axis}"
            expression = _expression(size)
            if isinstance(expression, int):
                raise _Unfit(
                    f"{label} is fixed by the forward at {expression}, and should vary from {wanted.min} to "
                    f"{wanted.max}"
                )
            symbol, scale, offset = _affine(expression, label)
            axes.append(_Axis(label, wanted, symbol, scale, offset, (index, axis)))
    return axes


def _affine(expression: Any, label: str) -> tuple[Any, int, int]:
    symbols = list(expression.free_symbols)
    if len(symbols) == 1:
        (symbol,) = symbols
        offset = expression.subs(symbol, 0)
        scale = expression.subs(symbol, 1) - offset
        if scale.is_integer and scale > 0 and (expression - scale * symbol - offset).expand() == 0:
            return symbol, int(scale), int(offset)
    raise _Unfit(f"{label} must be {expression} for this forward, which is no multiple of one size plus a constant")


def _guards(shapes: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What the program takes for true about sizes, without what is always true and what only data can tell."""
    symbolic = next((size for shape in shapes for size in shape if not isinstance(size, int)), None)
    if symbolic is None:
        return []
    shape_env = symbolic.node.shape_env
    known = set(shape_env.var_to_range)
    found = dict.fromkeys(shape_env.replace(guard.expr) for guard in shape_env.guards)
    backed = [guard for guard in found if guard.free_symbols and guard.free_symbols <= known]
    return sorted(backed, key=str)


def _holds(guard: Any, point: Mapping[Any, int]) -> bool:
    return bool(guard.xreplace({symbol: sympy.Integer(value) for symbol, value in point.items()}) != sympy.false)


def _is_unit_failure(guard: Any, point: Mapping[Any, int]) -> bool:
    """True if ``guard`` only says that some size is not 1, and at ``point`` it is 1."""
    if not isinstance(guard, sympy.core.relational.Relational):
        return False
    for side, other in ((guard.lhs, guard.rhs), (guard.rhs, guard.lhs)):
        if other in (1, 2) and side.subs(dict(point)) == 1:
            return True
    return False


def _values(symbol: Any, axes: Sequence[_Axis], guards: Sequence[Any], program: ExportedProgram) -> range:
    """The values that ``symbol`` may take: those that its axes ask for and its own guards allow."""
    own = [axis for axis in axes if axis.symbol == symbol]
    low = max(-(-(axis.wanted.min - axis.offset) // axis.scale) for axis in own)
    high = min((axis.wanted.max - axis.offset) // axis.scale for axis in own)
    bounds = program.range_constraints.get(symbol)
    if bounds is not None and bounds.upper.is_number and bounds.upper < high:
        high = int(bounds.upper)
    wanted = [value for value in range(low, high + 1) if all(axis.admits(value) for axis in own)]
    single = [guard for guard in guards if guard.free_symbols == {symbol}]

    def allowed(value: int) -> bool:
        point = {symbol: value}
        return all(_holds(guard, point) or _is_unit_failure(guard, point) for guard in single)

    kept = _continued(wanted, _window(single), allowed)
    if kept is None or len(kept) < 2:
        why = ", ".join(map(str, single)) or "no size in the range asked for fits all axes"
        raise _Unfit(
            f"{own[0].label} cannot vary from {own[0].wanted.min} to {own[0].wanted.max}: the forward takes no regular "
            f"set of sizes there ({why})"
        )
    return kept


def _window(guards: Sequence[Any]) -> int:
    """How many values to look at to see a pattern: several periods of the largest divisor in the guards."""
    parts = [part for guard in guards for part in guard.atoms(sympy.Function) if len(part.args) == 2]
    divisors = [abs(int(part.args[1])) for part in parts if part.args[1].is_Integer]
    return max(_WINDOW, 4 * max((divisor for divisor in divisors if divisor < 4096), default=1))


def _continued(wanted: Sequence[int], window: int, allowed: Any) -> range | None:
    """The allowed ones of ``wanted`` as a progression, found in its first ``window`` values and checked at its end."""
    head, tail = wanted[:window], wanted[window:]
    kept = _progression([value for value in head if allowed(value)])
    if kept is None or not tail:
        return kept
    if len(kept) < 2 or kept[-1] + kept.step <= head[-1]:
        return kept
    longer = [value for value in tail if value > kept[-1] and (value - kept[0]) % kept.step == 0]
    while longer and not allowed(longer[-1]):
        longer.pop()
    return range(kept[0], (longer[-1] if longer else kept[-1]) + 1, kept.step)


def _progression(values: Sequence[int]) -> range | None:
    if not values:
        return None
    step = values[1] - values[0] if len(values) > 1 else 1
    found = range(values[0], values[-1] + 1, step)
    return found if list(found) == list(values) else None


def _check_joint_guards(guards: Sequence[Any], sizes: _Sizes) -> None:
    """Refuse a program that holds only for some combinations of its sizes.

    Tried at the ends and the middle of all ranges, but for points at which a unit guard fails: those are measured.
    """
    symbols = list(sizes.values)
    ends = [sorted({values[0], values[len(values) // 2], values[-1]}) for values in sizes.values.values()]
    for values in itertools.islice(itertools.product(*ends), _MAX_POINTS):
        point = dict(zip(symbols, values, strict=True))
        failed = [guard for guard in guards if len(guard.free_symbols) > 1 and not _holds(guard, point)]
        if failed and not any(not _holds(guard, point) and _is_unit_failure(guard, point) for guard in guards):
            names = {axis.symbol: axis.label for axis in reversed(sizes.axes)}
            involved = " and ".join(sorted(names.get(s, str(s)) for s in failed[0].free_symbols))
            raise _Unfit(
                f"the forward does different things for different combinations of {involved} ({failed[0]} was taken "
                "for true)"
            )


def _assemble(sizes: _Sizes, request: BuildRequest) -> ShapeEnvelope:
    extents = [[Extent(size) for size in shape] for shape in request.example.shapes]
    names: dict[Any, str] = {}
    ranges: dict[str, tuple[int, int]] = {}
    merged = _merge_equal_axes(sizes, request)
    for axis in sizes.axes:
        symbol = merged.get(axis.symbol, axis.symbol)
        values = sizes.values[axis.symbol]
        if symbol not in names:
            names[symbol] = _fresh_name(axis, ranges)
            ranges[names[symbol]] = (values[0] // values.step, values[-1] // values.step)
        # A symbol's values are ``step * v + rest``; ``v`` is what the envelope's symbol counts.
        rest = values[0] % values.step
        extent = Extent(axis.scale * rest + axis.offset, names[symbol], axis.scale * values.step)
        extents[axis.place[0]][axis.place[1]] = extent
    return ShapeEnvelope(inputs=tuple(map(tuple, extents)), ranges=ranges)


def _fresh_name(axis: _Axis, taken: Mapping[str, Any]) -> str:
    """A symbol's name: the range's own where it has one, so that it never depends on how torch counts symbols."""
    if axis.wanted.name and axis.wanted.name not in taken:
        return axis.wanted.name
    return next(name for name in (f"d{number}" for number in itertools.count()) if name not in taken)


def _merge_equal_axes(sizes: _Sizes, request: BuildRequest) -> dict[Any, Any]:
    """Symbols that the program keeps apart, though their axes always have the same size: symbol → its stand-in.

    That holds for axes whose ranges carry one name. Unnamed axes at the same position of two inputs that have the same
    size in the example and the same range count too, unless a recorded call says otherwise: where a program does not
    say how such inputs relate, it has not been seen to be right with unequal ones.
    """
    merged: dict[Any, Any] = {}
    for first, second in itertools.combinations(sizes.axes, 2):
        form, other = ((axis.scale, axis.offset, sizes.values[axis.symbol]) for axis in (first, second))
        if form == other and first.symbol != second.symbol and _always_equal(first, second, request):
            merged.setdefault(second.symbol, merged.get(first.symbol, first.symbol))
    return merged


def _always_equal(first: _Axis, second: _Axis, request: BuildRequest) -> bool:
    if first.wanted.name or second.wanted.name:
        return first.wanted.name == second.wanted.name
    (i, a), (j, b) = first.place, second.place
    calls = [request.example.shapes, *request.graph.input_spec.shapes]
    return i != j and a == b and all(shapes[i][a] == shapes[j][b] for shapes in calls)


def _check_recorded(envelope: ShapeEnvelope, request: BuildRequest) -> None:
    """Every recorded call within the ranges asked for must be among the shapes that the program takes."""
    example = request.example.shapes
    for shapes in (example, *request.graph.input_spec.shapes):
        if not _asked_for(shapes, example, request.axes):
            continue
        problem = envelope.mismatch(shapes, input_names(request))
        if problem:
            raise _Unfit(f"a program for sizes that vary leaves out a recorded call: {problem}")


def _asked_for(
    shapes: Sequence[Sequence[int]],
    example: Sequence[Sequence[int]],
    axes: Sequence[Sequence[AxisRange | None]],
) -> bool:
    triples = (triple for call in zip(shapes, example, axes, strict=True) for triple in zip(*call, strict=True))
    return all(
        size == fixed if wanted is None else wanted.min <= size <= wanted.max and size % wanted.multiple_of == 0
        for size, fixed, wanted in triples
    )
