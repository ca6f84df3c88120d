"""Diffusers pipelines: finding the real class, its modules, and what a call of it changes besides its output."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["INDEX_NAME", "is_pipeline", "pipeline_class", "pipeline_modules", "quiet_and_unchanged"]

INDEX_NAME = "model_index.json"
_HUB_KWARGS = ("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision")


def is_pipeline(target: object) -> bool:
    """True if ``target`` is a Diffusers pipeline. Does not import diffusers for it."""
    return any(
        cls.__module__.startswith("diffusers.") and cls.__name__ == "DiffusionPipeline" for cls in type(target).__mro__
    )


def pipeline_class(name_or_path: str | Path, **kwargs: Any) -> type[Any]:
    """The class that ``model_index.json`` names.

    Raises:
        OSError: if there is no such folder or repository, or it holds no pipeline.
        ValueError: if this diffusers does not know the class.
    """
    import diffusers

    known = {key: value for key, value in kwargs.items() if key in _HUB_KWARGS}
    with warnings.catch_warnings():
        # Diffusers passes on an argument that newer Hub clients no longer have; nothing of the user's causes it.
        warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks.*")
        config = diffusers.DiffusionPipeline.load_config(str(name_or_path), **known)
    name = config.get("_class_name")
    found = getattr(diffusers, str(name), None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        raise ValueError(f"{name_or_path} is a {name}, which diffusers {diffusers.__version__} does not know")
    return found


def pipeline_modules(pipe: Any) -> dict[str, nn.Module]:
    """Component name → module, for the components that are modules; one that is there twice is listed once."""
    found: dict[str, nn.Module] = {}
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module) and all(component is not other for other in found.values()):
            found[name] = component
    return found


@contextmanager
def quiet_and_unchanged(pipe: Any) -> Iterator[None]:
    """Run the pipeline within without its own progress bar; its scheduler is as before afterwards."""
    scheduler = getattr(pipe, "scheduler", None)
    state = copy.deepcopy(vars(scheduler)) if scheduler is not None else None
    bars = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(**{**bars, "disable": True})
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**bars)
        if scheduler is not None and state is not None:
            vars(scheduler).clear()
            vars(scheduler).update(state)
