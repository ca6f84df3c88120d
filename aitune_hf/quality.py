"""How much of a pipeline's output quality a tuning with relaxed precision may give up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from aitune_hf.errors import ConfigError

__all__ = ["Metric", "QualityBudget"]

Metric = Literal["psnr", "cosine", "max_abs", "agreement"]


@dataclass(frozen=True, kw_only=True)
class QualityBudget:
    """A bound on how far a tuned pipeline's final outputs may be from eager's, over all samples.

    Attributes:
        metric: ``"psnr"`` in dB (images: PIL, arrays from 0 to 1, or uint8), ``"cosine"`` similarity (embeddings),
            ``"max_abs"``, the largest absolute difference, ``"agreement"``, the share of equal arg-maxima along the last
            axis, or a function of ``(eager_output, tuned_output)`` that returns a number.
        least: the smallest value that is good enough, for what is better when it is larger.
        most: the largest value that is good enough, for what is better when it is smaller.

    Raises:
        ConfigError: unless exactly the bound that the metric needs is given.
    """

    metric: Metric | Callable[[Any, Any], float]
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.metric) and self.metric not in get_args(Metric):
            raise ConfigError(f"metric must be one of {get_args(Metric)} or a function, got {self.metric!r}")
        if (self.least is None) == (self.most is None):
            raise ConfigError("a QualityBudget needs one of `least` and `most`")
        if not callable(self.metric) and (self.metric == "max_abs") != (self.most is not None):
            raise ConfigError(f"the metric {self.metric!r} needs `{'most' if self.metric == 'max_abs' else 'least'}`")

    @property
    def name(self) -> str:
        """The metric's name."""
        return getattr(self.metric, "__qualname__", "metric") if callable(self.metric) else self.metric

    def holds(self, value: float) -> bool:
        """True if a measured value is within the bound; a NaN never is."""
        return value >= self.least if self.least is not None else self.most is not None and value <= self.most

    def worst(self, values: list[float]) -> float:
        """The worst of several measured values; a NaN is worse than any."""
        odd = [value for value in values if value != value]
        return odd[0] if odd else (min(values) if self.least is not None else max(values))

    def __str__(self) -> str:
        return f"{self.name} >= {self.least:.10g}" if self.least is not None else f"{self.name} <= {self.most:.10g}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form; a function by its name."""
        where = f"{self.metric.__module__}." if callable(self.metric) else ""
        return {"metric": f"{where}{self.name}", "least": self.least, "most": self.most}
