"""Interception of modules as they are constructed: tuning without a change to the code."""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from aitune_hf.config import TuneConfig
from aitune_hf.jit.patch_policy import is_excluded
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.patcher import patched_of
from aitune_hf.jit.session import (
    GraphTuner,
    TuningSession,
    current_session,
    intercepting_session,
    use_interception,
    use_session,
)

__all__ = ["enable_tune_deferred", "intercepting"]


@contextlib.contextmanager
def intercepting(config: TuneConfig, tuner: GraphTuner | None) -> Iterator[TuningSession]:
    """Patch every module that this thread constructs within the block, in a new session that is current there.

    Afterwards modules stay patched, and go on being recorded and tuned; ``PatchedModule.reset()`` within the session, or
    ``untune(module)``, undoes it. Advice is printed at exit if nothing was tuned.
    """
    session = TuningSession(config, tuner)
    advise = functools.partial(_advise, session)
    with use_session(session), use_interception(session), _constructor_watched():
        atexit.register(advise)
        yield session


@contextlib.contextmanager
def _constructor_watched() -> Iterator[None]:
    """Within the block, modules constructed in an intercepting context are patched.

    Blocks may overlap in any order (two threads): one that ends under another stays as a link without effect until the
    one above it goes.
    """
    original = nn.Module.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        session = intercepting_session()
        # A class with two module bases comes here twice; an outer block of this kind may have been first.
        if session is not None and patched_of(self) is None and not is_excluded(type(self), session.config):
            PatchedModule(self, session)

    watched: Any = init
    nn.Module.__init__ = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        watched.aitune_ended = True
        top: Any = nn.Module.__init__
        while getattr(top, "aitune_ended", False):
            top = top.__wrapped__
        if nn.Module.__init__ is not top:
            nn.Module.__init__ = top  # type: ignore[method-assign]


def _advise(session: TuningSession) -> None:
    with use_session(session):
        PatchedModule.on_python_exit()


def enable_tune_deferred(session: TuningSession | None = None) -> None:
    """In deferred mode: recording is complete, so the next forward of each eligible module tunes it."""
    (session or current_session()).deferred_tuning_enabled = True
