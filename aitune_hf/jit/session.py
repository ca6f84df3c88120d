"""All that a tuning keeps besides the modules themselves."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from aitune_hf.config import TuneConfig

if TYPE_CHECKING:
    from aitune_hf.jit.dispatcher import InstalledEngine
    from aitune_hf.jit.patched_module import PatchedModule

__all__ = [
    "GraphTuner",
    "SessionView",
    "TuningSession",
    "current_scope",
    "current_session",
    "intercepting_session",
    "not_intercepting",
    "pipeline_call",
    "use_interception",
    "use_session",
]

logger = logging.getLogger("aitune_hf")
T = TypeVar("T")


class GraphTuner(Protocol):
    """Finds engines for the recorded graphs of one module; the ``tuning`` package brings the real one."""

    def restore(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]] | None:
        """Engines that the cache already has for a module that was not recorded, or None."""

    def tune(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]]:
        """Return the engines to install, and for each graph without one: identity → why.

        Raises:
            UntunableError: if the module cannot be captured, so that its children should be tried instead.
        """

    def blocks(self, patched: PatchedModule) -> list[PatchedModule]:
        """The modules below it to tune instead of the module itself; empty to tune it as a whole."""

    def can_capture(self, patched: PatchedModule) -> None:
        """Raise GraphBreakException unless every recorded graph of the module can be captured."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: deque[PatchedModule] = deque()


class TuningSession:
    """One tuning: its settings, call stack (one per thread), hierarchy, names, history and counters.

    It never keeps a module alive: modules own their :class:`PatchedModule`, a session only knows them.

    Attributes:
        lock: held for moments, while hierarchy or names change.
        tuning: held by the thread that tunes, for as long as that takes; others go on eager meanwhile.
        replaying: nothing is to be tuned now: recorded calls are run again, or a whole recording is under way.
        most_calls: calls of the most called module that does not exist any more.
    """

    def __init__(self, config: TuneConfig | None = None, tuner: GraphTuner | None = None) -> None:
        self.config = config or TuneConfig()
        self.tuner = tuner
        self.lock = threading.RLock()
        self.tuning = threading.RLock()
        self.history: list[str] = []
        self.fq_name_counter: Counter[str] = Counter()
        self.patched_classes: Counter[str] = Counter()
        self.module_counter = 0
        self.attempted_tuning = False
        self.deferred_tuning_enabled = False
        self.replaying = False
        self.most_calls = 0
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
        self._heads = [ref for ref in self._heads if ref() is not None]
        self._heads.append(weakref.ref(patched))

    @property
    def modules(self) -> list[PatchedModule]:
        """Every module patched in this session that is still alive, in order of patching."""
        with self.lock:
            return [patched for _, patched in sorted(self._modules.items())]

    def register(self, patched: PatchedModule) -> tuple[int, int]:
        """Take note of a module.

        Returns:
            Its number, counted from the last reset, and its place in ``modules``.
        """
        with self.lock:
            place = next(self._serial)
            self._modules[place] = patched
            self.patched_classes[patched.name] += 1
            self.module_counter += 1
            return self.module_counter - 1, place

    def forget(self, patched: PatchedModule) -> None:
        """Drop a module that is no longer patched."""
        with self.lock:
            self._modules.pop(patched._place, None)

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
        self.most_calls = 0
        self.attempted_tuning = False
        self.deferred_tuning_enabled = False


class SessionView(Generic[T]):
    """A class attribute that reads the current session, or the own one of an instance."""

    def __init__(self, read: Callable[[TuningSession], T]) -> None:
        self._read = read

    def __get__(self, instance: PatchedModule | None, owner: type) -> T:
        return self._read(instance.session if instance is not None else current_session())


_scope: ContextVar[object] = ContextVar("aitune_hf_scope", default=None)
_session: ContextVar[TuningSession | None] = ContextVar("aitune_hf_session", default=None)
_intercepting: ContextVar[TuningSession | None] = ContextVar("aitune_hf_intercepting", default=None)


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


def intercepting_session() -> TuningSession | None:
    """The session that takes up modules constructed in this context, or None."""
    return _intercepting.get()


@contextmanager
def use_interception(session: TuningSession | None) -> Iterator[None]:
    """Let ``session`` take up the modules that are constructed within the block; None: nobody does."""
    token = _intercepting.set(session)
    try:
        yield
    finally:
        _intercepting.reset(token)


def not_intercepting() -> AbstractContextManager[None]:
    """Context manager: modules constructed within are left alone."""
    return use_interception(None)


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
