"""Transformers pipelines and models: finding the real class, and its modules."""

from __future__ import annotations

import importlib
from typing import Any, cast

from torch import nn

__all__ = ["is_pipeline", "load_model", "load_pipeline", "pipeline_class", "pipeline_modules"]


def is_pipeline(target: object) -> bool:
    """True if ``target`` is a Transformers pipeline. Does not import transformers for it."""
    return any(
        cls.__module__ == "transformers.pipelines.base" and cls.__name__ == "Pipeline" for cls in type(target).__mro__
    )


def pipeline_class(task: str) -> type[Any]:
    """The class that serves a task.

    Raises:
        KeyError: if no task has this name; the message lists those that do.
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    _, targeted, _ = PIPELINE_REGISTRY.check_task(task)
    found: Any = targeted["impl"]
    if isinstance(found, str):  # Newer releases name the class and import it late.
        module, _, name = found.rpartition(".")
        found = getattr(importlib.import_module(module or "transformers"), name)
    return cast("type[Any]", found)


def load_pipeline(task: str, name_or_path: str, cls: type[Any], **kwargs: Any) -> Any:
    """``transformers.pipeline`` for a task, as an instance of ``cls``."""
    import transformers

    load: Any = transformers.pipeline
    return load(task, model=name_or_path, pipeline_class=cls, **kwargs)


def pipeline_modules(pipe: Any) -> dict[str, nn.Module]:
    """``{"model": …}``; pipelines that hold more modules list them all."""
    return {name: value for name, value in vars(pipe).items() if isinstance(value, nn.Module)}


def load_model(auto_class: Any, name_or_path: str, **kwargs: Any) -> Any:
    """Load a model by an auto class, ``transformers.AutoModel`` if None."""
    import transformers

    chosen = auto_class or transformers.AutoModel
    return chosen.from_pretrained(name_or_path, **kwargs)
