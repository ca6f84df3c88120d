"""Which of a program's tensors the constants of a compiled form of it are, told by their values.

Both sides are probes (:mod:`aitune_hf.backends.probes`): random, so that equal values mean equal origin. A constant may
be a weight as it is, one that was cast to another floating point type, one whose axes were permuted, or several of
these, with axes split or merged on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Origin", "TensorIndex", "apply_origin", "same_bits"]

#: Elements looked at before two tensors are compared in full.
_SAMPLES = 64
#: Up to so many elements, chance may make two different origins look equal, so all of them are collected.
_FEW = 64
#: More axes than this have too many orders to try.
_MAX_RANK = 6
#: What is equal for tensors that may be equal.
_Key = Callable[[torch.Tensor], Hashable]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, kw_only=True, order=True)
class Origin:
    """Where the values of a constant come from: ``weight.reshape(split).permute(axes)``, in the constant's own shape.

    Attributes:
        weight: name of the tensor.
        split, axes: empty where the order of the values stays.
    """

    weight: str
    split: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()


def apply_origin(origin: Origin, tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor`` in the order that ``origin`` tells; a view where that is possible."""
    return tensor.reshape(origin.split).permute(origin.axes) if origin.axes else tensor


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors have the same type and, in row-major order, the same bits; NaNs and signed zeros count."""
    if first.dtype != second.dtype or first.numel() != second.numel():
        return False
    return torch.equal(_bits(first), _bits(second))


class TensorIndex:
    """Tensors by their values.

    Args:
        tensors: name → tensor.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        self._sizes: dict[int, list[str]] = {}
        for name, tensor in sorted(self._tensors.items()):
            self._sizes.setdefault(tensor.numel(), []).append(name)
        self._tables: dict[tuple[_Key, int, torch.dtype], dict[Hashable, list[str]]] = {}

    def origins(self, constant: torch.Tensor) -> set[Origin]:
        """All origins among these tensors that ``constant`` can have; empty if it has none, or no values."""
        count = constant.numel()
        if count == 0 or count not in self._sizes:
            return set()
        names = self._alike(_sampled, constant)
        found = {Origin(weight=name) for name in names if same_bits(self._cast(name, constant.dtype), constant)}
        if count > 1 and (count <= _FEW or not found):
            for name in self._alike(_content, constant):
                found |= _reorderings(name, self._cast(name, constant.dtype), constant)
        return found

    def _alike(self, key: _Key, constant: torch.Tensor) -> list[str]:
        """Names of the tensors that have the size of ``constant`` and, cast to its type, its ``key``."""
        at = (key, constant.numel(), constant.dtype)
        if at not in self._tables:
            table = self._tables[at] = {}
            for name in self._sizes[constant.numel()]:
                if _castable(self._tensors[name].dtype, constant.dtype):
                    table.setdefault(key(self._cast(name, constant.dtype)), []).append(name)
        return self._tables[at].get(key(constant), [])

    def _cast(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._tensors[name].to(dtype)


def _castable(source: torch.dtype, target: torch.dtype) -> bool:
    return source == target or (source.is_floating_point and target.is_floating_point)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.contiguous().reshape(-1)
    return plain.view(_BITS[plain.element_size()])


def _places(count: int) -> torch.Tensor:
    return torch.linspace(0, count - 1, min(count, _SAMPLES), dtype=torch.float64).long()


def _sampled(tensor: torch.Tensor) -> bytes:
    return _bits(_at(tensor, _places(tensor.numel()))).numpy().tobytes()


def _content(tensor: torch.Tensor) -> tuple[int, int]:
    """A hash of a tensor's values that does not depend on their order."""
    bits = _bits(tensor)
    total, squares = 0, 0
    for part in torch.split(bits, 1 << 22):  # A copy in 64 bits of all of it could be too large.
        wide = part.long()
        mixed = (wide ^ (wide >> 7)) * 0x2545F4914F6CDD1D
        total += int(wide.sum())
        squares += int((mixed ^ (mixed >> 29)).sum())
    return total, squares


def _at(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The elements at ``places`` in row-major order, without a copy of a tensor that is not contiguous."""
    index = []
    for size in reversed(tensor.shape):
        index.append(places % size)
        places = places // size
    return tensor[tuple(reversed(index))] if index else tensor.reshape(1)


def _reorderings(name: str, weight: torch.Tensor, constant: torch.Tensor) -> set[Origin]:
    places = _places(constant.numel())
    want = _bits(_at(constant, places))
    found = set()
    for origin in _orders(name, _long(weight.shape), _long(constant.shape)):
        view = apply_origin(origin, weight)
        if torch.equal(_bits(_at(view, places)), want) and same_bits(view, constant):
            found.add(origin)
            if constant.numel() > _FEW:
                break
    return found


def _long(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without axes of size 1."""
    return tuple(size for size in shape if size != 1)


def _orders(name: str, weight: tuple[int, ...], constant: tuple[int, ...]) -> Iterator[Origin]:
    """The orders of axes to try: of the weight's own, then of those that the constant's are."""
    plain = set()
    if len(weight) <= _MAX_RANK:
        for axes in itertools.permutations(range(len(weight))):
            plain.add(Origin(weight=name, split=weight, axes=axes))
            if axes != tuple(sorted(axes)):
                yield Origin(weight=name, split=weight, axes=axes)
    if len(constant) <= _MAX_RANK:
        for order in itertools.permutations(range(len(constant))):
            axes = tuple(order.index(axis) for axis in range(len(order)))
            origin = Origin(weight=name, split=tuple(constant[axis] for axis in order), axes=axes)
            if axes != tuple(sorted(axes)) and origin not in plain:
                yield origin
