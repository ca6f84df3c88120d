"""All that a tuning keeps besides the modules themselves."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from aitune_hf.config import TuneConfig

if TYPE_CHECKING:
    from aitune_hf.jit.dispatcher import InstalledEngine
    from aitune_hf.jit.patched_module import PatchedModule

__all__ = ["GraphTuner", "TuningSession", "current_scope", "current_session", "pipeline_call", "use_session"]

logger = logging.getLogger("aitune_hf")


class GraphTuner(Protocol):
    """Finds engines for the recorded graphs of one module; the ``tuning`` package brings the real one."""

    def restore(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]] | None:
        """Engines that the cache already has for a module that was not recorded, or None."""

    def tune(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]]:
        """Return the engines to install, and for each graph without one: identity → why.

        Raises:
            UntunableError: if the module cannot be captured, so that its children should be tried instead.
        """

    def can_capture(self, patched: PatchedModule) -> None:
        """Raise GraphBreakException unless every recorded graph of the module can be captured."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: deque[PatchedModule] = deque()


class TuningSession:
    """One tuning: its settings, call stack (one per thread), hierarchy, names, history and counters.

    It never keeps a module alive: modules own their :class:`PatchedModule`, a session only knows them.
    """

    def __init__(self, config: TuneConfig | None = None, tuner: GraphTuner | None = None) -> None:
        self.config = config or TuneConfig()
        self.tuner = tuner
        self.lock = threading.RLock()
        self.history: list[str] = []
        self.fq_name_counter: Counter[str] = Counter()
        self.patched_classes: Counter[str] = Counter()
        self.module_counter = 0
        self.attempted_tuning = False
        self.deferred_tuning_enabled = False
        self.replaying = False
        self.on_phase: Callable[[str, str], object] = lambda phase, detail: None
        self._heads: list[weakref.ref[PatchedModule]] = []
        self._modules: weakref.WeakValueDictionary[int, PatchedModule] = weakref.WeakValueDictionary()
        self._serial = itertools.count()
        self._threads = _ThreadState()

    @property
    def stack(self) -> deque[PatchedModule]:
        """The calling thread's stack of patched modules whose forward is running."""
        return self._threads.stack

    @property
    def heads(self) -> list[PatchedModule]:
        """Top of the call hierarchy, in order of the first call."""
        return [head for head in (ref() for ref in self._heads) if head is not None]

    def add_head(self, patched: PatchedModule) -> None:
        """Make a module a top of the hierarchy."""
        self._heads.append(weakref.ref(patched))

    @property
    def modules(self) -> list[PatchedModule]:
        """Every module patched in this session that is still alive, in order of patching."""
        return [self._modules[key] for key in sorted(self._modules)]

    def register(self, patched: PatchedModule) -> int:
        """Take note of a module; returns its number."""
        self._modules[next(self._serial)] = patched
        self.patched_classes[patched.name] += 1
        self.module_counter += 1
        return self.module_counter - 1

    def forget(self, patched: PatchedModule) -> None:
        """Drop a module that is no longer patched."""
        for key in [key for key, known in self._modules.items() if known is patched]:
            del self._modules[key]

    def to_history(self, entry: str) -> None:
        """Add a line to the history."""
        self.history.append(entry)
        logger.debug(entry)

    def reset(self) -> None:
        """Forget hierarchy, names, history and marks. Modules stay as they are."""
        self.history.clear()
        self.fq_name_counter.clear()
        self.patched_classes.clear()
        self._heads.clear()
        self.module_counter = 0
        self.attempted_tuning = False
        self.deferred_tuning_enabled = False


_scope: ContextVar[object] = ContextVar("aitune_hf_scope", default=None)
_session: ContextVar[TuningSession | None] = ContextVar("aitune_hf_session", default=None)


def current_session() -> TuningSession:
    """The session of this context; one with default settings is made on first use."""
    session = _session.get()
    if session is None:
        session = TuningSession()
        _session.set(session)
    return session


@contextmanager
def use_session(session: TuningSession) -> Iterator[TuningSession]:
    """Make ``session`` the current one within the block."""
    token = _session.set(session)
    try:
        yield session
    finally:
        _session.reset(token)


@contextmanager
def pipeline_call() -> Iterator[None]:
    """Mark one call of a pipeline: within it each module's structure is compared once."""
    token = _scope.set(_scope.get() or object())
    try:
        yield
    finally:
        _scope.reset(token)


def current_scope() -> object:
    """What marks the pipeline call that this thread is in, or None."""
    return _scope.get()
