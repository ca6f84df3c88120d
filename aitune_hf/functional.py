"""Tuning as functions of any pipeline or module, for objects that this package did not make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aitune_hf.config import TuneConfig
from aitune_hf.jit.patcher import unpatch_tree
from aitune_hf.jit.statistics import TuningStats
from aitune_hf.target import build_target_for, modules_of, pull_target, push_target, tune_target
from aitune_hf.tuning.drive import stats_of
from aitune_hf.tuning.report import TuningReport

if TYPE_CHECKING:
    from aitune_hf.hub.outcome import PullResult
    from aitune_hf.hub.publish import PushResult
    from aitune_hf.tuning.target_report import BuildForReport

__all__ = ["build_for", "pull_tuned", "push_tuned", "stats", "tune", "untune"]


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


def build_for(
    target: Any,
    samples: Any,
    targets: Sequence[str] = ("rtx:sm86", "rtx:sm89", "rtx:sm120"),
    config: TuneConfig | None = None,
    **call_kwargs: Any,
) -> BuildForReport:
    """Build engines for GPUs that are not here into the cache, from calls recorded on this machine.

    Nothing is installed, and nothing is timed or checked: the first machine with such a GPU that loads this target
    with this cache (or one that it was pushed to) takes the engines over and checks each against eager at its first
    call. Load the target in the type it is to run in over there: engines are for one type.

    Args:
        target: a Diffusers pipeline, a Transformers pipeline or an ``nn.Module``, on the CPU.
        samples: as for :func:`tune`.
        targets: ``"rtx:sm89"`` is TensorRT-RTX for GPUs of compute capability 8.9. It needs no GPU, and no driver.
        config: settings; ``TuneConfig.from_env()`` if None.
        call_kwargs: given to every call.

    Returns:
        What was built, and what was not and why. ``print`` it.

    Raises:
        ConfigError: if a target cannot be built for here, with what to install.
        SampleError: if there is no sample, or the target fails on one.
    """
    return build_target_for(target, samples, targets, config or TuneConfig.from_env(), **call_kwargs)


def untune(target: Any) -> None:
    """Make a target exactly what it was before :func:`tune`. Engines stay in the cache."""
    for module in modules_of(target).values():
        unpatch_tree(module)


def stats(target: Any) -> TuningStats:
    """Counters of a tuned target: calls answered by engines and by eager with the reasons, builds, loads."""
    return stats_of(modules_of(target))


def push_tuned(target: Any, repo: str | Path, config: TuneConfig | None = None, **options: Any) -> PushResult:
    """Share the engines that a target uses.

    Args:
        config: the settings it was tuned with.
        options: ``private``, ``revision``, ``message``, ``create_pr``, ``token``, ``force``, ``signing_key``, as of
            :meth:`aitune_hf.pipeline.SharingMixin.push_to_hub`.
    """
    return push_target(target, repo, config or TuneConfig.from_env(), **options)


def pull_tuned(
    target: Any, repos: str | Path | Sequence[str | Path], config: TuneConfig | None = None, **options: Any
) -> PullResult:
    """Take over engines that others tuned for a target's structure.

    Args:
        config: settings of the tuning.
        options: ``revision``, ``trust``, ``token``, ``local_files_only``, as of
            :meth:`aitune_hf.pipeline.SharingMixin.pull_tuned`.
    """
    return pull_target(target, repos, config or TuneConfig.from_env(), **options)
