"""Faster Diffusers and Transformers pipelines: record, tune, cache, share.

Importing this package patches nothing; diffusers and transformers are imported when they are used.
"""

from typing import TYPE_CHECKING, Any

from aitune_hf.config import Tolerance, TuneConfig
from aitune_hf.errors import AITuneError
from aitune_hf.quality import QualityBudget
from aitune_hf.strategy import FirstWorking, LatencyBudget, MaxThroughput, OneBackend
from aitune_hf.version import __version__

if TYPE_CHECKING:
    from aitune_hf import backends, cache, errors, graph, jit
    from aitune_hf.functional import build_for, pull_tuned, push_tuned, stats, tune, untune
    from aitune_hf.graph.hierarchy_hash import explain, hierarchy_hash
    from aitune_hf.jit.statistics import TuningStats
    from aitune_hf.model import AITuneModel
    from aitune_hf.pipeline import AITunePipeline
    from aitune_hf.tuning.report import TuningReport

__all__ = [
    "AITuneError",
    "AITuneModel",
    "AITunePipeline",
    "FirstWorking",
    "LatencyBudget",
    "MaxThroughput",
    "OneBackend",
    "QualityBudget",
    "Tolerance",
    "TuneConfig",
    "TuningReport",
    "TuningStats",
    "__version__",
    "backends",
    "build_for",
    "cache",
    "errors",
    "explain",
    "graph",
    "hierarchy_hash",
    "jit",
    "pull_tuned",
    "push_tuned",
    "stats",
    "tune",
    "untune",
]

#: Public names that need torch or more: imported at first use.
_LATE = {
    "AITuneModel": "aitune_hf.model",
    "AITunePipeline": "aitune_hf.pipeline",
    "TuningReport": "aitune_hf.tuning.report",
    "TuningStats": "aitune_hf.jit.statistics",
    "build_for": "aitune_hf.functional",
    "explain": "aitune_hf.graph.hierarchy_hash",
    "hierarchy_hash": "aitune_hf.graph.hierarchy_hash",
    "pull_tuned": "aitune_hf.functional",
    "push_tuned": "aitune_hf.functional",
    "stats": "aitune_hf.functional",
    "tune": "aitune_hf.functional",
    "untune": "aitune_hf.functional",
}
_SUBPACKAGES = frozenset({"backends", "cache", "errors", "graph", "jit"})


def __getattr__(name: str) -> Any:
    import importlib

    if name in _SUBPACKAGES:
        return importlib.import_module(f"aitune_hf.{name}")
    if name not in _LATE:
        raise AttributeError(f"module 'aitune_hf' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
