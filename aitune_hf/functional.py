"""Tuning as functions of any pipeline or module, for objects that this package did not make."""

from __future__ import annotations

from typing import Any

from aitune_hf.config import TuneConfig
from aitune_hf.jit.patcher import unpatch_tree
from aitune_hf.jit.statistics import TuningStats
from aitune_hf.pipeline import modules_of, tune_target
from aitune_hf.tuning.drive import stats_of
from aitune_hf.tuning.report import TuningReport

__all__ = ["stats", "tune", "untune"]


def tune(target: Any, samples: Any, config: TuneConfig | None = None, **call_kwargs: Any) -> TuningReport:
    """Tune a Diffusers pipeline, a Transformers pipeline or an ``nn.Module`` in place.

    Args:
        target: what to tune. A module is called under ``torch.no_grad()``, and is tuned for such calls.
        samples: prompts, tensors, dicts of call arguments, ``(args, kwargs)`` tuples, or callables that take the target.
        config: settings; ``TuneConfig.from_env()`` if None.
        call_kwargs: given to every call.

    Raises:
        SampleError: if there is no sample, or the target fails on one.
        ConfigError: if ``target`` is neither a pipeline nor a module.
    """
    return tune_target(target, samples, config or TuneConfig.from_env(), **call_kwargs)


def untune(target: Any) -> None:
    """Make a target exactly what it was before :func:`tune`. Engines stay in the cache."""
    for module in modules_of(target).values():
        unpatch_tree(module)


def stats(target: Any) -> TuningStats:
    """Counters of a tuned target: calls answered by engines and by eager with the reasons, builds, loads."""
    return stats_of(modules_of(target))
