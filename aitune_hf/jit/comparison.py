"""Is an engine's output the eager output?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aitune_hf.config import Tolerance

__all__ = ["LEAST_COSINE", "compare_loosely", "compare_outputs", "default_tolerance"]

#: An output of a lossy engine that is less like eager's than this is broken, whatever budget the user gives.
LEAST_COSINE = 0.9

_TOLERANCES = {
    torch.float64: Tolerance(atol=1e-7, rtol=1e-6),
    torch.float32: Tolerance(atol=1e-4, rtol=1e-4),
    torch.float16: Tolerance(atol=5e-3, rtol=5e-3),
    torch.bfloat16: Tolerance(atol=3e-2, rtol=3e-2),
}


def default_tolerance(dtype: torch.dtype) -> Tolerance:
    """The tolerance for outputs of ``dtype``; exact for integers and booleans."""
    return _TOLERANCES.get(dtype, Tolerance(atol=0.0, rtol=0.0))


def compare_outputs(
    engine: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], tolerance: Tolerance | None = None
) -> tuple[float, str | None]:
    """Compare tensor leaves.

    Returns:
        The largest absolute difference where both are finite, and None or a sentence that says what is wrong.
    """
    if len(engine) != len(eager):
        return float("inf"), f"{len(engine)} output tensors, eager gives {len(eager)}"
    worst = 0.0
    for index, (ours, theirs) in enumerate(zip(engine, eager, strict=True)):
        error, problem = _compare(ours, theirs, tolerance)
        worst = max(worst, error)
        if problem:
            return worst, f"output {index}: {problem}"
    return worst, None


def compare_loosely(engine: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> tuple[float, float, str | None]:
    """Compare tensor leaves of an engine that is lossy by design: is it sane at all?

    How good it is, is measured on what the whole pipeline gives.

    Returns:
        The largest absolute difference, the smallest cosine similarity of an output to eager's, and None or a sentence
        that says what is wrong.
    """
    if len(engine) != len(eager):
        return float("inf"), -1.0, f"{len(engine)} output tensors, eager gives {len(eager)}"
    worst, least = 0.0, 1.0
    for index, (ours, theirs) in enumerate(zip(engine, eager, strict=True)):
        problem = _form_mismatch(ours, theirs)
        if problem:
            return float("inf"), -1.0, f"output {index}: {problem}"
        if not theirs.numel() or not theirs.dtype.is_floating_point:
            continue  # Integers (indices, masks) follow from values that may differ.
        ours, theirs = ours.double(), theirs.double()
        finite = torch.isfinite(theirs)
        if not bool(torch.isfinite(ours[finite]).all()):
            return float("inf"), -1.0, f"output {index}: not finite where eager is"
        ours, theirs = ours[finite], theirs[finite]
        worst = max(worst, float((ours - theirs).abs().max())) if theirs.numel() else worst
        cosine = _cosine(ours, theirs)
        least = min(least, cosine)
        if cosine < LEAST_COSINE:
            return worst, least, f"output {index}: cosine similarity {cosine:.3f} to eager's, under {LEAST_COSINE}"
    return worst, least, None


def _cosine(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    lengths = float(ours.norm()), float(theirs.norm())
    if not all(lengths):
        return 1.0 if not any(lengths) else 0.0
    return float(torch.dot(ours, theirs)) / (lengths[0] * lengths[1])


def _form_mismatch(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    for what in ("shape", "dtype", "device"):
        if getattr(ours, what) != getattr(theirs, what):
            return f"{what} {getattr(ours, what)}, eager gives {getattr(theirs, what)}"
    return None


def _compare(ours: torch.Tensor, theirs: torch.Tensor, tolerance: Tolerance | None) -> tuple[float, str | None]:
    problem = _form_mismatch(ours, theirs)
    if problem:
        return float("inf"), problem
    if ours.numel() == 0:
        return 0.0, None
    if not ours.dtype.is_floating_point and not ours.dtype.is_complex:
        equal = torch.equal(ours, theirs)
        return (0.0, None) if equal else (float("inf"), "values differ from eager")
    limits = tolerance or default_tolerance(ours.dtype)
    wide = torch.complex128 if ours.dtype.is_complex else torch.float64
    ours, theirs = ours.to(wide), theirs.to(wide)
    finite = torch.isfinite(theirs)
    # Where eager is not finite the engine must be the same: nan for nan, inf of the same sign.
    odd_ours, odd_theirs = ours[~finite], theirs[~finite]
    if not torch.equal(torch.nan_to_num(odd_ours, nan=1.5), torch.nan_to_num(odd_theirs, nan=1.5)):
        return float("inf"), "not finite in other places than eager"
    if not bool(torch.isfinite(ours[finite]).all()):
        return float("inf"), "not finite where eager is"
    difference = (ours[finite] - theirs[finite]).abs()
    if difference.numel() == 0:
        return 0.0, None
    size = theirs[finite].abs()
    rms = float(size.square().mean().sqrt())
    allowed = limits.atol * max(1.0, rms) + limits.rtol * size
    worst = float(difference.max())
    if bool((difference > allowed).any()):
        share = float((difference > allowed).double().mean())
        return worst, f"differs from eager by up to {worst:.3g} ({share:.2%} of the elements out of tolerance)"
    return worst, None
