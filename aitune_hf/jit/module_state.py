"""The states of a patched module."""

from __future__ import annotations

import enum

__all__ = ["ModuleState"]


class ModuleState(enum.Enum):
    """Where a patched module stands.

    ``INIT`` → ``RECORDING`` on its first call → ``TUNED`` when engines answer for it, or ``EAGER`` when tuning failed or
    lost. ``SKIPPED``: left alone on request, with all below it. ``DETACHED``: below a tuned or skipped module; not
    patched any more.
    """

    INIT = "init"
    RECORDING = "recording"
    TUNED = "tuned"
    EAGER = "eager"
    SKIPPED = "skipped"
    DETACHED = "detached"
