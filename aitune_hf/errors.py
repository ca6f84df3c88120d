"""Every error this package raises on purpose.

The tree::

    AITuneError
    ├── ConfigError (also ValueError)        a wrong setting or argument
    ├── PipelineLoadError (also OSError)     a pipeline could not be found or loaded
    ├── SampleError                          the samples given to ``tune`` cannot be used
    ├── UntunableError                       a module or graph cannot be tuned, and why
    │   └── GraphBreakException              its forward cannot be captured as one graph
    ├── CandidateError                       one candidate engine failed; eager stays
    │   ├── BuildError                       while it was built
    │   │   └── LostBuildError               its process died, or was stopped because it took too long
    │   ├── EngineLoadError                  while it was loaded or bound to weights
    │   ├── CorrectnessError                 its outputs are not those of eager
    │   ├── UnfitInputError (also ValueError) it does not take the values of one call
    │   └── tuning.EagerAnsweredError        while it was timed: it did not answer
    └── CacheError                           the engine cache
        ├── CorruptEntryError                an entry's bytes are not what its manifest says
        │   └── cache.UnknownSchemaError     its manifest has the schema of another version
        ├── cache.KeyLockedError             another process builds the engine for longer than one would wait
        └── ForeignEngineError               an entry is valid, but not for this machine

Messages say what failed, on which module path, why, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "AITuneError",
    "BuildError",
    "CacheError",
    "CandidateError",
    "ConfigError",
    "CorrectnessError",
    "CorruptEntryError",
    "EngineLoadError",
    "ForeignEngineError",
    "GraphBreakException",
    "HubError",
    "LostBuildError",
    "PipelineLoadError",
    "SampleError",
    "UnfitInputError",
    "UntunableError",
]


class AITuneError(Exception):
    """Root of every error raised by this package."""


class ConfigError(AITuneError, ValueError):
    """A setting or an argument is wrong."""


class PipelineLoadError(AITuneError, OSError):
    """A pipeline or model could not be found or loaded."""


class SampleError(AITuneError):
    """The samples given to ``tune`` cannot be used, or the pipeline fails on one of them."""


class UntunableError(AITuneError):
    """A module, or one of its graphs, cannot be tuned; it stays eager."""


class GraphBreakException(UntunableError):
    """A module's forward cannot be captured as one graph."""


class CandidateError(AITuneError):
    """One candidate engine failed; never fatal for the tuning."""


class BuildError(CandidateError):
    """An engine could not be built."""


class LostBuildError(BuildError):
    """A build in a child process died, or took too long and was stopped."""


class EngineLoadError(CandidateError):
    """An engine could not be loaded or bound to the module's weights."""


class CorrectnessError(CandidateError):
    """An engine's outputs are not those of eager."""


class UnfitInputError(CandidateError, ValueError):
    """An engine does not take the values of one call; eager answers it, and the engine goes on with the next."""


class CacheError(AITuneError):
    """The engine cache cannot do what was asked."""


class CorruptEntryError(CacheError):
    """A cache entry's bytes are not what its manifest says."""


class ForeignEngineError(CacheError):
    """A cache entry is valid, but was not built for this machine."""


class HubError(AITuneError):
    """Engines could not be shared through the Hub, or through another store of files."""
