"""What the integers of a program may be: interval arithmetic over its operators."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from aitune_hf.backends.integer_range import Call, IntegerRange, hull, range_of_type

__all__ = ["range_of_call"]

#: Larger exponents are beyond every type of integer.
_LARGEST_EXPONENT = 64


def range_of_call(call: Call) -> IntegerRange | tuple[IntegerRange | None, ...] | None:
    """What the results of an operator may be: a range, one per result where there are several, None for no integers."""
    if call.node.target is operator.getitem:
        owner: Any = call.node.args[0]
        place: Any = call.node.args[1]
        held = call.ranges.get(owner)
        found: IntegerRange | None = held[place] if isinstance(held, tuple) else held
        return found
    value = call.node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return tuple(_of_result(call, one, place) for place, one in enumerate(value))
    return _of_result(call, value, 0)


def _of_result(call: Call, value: Any, place: int) -> IntegerRange | None:
    if isinstance(value, (int, torch.SymInt)):
        return call.size(value)
    if not call.is_integer(value):
        return None
    own = range_of_type(value)
    if own is not None:
        return own
    if call.name in _PLACES or (place == 1 and call.name in _PLACES_SECOND):
        return IntegerRange(0, max(call.count(index) for index in range(len(call.node.args))))
    return _RULES.get(call.name, _moved)(call)


def _moved(call: Call) -> IntegerRange:
    """For operators that move numbers about, or convert them."""
    return hull(*(call.held(one) for one in call.node.all_input_nodes)) or call.unknown


def _of_corners(function: Callable[[int, int], int], first: IntegerRange, second: IntegerRange) -> IntegerRange:
    corners = [function(a, b) for a in (first.low, first.high) for b in (second.low, second.high)]
    return IntegerRange(min(corners), max(corners))


def _around_zero(largest: int) -> IntegerRange:
    return IntegerRange(-largest, largest)


def _scaled(call: Call, index: int = 1) -> IntegerRange:
    """The second term of a sum, which may have a factor."""
    return _of_corners(operator.mul, call.argument(index), call.number(call.node.kwargs.get("alpha", 1)))


def _add(call: Call) -> IntegerRange:
    return _of_corners(operator.add, call.argument(0), _scaled(call))


def _sub(call: Call) -> IntegerRange:
    return _of_corners(operator.sub, call.argument(0), _scaled(call))


def _rsub(call: Call) -> IntegerRange:
    first = _of_corners(operator.mul, call.argument(0), call.number(call.node.kwargs.get("alpha", 1)))
    return _of_corners(operator.sub, call.argument(1), first)


def _mul(call: Call) -> IntegerRange:
    if call.raw(0) is call.raw(1):
        return IntegerRange(0, call.argument(0).largest ** 2)
    return _of_corners(operator.mul, call.argument(0), call.argument(1))


def _square(call: Call) -> IntegerRange:
    return IntegerRange(0, call.argument(0).largest ** 2)


def _pow(call: Call) -> IntegerRange:
    exponent = min(_LARGEST_EXPONENT, call.argument(1).high)
    return _around_zero(max(1, call.argument(0).largest) ** max(1, exponent))


def _lshift(call: Call) -> IntegerRange:
    return _around_zero(call.argument(0).largest << max(0, min(_LARGEST_EXPONENT, call.argument(1).high)))


def _smaller(call: Call) -> IntegerRange:
    """For what brings a number nearer to zero, or one below it at most."""
    return hull(call.argument(0), IntegerRange(-1 if call.argument(0).low < 0 else 0, 0)) or call.unknown


def _divided(call: Call) -> IntegerRange:
    return _around_zero(call.argument(0).largest)


def _remainder(call: Call) -> IntegerRange:
    divisor = call.argument(1)
    return IntegerRange(min(0, divisor.low + 1), max(0, divisor.high - 1))


def _fmod(call: Call) -> IntegerRange:
    return _around_zero(min(call.argument(0).largest, max(0, call.argument(1).largest - 1)))


def _and(call: Call) -> IntegerRange:
    tops = [part.high for part in (call.argument(0), call.argument(1)) if part.low >= 0]
    return IntegerRange(0, min(tops)) if tops else _bits(call)


def _bits(call: Call) -> IntegerRange:
    bits = max(call.argument(0).largest, call.argument(1).largest).bit_length()
    low = min(call.argument(0).low, call.argument(1).low)
    return IntegerRange(0 if low >= 0 else -(1 << bits), (1 << bits) - 1)


def _not(call: Call) -> IntegerRange:
    own = call.argument(0)
    return IntegerRange(-own.high - 1, -own.low - 1)


def _neg(call: Call) -> IntegerRange:
    own = call.argument(0)
    return IntegerRange(-own.high, -own.low)


def _abs(call: Call) -> IntegerRange:
    return IntegerRange(0, call.argument(0).largest)


def _sign(call: Call) -> IntegerRange:
    return IntegerRange(-1, 1)


def _clamp(call: Call) -> IntegerRange:
    own = call.argument(0)
    low, high = own.low, own.high
    names = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(call.name, ("min", "max"))
    for place, name in enumerate(names, start=1):
        if call.raw(place, name) is None:
            continue
        limit = call.argument(place, name)
        end = max if name == "min" else min
        low, high = end(low, limit.low), end(high, limit.high)
    return IntegerRange(low, high)


def _minimum(call: Call) -> IntegerRange:
    return _of_ends(min, call)


def _maximum(call: Call) -> IntegerRange:
    return _of_ends(max, call)


def _of_ends(function: Callable[[int, int], int], call: Call) -> IntegerRange:
    first, second = call.argument(0), call.argument(1)
    return IntegerRange(function(first.low, second.low), function(first.high, second.high))


def _where(call: Call) -> IntegerRange:
    return hull(call.argument(1), call.argument(2)) or call.unknown


def _filled(call: Call) -> IntegerRange:
    """The first argument with a number, or those of another one, in some of its places."""
    place = {"fill": 1, "pad": 3, "scatter": 3, "index_fill": 3}.get(call.name, 2)
    return hull(call.argument(0), call.argument(place, "value", 0)) or call.unknown


def _first(call: Call) -> IntegerRange:
    """What is picked out of the first argument."""
    return call.argument(0)


def _arange(call: Call) -> IntegerRange:
    start, end = (
        (call.number(0), call.argument(0)) if len(call.node.args) == 1 else (call.argument(0), call.argument(1))
    )
    return hull(start, end) or call.unknown


def _full(call: Call) -> IntegerRange:
    place = {"scalar_tensor": 0, "new_full": 2}.get(call.name, 1)
    return call.argument(place, "fill_value")


def _zeros(call: Call) -> IntegerRange:
    return IntegerRange(0, 0)


def _ones(call: Call) -> IntegerRange:
    return IntegerRange(1, 1)


def _sum(call: Call) -> IntegerRange:
    axes = call.raw(1, "dim")
    axes = [axes] if isinstance(axes, int) else axes
    count = math.prod(call.length(0, axis) for axis in axes) if axes else call.count(0)
    own = call.argument(0)
    return IntegerRange(min(own.low, own.low * count), max(own.high, own.high * count))


def _prod(call: Call) -> IntegerRange:
    return _around_zero(max(1, call.argument(0).largest) ** min(_LARGEST_EXPONENT, call.count(0)))


def _matmul(call: Call) -> IntegerRange:
    place = 1 if call.name in ("addmm", "baddbmm") else 0
    products = call.argument(place).largest * call.argument(place + 1).largest * call.length(place, -1)
    return _around_zero(products + (call.argument(0).largest if place else 0))


def _scattered_sum(call: Call) -> IntegerRange:
    own, added = call.argument(0), call.argument(3)
    factor = call.number(call.node.kwargs.get("alpha", 1)).largest
    return _around_zero(own.largest + factor * added.largest * call.count(3))


def _put(call: Call) -> IntegerRange:
    """Numbers of a third argument put into the first: added to it, if asked for."""
    if call.raw(3, "accumulate", False):
        return _around_zero(call.argument(0).largest + call.argument(2).largest * call.count(2))
    return hull(call.argument(0), call.argument(2)) or call.unknown


#: Operators whose integers are places in a tensor, or numbers of its elements.
_PLACES = frozenset(
    {"argmax", "argmin", "argsort", "nonzero", "count_nonzero", "searchsorted", "bucketize", "bincount", "multinomial"}
)
#: The same, for the second result.
_PLACES_SECOND = frozenset({"sort", "topk", "max", "min", "kthvalue", "mode", "median", "cummax", "cummin"})
_RULES: dict[str, Callable[[Call], IntegerRange]] = {
    "add": _add, "sub": _sub, "rsub": _rsub, "mul": _mul, "square": _square, "pow": _pow, "neg": _neg, "abs": _abs,
    "sign": _sign, "floor_divide": _divided, "div": _divided, "floordiv": _divided, "remainder": _remainder,
    "fmod": _fmod, "__lshift__": _lshift, "bitwise_left_shift": _lshift, "__rshift__": _smaller,
    "bitwise_right_shift": _smaller, "bitwise_and": _and, "__and__": _and, "bitwise_or": _bits, "__or__": _bits,
    "bitwise_xor": _bits, "__xor__": _bits, "bitwise_not": _not, "clamp": _clamp, "clamp_min": _clamp, "clamp_max": _clamp,
    "minimum": _minimum, "maximum": _maximum, "where": _where, "masked_fill": _filled, "constant_pad_nd": _filled,
    "pad": _filled, "fill": _filled, "scatter": _filled, "index_fill": _filled, "gather": _first, "index": _first,
    "index_select": _first, "embedding": _first, "take": _first, "arange": _arange, "full": _full, "full_like": _full,
    "new_full": _full, "scalar_tensor": _full, "zeros": _zeros, "zeros_like": _zeros, "new_zeros": _zeros, "ones": _ones,
    "ones_like": _ones, "new_ones": _ones, "sum": _sum, "cumsum": _sum, "prod": _prod, "cumprod": _prod, "mm": _matmul,
    "bmm": _matmul, "matmul": _matmul, "linear": _matmul,
    "addmm": _matmul, "baddbmm": _matmul, "dot": _matmul, "mv": _matmul, "scatter_add": _scattered_sum,
    "scatter_reduce": _scattered_sum, "index_add": _scattered_sum, "index_put": _put,
}  # fmt: skip
