"""Every setting of a tuning, in one frozen value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from aitune_hf.errors import ConfigError
from aitune_hf.quality import QualityBudget
from aitune_hf.strategy import FirstWorking, LatencyBudget, MaxThroughput, OneBackend, TuneStrategy

if TYPE_CHECKING:
    from aitune_hf.backends.base import Backend
    from aitune_hf.graph.dynamic_shapes import DynamicShapes

__all__ = ["Effort", "Granularity", "Mode", "Precision", "StrategyName", "Tolerance", "TuneConfig"]

StrategyName = Literal["max_throughput", "latency_budget", "first_working", "one_backend"]
Effort = Literal["fast", "balanced", "max"]
Precision = Literal["strict", "relaxed"]
Granularity = Literal["auto", "whole", "blocks"]
Mode = Literal["eager", "deferred", "inspect"]

_ENV_PREFIX = "AITUNE_HF_"


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far an engine's output may be from eager's: ``|engine - eager| <= atol * max(1, rms(eager)) + rtol * |eager|``.

    The root mean square scales ``atol`` for outputs that are large as a whole.
    """

    atol: float
    rtol: float


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Settings of a tuning. Immutable; ``dataclasses.replace`` makes variants.

    Attributes:
        cache_dir: folder of the engine cache; None is ``$AITUNE_HF_CACHE``, else ``$HF_HOME/aitune``.
        backends: names or :class:`~aitune_hf.backends.Backend` objects to try, the cheapest recipes
            first; None is all that are known.
        strategy: a :class:`~aitune_hf.strategy.TuneStrategy` or its name: ``"max_throughput"`` takes the fastest right
            engine if it beats eager; ``"latency_budget"`` stops at the first that meets ``latency_budget_ms``;
            ``"first_working"`` takes the first that is right and times nothing; ``"one_backend"`` takes that of the one
            backend in ``backends``, or fails.
        latency_budget_ms: for ``"latency_budget"``: what one call of a module may take.
        effort: ``"fast"`` tries the plainest recipe or so of each backend, ``"balanced"`` what usually pays, ``"max"`` all
            of them, and measures a range of batch sizes.
        precision: ``"strict"`` tries only what differs from eager by rounding; ``"relaxed"`` lossy recipes too, such as
            bf16 or int8, within ``quality``.
        quality: what the pipeline's final outputs must keep to where precision is relaxed.
        batch_sizes: batch sizes at which a graph whose batch varies is timed, so that eager answers those at which it
            is faster; None is 1, 2, 4 and 8 with ``effort="max"``, else none.
        tolerance: replaces the per-dtype tolerance of the correctness check.
        min_speedup: an engine wins only if eager takes at least this many times as long.
        mode: ``"eager"`` tunes a module after ``min_samples`` calls, ``"deferred"`` at an explicit mark,
            ``"inspect"`` only records and reports.
        granularity: ``"whole"`` tunes a module as one engine, ``"blocks"`` its repeated blocks, one engine for all of equal
            structure, and ``"auto"`` takes blocks where many equal ones take most of the time.
        min_samples: calls of a module before it is tuned in eager mode.
        batch_axis_required: in eager mode, tune only once some axis was seen with two sizes.
        max_depth_level: deepest level of the call hierarchy that is tuned; 0 is the top. None is no limit.
        min_parameters: modules with fewer parameters stay eager.
        min_share: modules that take a smaller share of the recorded time stay eager.
        skip_modules: class names; such a module and all below it are left alone.
        patch_exclude: dotted prefixes of a class's module, or exact qualified class names, that are never
            intercepted. Added to the built-in list, which cannot be shortened.
        detect_graph_breaks: try to capture a module as one graph before anything is built for it.
        dynamic_shapes: module path (``"unet"``; ``""`` for the tuned module itself) → sizes its inputs may have.
        dry_run: go through all steps without building; for trying a configuration out.
        dry_run_failure_probability: how often a dry run pretends that a module fails, 0 to 1.
        time_budget_s: start no further build after this many seconds; None is no limit.
        candidate_timeout_s: end the build of one candidate after this many seconds, half an hour unless told otherwise;
            None is no limit. Only builds in a child process can be ended (``Backend.isolated``), those in this process run
            to their end.
        timing_pairs: pairs of timed runs per candidate and shape.
        portable: build CPU engines for every x86-64-v3 CPU (AVX2) instead of this very one, to share them between machines.
        max_cache_bytes: after a build, remove the engines unused the longest beyond this many bytes; None is no limit.
        max_sample_bytes: recorded tensors beyond this many bytes per graph go to a temporary file.
        progress: show progress bars.
        debug: raise what only a fault of this package (or of a third party's backend) can raise, instead of logging it
            with its traceback and leaving the module eager.
    """

    cache_dir: Path | None = None
    backends: tuple[str | Backend, ...] | None = None
    strategy: TuneStrategy | StrategyName = "max_throughput"
    latency_budget_ms: float | None = None
    effort: Effort = "balanced"
    precision: Precision = "strict"
    quality: QualityBudget | None = None
    batch_sizes: tuple[int, ...] | None = None
    tolerance: Tolerance | None = None
    min_speedup: float = 1.02
    mode: Mode = "eager"
    granularity: Granularity = "auto"
    min_samples: int = 2
    batch_axis_required: bool = False
    max_depth_level: int | None = None
    min_parameters: int = 0
    min_share: float = 0.01
    skip_modules: tuple[str, ...] = ()
    patch_exclude: tuple[str, ...] = ()
    detect_graph_breaks: bool = False
    dynamic_shapes: Mapping[str, DynamicShapes] = field(default_factory=dict)
    dry_run: bool = False
    dry_run_failure_probability: float = 0.0
    time_budget_s: float | None = None
    candidate_timeout_s: float | None = 1800.0
    timing_pairs: int = 15
    portable: bool = False
    max_cache_bytes: int | None = None
    max_sample_bytes: int = 1 << 30
    progress: bool = True
    debug: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.cache_dir, str):
            object.__setattr__(self, "cache_dir", Path(self.cache_dir).expanduser())
        for name in ("backends", "skip_modules", "patch_exclude", "batch_sizes"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ConfigError(f"{name} takes a list, got the string {value!r}")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        self._check()
        self.chosen_strategy  # noqa: B018 - a strategy that lacks something is an error at once.

    @property
    def chosen_strategy(self) -> TuneStrategy:
        """The strategy as an object.

        Raises:
            ConfigError: if its name alone does not say enough.
        """
        if not isinstance(self.strategy, str):
            return self.strategy
        if self.strategy == "latency_budget":
            if self.latency_budget_ms is None:
                raise ConfigError("strategy='latency_budget' needs latency_budget_ms, or give LatencyBudget(...)")
            return LatencyBudget(latency_budget_ms=self.latency_budget_ms)
        if self.strategy == "one_backend" and len(self.backends or ()) != 1:
            raise ConfigError(
                "strategy='one_backend' needs exactly one name in backends, or give OneBackend(backend=...)"
            )
        kinds: dict[str, type[TuneStrategy]] = {kind.name: kind for kind in (MaxThroughput, FirstWorking, OneBackend)}
        return kinds[self.strategy]()

    @property
    def swept_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes at which graphs whose batch varies are timed."""
        if self.batch_sizes is not None:
            return self.batch_sizes
        return (1, 2, 4, 8) if self.effort == "max" else ()

    def _check(self) -> None:
        problems = [
            (self.mode not in get_args(Mode), f"mode must be one of {get_args(Mode)}, got {self.mode!r}"),
            (
                self.granularity not in get_args(Granularity),
                f"granularity must be one of {get_args(Granularity)}, got {self.granularity!r}",
            ),
            (
                not isinstance(self.strategy, TuneStrategy) and self.strategy not in get_args(StrategyName),
                f"strategy must be a TuneStrategy or one of {get_args(StrategyName)}, got {self.strategy!r}",
            ),
            (self.effort not in get_args(Effort), f"effort must be one of {get_args(Effort)}, got {self.effort!r}"),
            (
                self.precision not in get_args(Precision),
                f"precision must be one of {get_args(Precision)}, got {self.precision!r}",
            ),
            (
                self.precision == "relaxed" and self.quality is None,
                "precision='relaxed' needs a budget, such as quality=QualityBudget(metric='cosine', least=0.999): "
                "without one nothing says how far the outputs may be from eager's",
            ),
            (
                self.candidate_timeout_s is not None and self.candidate_timeout_s <= 0,
                f"candidate_timeout_s must be more than 0, got {self.candidate_timeout_s}",
            ),
            (
                any(not isinstance(size, int) or size < 1 for size in self.batch_sizes or ()),
                f"batch_sizes must be whole numbers of at least 1, got {self.batch_sizes}",
            ),
            (self.min_samples < 1, f"min_samples must be at least 1, got {self.min_samples}"),
            (self.min_speedup < 1.0, f"min_speedup must be at least 1.0, got {self.min_speedup}"),
            (not 0 <= self.min_share < 1, f"min_share must be in [0, 1), got {self.min_share}"),
            (self.timing_pairs < 3, f"timing_pairs must be at least 3, got {self.timing_pairs}"),
            (
                self.max_depth_level is not None and self.max_depth_level < 0,
                f"max_depth_level must not be negative, got {self.max_depth_level}",
            ),
            (
                not 0 <= self.dry_run_failure_probability <= 1,
                f"dry_run_failure_probability must be in [0, 1], got {self.dry_run_failure_probability}",
            ),
        ]
        for wrong, message in problems:
            if wrong:
                raise ConfigError(message)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> TuneConfig:
        """Read ``AITUNE_HF_<FIELD>`` for fields with plain values, once; ``overrides`` win.

        Lists are separated by commas, booleans are ``0``/``1``/``true``/``false``.

        Raises:
            ConfigError: if a variable cannot be read or names no field.
        """
        environ = os.environ if environ is None else environ
        kinds = {item.name: str(item.type) for item in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            name = variable.removeprefix(_ENV_PREFIX).lower()
            if not variable.startswith(_ENV_PREFIX) or name in ("cache",):
                continue
            if name not in kinds:
                raise ConfigError(f"{variable} names no setting; settings are {', '.join(sorted(kinds))}")
            values[name] = _parse(variable, text, kinds[name])
        return replace(cls(**values), **overrides)


def _parse(variable: str, text: str, kind: str) -> Any:
    try:
        if kind.startswith("bool"):
            return {"1": True, "true": True, "0": False, "false": False}[text.strip().lower()]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
        if kind.startswith("tuple[int"):
            return tuple(int(part) for part in text.split(",") if part.strip())
        if kind.startswith("tuple"):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if kind.startswith(("Path", "Mode", "TuneStrategy", "Effort", "Precision", "Granularity", "str")):
            return text
    except (KeyError, ValueError):
        pass
    raise ConfigError(f"{variable}={text!r} cannot be read as {kind}")
