"""Hooks that belong to a model's own forward and do nothing unless that forward asks them to.

Transformers collects hidden states and attentions by hooks on inner modules. It puts them there at the first call that
wants such outputs and leaves them there; they act only while the forward that wants them is running. An engine for that
forward includes them; an engine for a part of it must not answer meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["collecting", "is_dormant"]

_LIBRARY = "transformers.utils.output_capturing"


def is_dormant(hook: Callable[..., Any]) -> bool:
    """True for a hook that acts on request of a forward only."""
    return getattr(hook, "__module__", None) == _LIBRARY


def collecting() -> bool:
    """True while a forward that is running in this context collects what inner modules compute."""
    collector = getattr(sys.modules.get(_LIBRARY), "_active_collector", None)
    # Decorated forwards always set it; an empty one was asked for nothing.
    return collector is not None and bool(collector.get())
