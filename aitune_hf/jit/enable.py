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
from aitune_hf.jit.session import GraphTuner, TuningSession, current_session, use_session

__all__ = ["enable_tune_deferred", "intercepting"]


@contextlib.contextmanager
def intercepting(config: TuneConfig, tuner: GraphTuner | None) -> Iterator[TuningSession]:
    """Patch every module that is constructed within the block, in a new session that is current there.

    Afterwards modules stay patched, and go on being recorded and tuned; ``PatchedModule.reset()`` within the session, or
    ``untune(module)``, undoes it. Advice is printed at exit if nothing was tuned.
    """
    session = TuningSession(config, tuner)
    original = nn.Module.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not is_excluded(type(self), config):
            PatchedModule(self, session)

    advise = functools.partial(_advise, session)
    with use_session(session):
        nn.Module.__init__ = init  # type: ignore[method-assign]
        atexit.register(advise)
        try:
            yield session
        finally:
            nn.Module.__init__ = original  # type: ignore[method-assign]


def _advise(session: TuningSession) -> None:
    with use_session(session):
        PatchedModule.on_python_exit()


def enable_tune_deferred(session: TuningSession | None = None) -> None:
    """In deferred mode: recording is complete, so the next forward of each eligible module tunes it."""
    (session or current_session()).deferred_tuning_enabled = True
