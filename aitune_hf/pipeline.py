"""Pipelines that can be tuned: the real pipeline, with a few methods more."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from aitune_hf.config import TuneConfig
from aitune_hf.errors import AITuneError, ConfigError, PipelineLoadError
from aitune_hf.integrations import diffusers as hf_diffusers
from aitune_hf.integrations import transformers as hf_transformers
from aitune_hf.integrations.tuned_class import tuned_class
from aitune_hf.jit.patcher import unpatch_tree
from aitune_hf.jit.session import pipeline_call
from aitune_hf.jit.statistics import TuningStats
from aitune_hf.target import (
    build_target_for,
    checked_sources,
    device_types,
    modules_of,
    pull_target,
    push_target,
    tune_target,
    weights_upload,
)
from aitune_hf.tuning.drive import restore_modules, stats_of
from aitune_hf.tuning.report import TuningReport

if TYPE_CHECKING:
    from aitune_hf.hub.outcome import PullResult
    from aitune_hf.hub.publish import PushResult
    from aitune_hf.tuning.target_report import BuildForReport

__all__ = ["AITunePipeline", "SharingMixin", "TunedPipelineMixin", "load_message"]


logger = logging.getLogger("aitune_hf")


class SharingMixin:
    """What tuned pipelines and models can do with the engines of others, and with their own for others."""

    _aitune_config: TuneConfig = TuneConfig()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        weights: bool = False,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        token: str | bool | None = None,
        force: bool = False,
        signing_key: bytes | None = None,
        **weights_options: Any,
    ) -> PushResult:
        """Share the engines this pipeline or model uses, in one commit on top of what is there.

        Unlike the method of this name that its own class may have, it uploads no weights unless it is told to.

        Args:
            repo_id: ``"owner/name"`` on the Hub (made if it is not there), or any URL that fsspec knows.
            weights: upload the weights too, as its own class does, once the engines are found to be there and may go.
            private: whether a repository that is made now is private.
            revision: branch to push to.
            token: as everywhere in huggingface_hub.
            force: publish engines of a private or gated base to a public repository; replace a damaged record, and
                engines that are there already.
            signing_key: private Ed25519 key as PEM text, to sign with; see ``SECURITY.md``.
            weights_options: with ``weights=True``, what else its own class's method takes (``safe_serialization``, …).

        Returns:
            What was added and what was there. ``print(result.summary())``.

        Raises:
            HubError: if there is nothing to push, it may not be pushed there, or the remote fails.
            ConfigError: if an argument is wrong, or its own class cannot upload the weights that way.
        """
        upload = None
        if weights:
            known = {
                "private": private,
                "revision": revision,
                "commit_message": commit_message,
                "create_pr": create_pr or None,
                "token": token,
            }
            given = {name: value for name, value in known.items() if value is not None}
            upload = weights_upload(getattr(super(), "push_to_hub", None), repo_id, {**given, **weights_options})
        elif weights_options:
            names = ", ".join(sorted(weights_options))
            raise ConfigError(
                f"push_to_hub shares engines and takes no {names}; with weights=True it uploads weights too"
            )
        return push_target(
            self,
            repo_id,
            self._aitune_config,
            private=private,
            revision=revision,
            message=commit_message,
            create_pr=create_pr,
            token=token,
            force=force,
            signing_key=signing_key,
            first=upload,
        )

    def pull_tuned(
        self,
        repo_id: str | Path | Sequence[str | Path],
        *,
        revision: str | None = None,
        trust: Any = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> PullResult:
        """Take over engines that others tuned for this structure, where they fit this machine and are trusted.

        Args:
            repo_id: ``"owner/name"``, ``"owner/name@<commit>"``, a folder, a URL, or a list of those, asked in order.
            revision: branch, tag or commit; the commit that ``trust`` pins if None and there is just one. At a commit
                that was pulled before, no request is made.
            trust: whose native engines may run here: None (nobody's), ``"owner/name@<commit>"``, a public key, … see
                :class:`aitune_hf.hub.trust.Trust`. Untrusted ones leave their recipe for the next ``tune``.
            local_files_only: make no requests.

        Returns:
            What was hit, what was missed and why. After some calls, ``result.confirm()`` says whether engines ran.

        Raises:
            ConfigError: if an argument is wrong. A Hub that fails is said in the result and in one warning.
        """
        return pull_target(
            self,
            repo_id,
            self._aitune_config,
            revision=revision,
            trust=trust,
            token=token,
            local_files_only=local_files_only,
        )


class TunedPipelineMixin(SharingMixin):
    """What a tuned pipeline can do beyond its real class. All of it also works as functions of any pipeline."""

    def _call_tuned(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with pipeline_call():
            return call(self, *args, **kwargs)

    def _move_tuned(self, move: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Engines are for one kind of device: after a move to another, take those that the cache has for it."""
        before = device_types(self)
        moved = move(self, *args, **kwargs)
        if device_types(self) != before:
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

    def build_for(
        self,
        samples: Any,
        targets: Sequence[str] = ("rtx:sm86", "rtx:sm89", "rtx:sm120"),
        config: TuneConfig | None = None,
        **call_kwargs: Any,
    ) -> BuildForReport:
        """Build engines for GPUs that are not here into the cache; see :func:`aitune_hf.build_for`."""
        return build_target_for(self, samples, targets, config or self._aitune_config, **call_kwargs)

    def untune(self) -> None:
        """Make it exactly the pipeline from before. Engines stay in the cache."""
        for module in modules_of(self).values():
            unpatch_tree(module)

    def tuning_stats(self) -> TuningStats:
        """Counters: calls answered by engines and by eager with the reasons, builds, loads."""
        return stats_of(modules_of(self))


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
        tuned: str | Path | Sequence[str | Path] | None = None,
        trust: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Load a pipeline as its own library does, and take over the engines that the local cache has for it.

        Args:
            pretrained_model_name_or_path: a folder, or a repository on the Hub.
            task: for a Transformers pipeline, its task, such as ``"feature-extraction"``. Without it the folder must
                hold a Diffusers pipeline.
            config: settings of the tuning.
            tuned: repositories, folders or URLs to pull engines from, as :meth:`SharingMixin.pull_tuned` does. One
                that fails is a warning, not an error.
            trust: whose native engines may run here; nobody's if None.
            kwargs: passed on to the library's own loader; ``token`` and ``local_files_only`` go for ``tuned`` as well.

        Returns:
            An instance of the real pipeline class with :class:`TunedPipelineMixin` mixed in.

        Raises:
            PipelineLoadError: if it cannot be found or loaded.
            ConfigError: if ``task`` is no task.
        """
        name = os.fspath(pretrained_model_name_or_path)
        trusted = checked_sources(tuned, trust)
        _check_local(name, task)
        try:
            pipe = _load_transformers(name, task, kwargs) if task else _load_diffusers(name, kwargs)
        except AITuneError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise PipelineLoadError(load_message(name, error)) from error
        pipe = _ready(pipe, config)
        if tuned is not None:
            known = {name: kwargs[name] for name in ("token", "local_files_only") if name in kwargs}
            logger.info("%s", pipe.pull_tuned(tuned, trust=trusted, **known).summary())
        return pipe

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
