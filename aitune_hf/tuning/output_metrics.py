"""How near are two final outputs of a pipeline? Images, arrays, tensors, and whatever holds them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch

from aitune_hf.errors import SampleError
from aitune_hf.quality import QualityBudget

__all__ = ["final_arrays", "kept_output", "measure"]

Array = Any  # numpy's own type has parameters that say nothing here.
#: Reported for images that are equal.
PERFECT_DB = 200.0


def final_arrays(output: Any) -> list[Array]:
    """The numbers in an output, as arrays, in a fixed order.

    Of PIL images, arrays, tensors, numbers, and of lists, dicts, dataclasses and output classes of these. What else is
    in it (texts, flags, None) is left out.
    """
    return list(_arrays(output, depth=0))


def _arrays(value: Any, depth: int) -> Iterator[Array]:
    if value is None or isinstance(value, (str, bytes, bool)) or depth > 16:
        return
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        yield (plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain).numpy().copy()
    elif isinstance(value, numpy.ndarray):
        if value.dtype.kind in "biufc":
            yield value.copy()
        else:
            for child in value.tolist():
                yield from _arrays(child, depth + 1)
    elif isinstance(value, (int, float, complex, numpy.generic)):
        yield numpy.asarray(value)
    elif _is_pil_image(value):
        yield numpy.asarray(value).copy()
    elif isinstance(value, Mapping):
        for name in value:
            yield from _arrays(value[name], depth + 1)
    elif isinstance(value, (list, tuple)):
        numbers = _number_table(value)
        if numbers is not None:
            yield numbers
        else:
            for child in value:
                yield from _arrays(child, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from _arrays(getattr(value, one.name), depth + 1)


def _number_table(value: Any) -> Array | None:
    """Nested lists of numbers, as some pipelines give embeddings, as one array; None for other lists, or ragged ones."""
    first = value
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        return None
    try:
        table = numpy.asarray(value)
    except ValueError:
        return None
    return table if table.dtype.kind in "iuf" else None


def _is_pil_image(value: Any) -> bool:
    """By name along the class hierarchy: nothing of PIL is imported for it."""
    return any(cls.__name__ == "Image" and cls.__module__ == "PIL.Image" for cls in type(value).__mro__)


def kept_output(output: Any, budget: QualityBudget) -> Any:
    """What of an output must be kept to compare it later: its arrays, or for a metric of the user's the output itself."""
    return output if callable(budget.metric) else final_arrays(output)


def measure(budget: QualityBudget, eager: Any, tuned: Any) -> float:
    """The budget's metric of two outputs that went through :func:`kept_output`.

    Raises:
        SampleError: if there is nothing in them that could be compared.
    """
    if callable(budget.metric):
        return float(budget.metric(eager, tuned))
    if not eager:
        raise SampleError(f"the outputs hold no image, array or tensor, so that {budget.name} cannot be measured")
    if [array.shape for array in eager] != [array.shape for array in tuned]:
        return math.nan
    return _METRICS[budget.metric](eager, tuned)


def _psnr(eager: list[Array], tuned: list[Array]) -> float:
    """The worst over the arrays. The peak is 255 for bytes, 1 for floats."""
    found = []
    for one, other in zip(eager, tuned, strict=True):
        peak = 255.0 if one.dtype == numpy.uint8 else 1.0
        error = float(numpy.mean(numpy.square(_wide(one) - _wide(other)))) if one.size else 0.0
        decibels = 10 * math.log10(peak**2 / error) if error else PERFECT_DB
        found.append(PERFECT_DB if decibels > PERFECT_DB else decibels)  # Not `min`, which may drop a NaN.
    return _least(found)


def _cosine(eager: list[Array], tuned: list[Array]) -> float:
    """The worst over the arrays and, of arrays of several vectors, over the vectors along the last axis."""
    found = []
    for one, other in zip(eager, tuned, strict=True):
        rows = [_wide(array).reshape(-1, array.shape[-1] if array.ndim else 1) for array in (one, other)]
        dots = (rows[0] * rows[1]).sum(-1)
        lengths = [numpy.sqrt(numpy.square(row).sum(-1)) for row in rows]
        both_zero = (lengths[0] == 0) & (lengths[1] == 0)
        product = lengths[0] * lengths[1]
        cosines = numpy.where(both_zero, 1.0, dots / numpy.where(product == 0, 1.0, product))
        found += cosines.tolist()
    return _least(found)


def _max_abs(eager: list[Array], tuned: list[Array]) -> float:
    found = [float(numpy.abs(_wide(a) - _wide(b)).max()) for a, b in zip(eager, tuned, strict=True) if a.size]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _agreement(eager: list[Array], tuned: list[Array]) -> float:
    """The share of positions with the same arg-maximum; of integers, with the same value."""
    equal: list[Array] = []
    for one, other in zip(eager, tuned, strict=True):
        if one.dtype.kind in "iub" or not one.ndim:
            equal.append((one == other).reshape(-1))
        elif one.size:
            equal.append((one.argmax(-1) == other.argmax(-1)).reshape(-1))
    return float(numpy.concatenate(equal).mean()) if equal else 1.0


def _wide(array: Array) -> Array:
    return array.astype(numpy.complex128 if array.dtype.kind == "c" else numpy.float64)


def _least(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values, default=math.nan)


_METRICS: Mapping[str, Callable[[list[Array], list[Array]], float]] = {
    "psnr": _psnr,
    "cosine": _cosine,
    "max_abs": _max_abs,
    "agreement": _agreement,
}
