"""What can be tuned and shared: any pipeline or module, through functions that take it as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from aitune_hf.config import TuneConfig
from aitune_hf.errors import ConfigError
from aitune_hf.integrations import diffusers as hf_diffusers
from aitune_hf.integrations import transformers as hf_transformers
from aitune_hf.integrations.accelerate import current_rank
from aitune_hf.tuning.drive import tune_modules
from aitune_hf.tuning.report import TuningReport
from aitune_hf.tuning.samples import driver, generators_restored, sample_list

if TYPE_CHECKING:
    from aitune_hf.hub.lookup import Lookup
    from aitune_hf.hub.outcome import PullResult
    from aitune_hf.hub.publish import PushResult
    from aitune_hf.tuning.target_report import BuildForReport

__all__ = [
    "build_target_for",
    "checked_sources",
    "device_types",
    "explain_target",
    "look_up_target",
    "modules_of",
    "pull_target",
    "push_target",
    "tune_target",
    "weights_upload",
]


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


def device_types(target: Any) -> set[str]:
    """Types of device that its parameters lie on."""
    return {parameter.device.type for module in modules_of(target).values() for parameter in module.parameters()}


def tune_target(target: Any, samples: Any, config: TuneConfig, **call_kwargs: Any) -> TuningReport:
    """Tune a pipeline or module on samples; see :meth:`TunedPipelineMixin.tune`."""
    listed = sample_list(samples)
    roots = modules_of(target)
    with _left_as_found(target, listed, call_kwargs):
        return tune_modules(roots, driver(target, call_kwargs), listed, config, current_rank())


def build_target_for(
    target: Any, samples: Any, targets: Sequence[str], config: TuneConfig, **call_kwargs: Any
) -> BuildForReport:
    """Build engines for other machines; see :func:`aitune_hf.build_for`."""
    from aitune_hf.tuning.targets import build_modules_for

    listed = sample_list(samples)
    roots = modules_of(target)
    with _left_as_found(target, listed, call_kwargs):
        return build_modules_for(roots, driver(target, call_kwargs), listed, targets, config)


@contextmanager
def _left_as_found(target: Any, samples: list[Any], call_kwargs: dict[str, Any]) -> Iterator[None]:
    """Within it, a target can be run on samples: a module without gradients, and all random states are kept."""
    with ExitStack() as kept:
        kept.enter_context(generators_restored(samples, call_kwargs))
        if hf_diffusers.is_pipeline(target):
            kept.enter_context(hf_diffusers.quiet_and_unchanged(target))
        elif isinstance(target, nn.Module):
            import torch

            kept.enter_context(torch.no_grad())
        yield


def push_target(target: Any, repo: str | Path, config: TuneConfig, **options: Any) -> PushResult:
    """Share the engines that a pipeline or module uses; see :meth:`SharingMixin.push_to_hub`."""
    from aitune_hf.hub.share import base_repository, push_modules

    roots = modules_of(target)
    noted = (_name_or_path(each) for each in (target, *roots.values()))
    base = next((found for name in noted if (found := base_repository(name)) is not None), None)
    return push_modules(roots, config, repo, name=type(target).__name__, base_model=base, **options)


def pull_target(
    target: Any, repos: str | Path | Sequence[str | Path], config: TuneConfig, **options: Any
) -> PullResult:
    """Take over engines for a pipeline or module; see :meth:`SharingMixin.pull_tuned`."""
    from aitune_hf.hub.share import pull_modules

    return pull_modules(modules_of(target), config, repos, name=type(target).__name__, **options)


def checked_sources(tuned: str | Path | Sequence[str | Path] | None, trust: Any) -> Any:
    """Trust as an object; raises ``ConfigError`` for a ``tuned`` or ``trust`` that means nothing, and asks nobody."""
    if tuned is not None:
        from aitune_hf.hub.share import parse_sources

        return parse_sources(tuned, trust)[1]
    from aitune_hf.hub.trust import Trust

    return Trust.parse(trust)


def look_up_target(target: Any, repo: str | Path, **options: Any) -> Lookup:
    """What a remote has for a pipeline or module, without fetching it. Raises ``HubError`` if the remote fails."""
    from aitune_hf.hub.share import look_up_modules

    return look_up_modules(modules_of(target), target._aitune_config, repo, name=type(target).__name__, **options)


def explain_target(target: Any, repo: str | Path, **options: Any) -> str:
    """Why a remote has what it has for a pipeline or module. Raises ``HubError`` if the remote fails."""
    from aitune_hf.hub.share import explain_modules

    return explain_modules(modules_of(target), target._aitune_config, repo, name=type(target).__name__, **options)


def weights_upload(push: Callable[..., Any] | None, repo_id: str, options: dict[str, Any]) -> Callable[[], Any]:
    """What uploads a pipeline or model as its own class does. Raises ``ConfigError`` where that takes no such options."""
    if push is None:
        raise ConfigError("weights=True: the class of this object has no push_to_hub of its own; leave weights out")
    parameters = inspect.signature(push).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    # What is swallowed without a word would send the weights to the main branch.
    unknown = [name for name in options if name not in parameters and (name == "revision" or not takes_all)]
    if unknown:
        raise ConfigError(
            f"weights=True: {push.__qualname__} takes no {', '.join(unknown)}, so the weights cannot be uploaded that way; "
            "leave it out, or push the engines alone (weights=False)"
        )
    return partial(push, repo_id, **options)


def _name_or_path(target: Any) -> Any:
    """What a library noted when it loaded something."""
    noted = getattr(getattr(target, "config", None), "_name_or_path", None)
    return noted or getattr(target, "name_or_path", None)
