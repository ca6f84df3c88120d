"""Lossy engines stay only while the pipeline's final outputs keep within the user's budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aitune_hf.jit.preserved import preserved
from aitune_hf.quality import QualityBudget
from aitune_hf.tuning.lossy import LossyEngine
from aitune_hf.tuning.output_metrics import kept_output, measure
from aitune_hf.tuning.progress import Progress
from aitune_hf.tuning.verdict_book import VerdictBook

__all__ = ["QualityOutcome", "hold_to_budget"]


@dataclass(frozen=True, kw_only=True)
class QualityOutcome:
    """What relaxed precision came to.

    Attributes:
        budget: the bound, in words.
        value: the worst measured over all samples, with the engines that are in use now.
        admitted: lossy engines in use, ``module: candidate``.
        taken_back: those that others took the place of.
    """

    budget: str
    value: float
    admitted: Sequence[str] = field(default_factory=list)
    taken_back: Sequence[str] = field(default_factory=list)

    def __str__(self) -> str:
        admitted = ", ".join(self.admitted) or "none"
        taken_back = f"; taken back: {', '.join(self.taken_back)}" if self.taken_back else ""
        return f"quality: {self.value:.9g} (asked for {self.budget}); lossy engines: {admitted}{taken_back}"


def hold_to_budget(
    lossy: Sequence[LossyEngine],
    budget: QualityBudget,
    drive: Callable[[Any], object],
    samples: Sequence[Any],
    eager: Sequence[Any],
    book: VerdictBook,
    progress: Progress,
) -> QualityOutcome:
    """Run all samples tuned; while the outputs are too far from eager's, take lossy engines back, the worst first.

    In place of each comes the next best one that is nearer to eager, which may be lossy too: the fastest combination that
    keeps to the budget is not looked for among all, but found step by step. Equal modules that share an engine go together.

    Args:
        eager: per sample, what :func:`~aitune_hf.tuning.output_metrics.kept_output` kept of eager's output.
    """
    left = list(lossy)
    taken_back: list[LossyEngine] = []
    while True:
        _check(left, drive, samples)
        value = _worst(budget, drive, samples, eager, progress)
        out = [one for one in left if one.failed is not None]  # Some may fail in use.
        if out:
            why = str(out[0].failed)
        elif not left or budget.holds(value):
            break
        else:
            worst = min(left, key=lambda one: one.similarity).engine
            out = [one for one in left if one.engine == worst]
            why = f"with it the pipeline's outputs missed the quality budget: {value:.9g}, asked for {budget}"
        for one in out:
            left.remove(one)
            taken_back.append(one)
            in_its_place = one.take_back(book, why)
            if in_its_place is not None:
                left.append(in_its_place)
    for one in left:
        one.admit(book, budget, value)
    return QualityOutcome(
        budget=str(budget),
        value=value,
        admitted=[one.label for one in left],
        taken_back=[one.label for one in taken_back],
    )


def _check(lossy: Sequence[LossyEngine], drive: Callable[[Any], object], samples: Sequence[Any]) -> None:
    """Run samples until each engine has had its first call, which eager answers, and which it is checked on."""
    for sample in samples:
        if all(one.is_checked for one in lossy):
            return
        with preserved():
            drive(sample)


def _worst(
    budget: QualityBudget,
    drive: Callable[[Any], object],
    samples: Sequence[Any],
    eager: Sequence[Any],
    progress: Progress,
) -> float:
    values: list[float] = []
    with progress.phase("measuring quality", len(samples), "sample") as bar:
        for sample, reference in zip(samples, eager, strict=True):
            with preserved():
                output = drive(sample)
            values.append(measure(budget, reference, kept_output(output, budget)))
            bar.update()
    return budget.worst(values)
