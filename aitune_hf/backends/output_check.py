"""Are these outputs about those of another way to compute the same? Finds mistakes, and lets rounding pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["first_difference"]

#: What is smaller is taken for zero.
_TINY = 1e-5


def first_difference(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], tolerance: float, *, exact_integers: bool = False
) -> str | None:
    """None if all outputs are alike, else a sentence about the first that is not.

    Args:
        got, want: outputs to look at, and what they should be.
        tolerance: how far values may be apart, as a part of the largest finite one of the output. Infinite: they need only be
            numbers.
        exact_integers: compare integers and booleans too. They often follow from values that may differ, as an index of
            the largest does.
    """
    if len(got) != len(want):
        return f"there are {len(got)} outputs, and should be {len(want)}"
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        problem = _difference(ours, theirs, tolerance, exact_integers)
        if problem:
            return f"output {index} {problem}"
    return None


def _difference(got: torch.Tensor, want: torch.Tensor, tolerance: float, exact_integers: bool) -> str | None:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"is {got.dtype}{list(got.shape)}, and should be {want.dtype}{list(want.shape)}"
    if not want.is_floating_point():
        return "holds other values" if exact_integers and not torch.equal(got, want) else None
    finite = want.isfinite()
    ours, theirs = got[finite].double(), want[finite].double()
    if not theirs.numel():
        return None
    largest, error = float(theirs.abs().max()), float((ours - theirs).abs().max())
    if error <= tolerance * max(largest, _TINY) + _TINY:  # What is not a number never is.
        return None
    return f"differs by {error:.3g}, where the largest value is {largest:.3g}"
