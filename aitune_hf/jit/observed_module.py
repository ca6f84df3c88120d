"""What is known of one module: where it is, who called it, what its calls look like, and what is told about it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from aitune_hf.graph.dynamic_shapes import DynamicShapes
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.jit import hierarchy, module_report
from aitune_hf.jit.exit_advice import exit_advice
from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.inspection import ModuleInspectionReport
from aitune_hf.jit.module_state import ModuleState
from aitune_hf.jit.pristine import pristine
from aitune_hf.jit.recorder import GraphRecorder
from aitune_hf.jit.session import SessionView, TuningSession, current_session
from aitune_hf.jit.statistics import ModuleStats

if TYPE_CHECKING:
    from aitune_hf.jit.patched_module import PatchedModule

__all__ = ["ObservedModule"]


class ObservedModule:
    """One module as a session knows it. Never keeps the module alive.

    Class attributes that name sets of modules or counters are views of the current :class:`TuningSession`.

    Attributes:
        path: path of the module in the object that was patched.
        state: see :class:`ModuleState`.
        stats: counts of its calls.
        reasons: graph identity, or ``"module"`` → why it has no engine.
        results: what the tuner has to say of each graph.
    """

    _original_forward: ForwardProxy
    _place: int

    heads = SessionView(lambda session: session.heads)
    history = SessionView(lambda session: session.history)
    stack = SessionView(lambda session: session.stack)
    fq_name_counter = SessionView(lambda session: session.fq_name_counter)
    patched_classes = SessionView(lambda session: session.patched_classes)
    module_counter = SessionView(lambda session: session.module_counter)
    attempted_tuning = SessionView(lambda session: session.attempted_tuning)
    deferred_tuning_enabled = SessionView(lambda session: session.deferred_tuning_enabled)

    def __init__(
        self, module: nn.Module, session: TuningSession, path: str, on_end: Callable[[object], None] | None
    ) -> None:
        self.session = session
        self.path = path
        self.state = ModuleState.INIT
        self.stats = ModuleStats()
        self.reasons: dict[str, str] = {}
        self.results: list[Any] = []
        self._module = weakref.ref(module, on_end)
        self._name = type(module).__name__
        self._class_name = f"{type(module).__module__}.{type(module).__qualname__}"
        self._children: list[PatchedModule] = []
        self._parent: weakref.ref[PatchedModule] | None = None
        self._level = -1
        self._fq_name: str | None = None
        self._extra_state_info = ""
        self._signature: ForwardSignature | None = None
        self._recorder: GraphRecorder | None = None

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module; it is alive for as long as this object is in use."""
        module = self._module()
        if module is None:
            raise ReferenceError(f"the module {self.fq_name} no longer exists")
        return module

    @property
    def name(self) -> str:
        """Class name of the module."""
        return self._name

    @property
    def level(self) -> int:
        """Depth in the call hierarchy; 0 is the top, -1 is never called."""
        return self._level

    @property
    def parent(self) -> PatchedModule | None:
        """The module that called it first, or None at the top."""
        return self._parent() if self._parent is not None else None

    @property
    def children(self) -> list[PatchedModule]:
        """Modules that it was the first to call, in the order of their first call."""
        return list(self._children)

    @property
    def call_count(self) -> int:
        """Calls so far that did not raise, whoever answered them."""
        return self._call_count

    @property
    def _call_count(self) -> int:
        return (self._recorder.calls if self._recorder is not None else 0) + self.stats.calls

    @property
    def fq_name(self) -> str:
        """Name that is unique in the session from the first call on."""
        return self._fq_name if self._fq_name is not None else f"{self._name}(not called)"

    @property
    def label(self) -> str:
        """What messages and reports call it: its path where it has one, else its name in the hierarchy."""
        return self.path or self.fq_name

    @property
    def recorder(self) -> GraphRecorder:
        """What was learned of the module's calls."""
        if self._recorder is None:
            config = self.session.config
            declared = config.dynamic_shapes
            self._recorder = GraphRecorder(
                self.signature,
                dynamic_shapes=declared.get(self.path) or declared.get(self._name) or DynamicShapes(),
                max_sample_bytes=config.max_sample_bytes,
            )
        return self._recorder

    @property
    def signature(self) -> ForwardSignature:
        """The signature of the module's own forward."""
        if self._signature is None:
            self._signature = ForwardSignature.from_callable(self._original_forward.__wrapped__)
        return self._signature

    @property
    def cache_dir(self) -> Path:
        """The module's folder for logs, within the cache."""
        return self._module_cache_dir()

    def __repr__(self) -> str:
        return f"PatchedModule({self.fq_name}, state={self.state.value}, level={self._level}, calls={self._call_count})"

    def __str__(self) -> str:
        return module_report.describe(self)

    # -- hierarchy -----------------------------------------------------------------------------------------------------

    def _get_fully_qualified_name(self) -> str:
        parent = self.parent
        return hierarchy.unique_name(self._name, parent.fq_name if parent else None, self.session.fq_name_counter)

    def _get_hierarchy_hash(self) -> str:
        """Structural hash of the module as it is without any of our patches."""
        with pristine(self.module):
            return hierarchy_hash(self.module)

    def _below(self) -> list[PatchedModule]:
        """Patched modules of the session within this module's tree, without itself."""
        tree = {id(module) for module in self.module.modules()} - {id(self.module)}
        return [patched for patched in self.session.modules if id(patched._module()) in tree]

    # -- reports and logs ----------------------------------------------------------------------------------------------

    def _to_history(self, entry: str) -> None:
        _to_hist(f"{self.fq_name}: {entry}", self.session)

    def _module_cache_dir(self) -> Path:
        return module_report.module_cache_dir(self)

    def _create_graph_cache_dir(self, graph_spec_name: str) -> Path:
        """A folder for what one graph leaves behind for people (never for engines: those go to the store)."""
        folder = self._module_cache_dir() / graph_spec_name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _log_tuning_exception(self, exception: Exception) -> None:
        module_report.log_tuning_exception(self, exception)

    def _write_error_log(self, exception: Exception) -> Path | None:
        return module_report.write_error_log(self, exception)

    def _module_dtypes(self) -> list[str]:
        return module_report.module_dtypes(self)

    def _inspection_graphs(self) -> list[dict[str, Any]]:
        return module_report.inspection_graphs(self)

    def inspection_report(self) -> ModuleInspectionReport:
        """What was seen of this module so far."""
        return module_report.inspection_report(self)

    def inspection_subtree_reports(self) -> list[ModuleInspectionReport]:
        """Reports of this module and of all that it was seen to call."""
        return [self.inspection_report(), *(below.inspection_report() for below in hierarchy.walk(self._children))]

    @staticmethod
    def print_hierarchy(sink: Callable[[str], object] = print) -> None:
        """Print the call hierarchy of the current session."""
        hierarchy.print_hierarchy(current_session().heads, sink)

    @staticmethod
    def print_history(sink: Callable[[str], object] = print) -> None:
        """Print what happened in the current session, line by line."""
        for entry in current_session().history:
            sink(entry)

    @staticmethod
    def on_python_exit() -> None:
        """Say what to do when modules were patched but none was ever tuned."""
        advice = exit_advice(current_session())
        if advice is not None:
            sys.stderr.write(advice + "\n")


def _to_hist(entry: str, session: TuningSession | None = None) -> None:
    """Add a line to the history."""
    (session or current_session()).to_history(entry)
