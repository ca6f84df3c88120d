"""The JIT patcher: records modules as they are called, and answers for them with engines."""

import importlib
from typing import Any

from aitune_hf.errors import GraphBreakException
from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.hierarchy import PRINT_HIERARCHY_HEADER, PRINT_HIERARCHY_NO_MODULES_HEADER
from aitune_hf.jit.inspection import ModuleInspectionReport
from aitune_hf.jit.interception import enable_tune_deferred, intercepting
from aitune_hf.jit.module_state import ModuleState
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.patcher import Patcher
from aitune_hf.jit.session import TuningSession, current_session
from aitune_hf.jit.statistics import ModuleStats, TuningStats

__all__ = [
    "PRINT_HIERARCHY_HEADER",
    "PRINT_HIERARCHY_NO_MODULES_HEADER",
    "ForwardProxy",
    "GraphBreakException",
    "ModuleInspectionReport",
    "ModuleState",
    "ModuleStats",
    "PatchedModule",
    "Patcher",
    "TuningSession",
    "TuningStats",
    "current_session",
    "enable_tune_deferred",
    "intercepting",
]


def __getattr__(name: str) -> Any:
    if name == "enable":  # Brings the real tuner along, which lives above this package.
        return importlib.import_module("aitune_hf.tuning.enable").enable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
