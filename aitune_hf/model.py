"""Single models that can be tuned: the real module, with a few methods more."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from aitune_hf.config import TuneConfig
from aitune_hf.errors import ConfigError, PipelineLoadError
from aitune_hf.integrations import transformers as hf_transformers
from aitune_hf.integrations.tuned_class import tuned_class
from aitune_hf.jit.patcher import unpatch_tree
from aitune_hf.jit.statistics import TuningStats
from aitune_hf.pipeline import SharingMixin, load_message
from aitune_hf.target import checked_sources, tune_target
from aitune_hf.tuning.drive import restore_modules, stats_of
from aitune_hf.tuning.report import TuningReport

__all__ = ["AITuneModel", "TunedModelMixin"]


logger = logging.getLogger("aitune_hf")


class TunedModelMixin(SharingMixin):
    """What a tuned model can do beyond its real class. All of it also works as functions of any module."""

    def tune(self, samples: Any, config: TuneConfig | None = None, **call_kwargs: Any) -> TuningReport:
        """As :meth:`aitune_hf.pipeline.TunedPipelineMixin.tune`; samples are arguments of ``forward``."""
        if config is not None:
            vars(self)["_aitune_config"] = config
        return tune_target(self, samples, self._aitune_config, **call_kwargs)

    def untune(self) -> None:
        """Make it exactly the model from before. Engines stay in the cache."""
        assert isinstance(self, nn.Module)
        unpatch_tree(self)

    def tuning_stats(self) -> TuningStats:
        """Counters: calls answered by engines and by eager with the reasons, builds, loads."""
        assert isinstance(self, nn.Module)
        return stats_of({"": self})


class AITuneModel:
    """Makes models that can be tuned. Never instantiated itself: what it returns is the real model class."""

    def __init__(self) -> None:
        raise ConfigError("use AITuneModel.from_pretrained(...) or AITuneModel.from_model(...)")

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        auto_class: Any = None,
        config: TuneConfig | None = None,
        tuned: str | Path | Sequence[str | Path] | None = None,
        trust: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Load a model as its own library does, and take over the engines that the local cache has for it.

        Args:
            pretrained_model_name_or_path: a folder, or a repository on the Hub.
            auto_class: anything with ``from_pretrained``: an auto class (``transformers.AutoModel`` if None) or a model
                class of transformers or diffusers.
            config: settings of the tuning.
            tuned, trust: as in :meth:`aitune_hf.pipeline.AITunePipeline.from_pretrained`.
            kwargs: passed on to ``from_pretrained``.

        Raises:
            PipelineLoadError: if it cannot be found or loaded.
        """
        name = os.fspath(pretrained_model_name_or_path)
        trusted = checked_sources(tuned, trust)
        try:
            model = hf_transformers.load_model(auto_class, name, **kwargs)
        except (OSError, ValueError, ImportError) as error:
            raise PipelineLoadError(load_message(name, error)) from error
        model = AITuneModel.from_model(model.eval(), config=config)
        if tuned is not None:
            known = {name: kwargs[name] for name in ("token", "local_files_only") if name in kwargs}
            logger.info("%s", model.pull_tuned(tuned, trust=trusted, **known).summary())
        return model

    @staticmethod
    def from_model(model: nn.Module, *, config: TuneConfig | None = None) -> Any:
        """The same module object, with the methods of :class:`TunedModelMixin`.

        Its class becomes a subclass of the same name; ``isinstance``, configs, saving and pickles are as before.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"from_model takes an nn.Module, got {type(model).__name__}; see AITunePipeline.from_pipe"
            )
        model.__class__ = tuned_class(TunedModelMixin, type(model))  # The one way to add methods to a given object.
        vars(model)["_aitune_config"] = config or TuneConfig.from_env()
        restore_modules({"": model}, vars(model)["_aitune_config"])
        return model
