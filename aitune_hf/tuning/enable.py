"""Tuning without a change to the code: modules are intercepted as they are constructed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from aitune_hf.config import TuneConfig
from aitune_hf.jit.interception import intercepting
from aitune_hf.jit.session import TuningSession
from aitune_hf.tuning.drive import make_tuner

__all__ = ["enable"]

logger = logging.getLogger("aitune_hf")


@contextmanager
def enable(config: TuneConfig | None = None) -> Iterator[TuningSession]:
    """Intercept every module that is constructed within the block, and tune it when its time has come.

    In eager mode that is after ``min_samples`` calls; in deferred mode at the next call after ``enable_tune_deferred()``.
    Modules found in the local cache are taken over at their first call. Also works as a decorator: ``@enable()``.

    Args:
        config: settings; ``TuneConfig.from_env()`` if None.

    Yields:
        The session, for ``print_hierarchy``, reports and history.
    """
    config = config or TuneConfig.from_env()
    if config.precision == "relaxed":
        logger.warning(
            "precision='relaxed' needs samples to measure the outputs with; here only strict recipes are tried"
        )
        config = replace(config, precision="strict", quality=None)
    tuner = None if config.mode == "inspect" else make_tuner(config)
    with intercepting(config, tuner) as session:
        yield session
