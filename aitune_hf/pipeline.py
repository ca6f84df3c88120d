"""Pipelines that can be tuned: the real pipeline, with a few methods more."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from aitune_hf.config import TuneConfig
from aitune_hf.errors import AITuneError, ConfigError, PipelineLoadError
from aitune_hf.integrations import diffusers as hf_diffusers
from aitune_hf.integrations import transformers as hf_transformers
from aitune_hf.integrations.accelerate import current_rank
from aitune_hf.integrations.tuned_class import tuned_class
from aitune_hf.jit.patcher import unpatch_tree
from aitune_hf.jit.session import pipeline_call
from aitune_hf.jit.statistics import TuningStats
from aitune_hf.tuning.drive import restore_modules, stats_of, tune_modules
from aitune_hf.tuning.report import TuningReport
from aitune_hf.tuning.samples import driver, generators_restored, sample_list

__all__ = ["AITunePipeline", "TunedPipelineMixin", "load_message", "modules_of", "tune_target"]


def modules_of(target: Any) -> dict[str, nn.Module]:
    """The modules of a pipeline or module, by path; a bare module's path is empty.

    Raises:
        ConfigError: if ``target`` is neither.
    """
    if isinstance(target, nn.Module):
        return {"": target}
    if hf_diffusers.is_pipeline(target):
        return hf_diffusers.pipeline_modules(target)
    if hf_transformers.is_pipeline(target):
        return hf_transformers.pipeline_modules(target)
    raise ConfigError(
        f"cannot tune a {type(target).__module__}.{type(target).__qualname__}: give a Diffusers pipeline, a Transformers "
        "pipeline or an nn.Module"
    )


class TunedPipelineMixin:
    """What a tuned pipeline can do beyond its real class. All of it also works as functions of any pipeline."""

    _aitune_config: TuneConfig = TuneConfig()

    def _call_tuned(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with pipeline_call():
            return call(self, *args, **kwargs)

    def _move_tuned(self, move: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Engines are for one kind of device: after a move to another, take those that the cache has for it."""
        before = _device_types(self)
        moved = move(self, *args, **kwargs)
        if _device_types(self) != before:
            self.untune()
            restore_modules(modules_of(self), self._aitune_config)
        return moved

    def tune(self, samples: Any, config: TuneConfig | None = None, **call_kwargs: Any) -> TuningReport:
        """Record the pipeline on sample inputs, then make it faster where that can be done without changing its output.

        Args:
            samples: prompts, dicts of call arguments, ``(args, kwargs)`` tuples, or callables that take the pipeline.
            config: settings; those the pipeline was made with if None.
            call_kwargs: given to every call, such as ``num_inference_steps=4``.

        Returns:
            What was done. ``print`` it.

        Raises:
            SampleError: if there is no sample, or the pipeline fails on one. The pipeline is as it was.
        """
        if config is not None:
            self._aitune_config = config
        return tune_target(self, samples, self._aitune_config, **call_kwargs)

    def untune(self) -> None:
        """Make it exactly the pipeline from before. Engines stay in the cache."""
        for module in modules_of(self).values():
            unpatch_tree(module)

    def tuning_stats(self) -> TuningStats:
        """Counters: calls answered by engines and by eager with the reasons, builds, loads."""
        return stats_of(modules_of(self))


def _device_types(target: Any) -> set[str]:
    return {parameter.device.type for module in modules_of(target).values() for parameter in module.parameters()}


def tune_target(target: Any, samples: Any, config: TuneConfig, **call_kwargs: Any) -> TuningReport:
    """Tune a pipeline or module on samples; see :meth:`TunedPipelineMixin.tune`."""
    listed = sample_list(samples)
    roots = modules_of(target)
    with ExitStack() as kept:
        kept.enter_context(generators_restored(listed, call_kwargs))
        if hf_diffusers.is_pipeline(target):
            kept.enter_context(hf_diffusers.quiet_and_unchanged(target))
        elif isinstance(target, nn.Module):
            import torch

            kept.enter_context(torch.no_grad())
        return tune_modules(roots, driver(target, call_kwargs), listed, config, current_rank())


class AITunePipeline:
    """Makes pipelines that can be tuned. Never instantiated itself: what it returns is the real pipeline class."""

    def __init__(self) -> None:
        raise ConfigError("use AITunePipeline.from_pretrained(...) or AITunePipeline.from_pipe(...)")

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        task: str | None = None,
        config: TuneConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a pipeline as its own library does, and take over the engines that the local cache has for it.

        Args:
            pretrained_model_name_or_path: a folder, or a repository on the Hub.
            task: for a Transformers pipeline, its task, such as ``"feature-extraction"``. Without it the folder must
                hold a Diffusers pipeline.
            config: settings of the tuning.
            kwargs: passed on to the library's own loader.

        Returns:
            An instance of the real pipeline class with :class:`TunedPipelineMixin` mixed in.

        Raises:
            PipelineLoadError: if it cannot be found or loaded.
            ConfigError: if ``task`` is no task.
        """
        name = os.fspath(pretrained_model_name_or_path)
        _check_local(name, task)
        try:
            pipe = _load_transformers(name, task, kwargs) if task else _load_diffusers(name, kwargs)
        except AITuneError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise PipelineLoadError(load_message(name, error)) from error
        return _ready(pipe, config)

    @staticmethod
    def from_pipe(pipe: Any, *, config: TuneConfig | None = None) -> Any:
        """The same pipeline as one that can be tuned: it shares all components and settings with ``pipe``."""
        modules_of(pipe)
        if isinstance(pipe, nn.Module):
            raise ConfigError("this is a module, not a pipeline: use AITuneModel.from_model(...)")
        cls = tuned_class(TunedPipelineMixin, type(pipe))
        twin = object.__new__(cls)
        vars(twin).update(vars(pipe))
        return _ready(twin, config)


def _ready(pipe: Any, config: TuneConfig | None) -> Any:
    pipe._aitune_config = config or TuneConfig.from_env()
    restore_modules(modules_of(pipe), pipe._aitune_config)
    return pipe


def _load_diffusers(name: str, kwargs: dict[str, Any]) -> Any:
    cls = tuned_class(TunedPipelineMixin, hf_diffusers.pipeline_class(name, **kwargs))
    return cls.from_pretrained(name, **kwargs)


def _load_transformers(name: str, task: str, kwargs: dict[str, Any]) -> Any:
    try:
        base = hf_transformers.pipeline_class(task)
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from error
    return hf_transformers.load_pipeline(task, name, tuned_class(TunedPipelineMixin, base), **kwargs)


def _check_local(name: str, task: str | None) -> None:
    path = Path(name)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if looks_local and not path.exists():
        raise PipelineLoadError(
            f"there is no folder {name}; give an existing folder, or a Hub repository as 'owner/name'"
        )
    if path.is_dir() and task is None and not (path / hf_diffusers.INDEX_NAME).exists():
        hint = (
            "it holds a single model: pass task=... for a Transformers pipeline"
            if (path / "config.json").exists()
            else "is it the right folder?"
        )
        raise PipelineLoadError(f"{name} has no {hf_diffusers.INDEX_NAME}, so it is no Diffusers pipeline; {hint}")


def load_message(name: str, error: BaseException) -> str:
    """Why a pipeline or model could not be loaded, in one line, and what to do."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    hint = ""
    if not Path(name).exists():
        hint = (
            " HF_HUB_OFFLINE is set and it is not in the local Hub cache: unset it once, or give a folder."
            if offline
            else " Check the name, your connection, and `hf auth login` if it is private or gated."
        )
    return f"cannot load {name}: {first}{hint}"
