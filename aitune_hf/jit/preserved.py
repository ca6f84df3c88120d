"""What tuning must leave as it found it, and what must not reach into tuning."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from aitune_hf.jit.session import not_intercepting

__all__ = ["neutral", "preserved"]


@contextmanager
def preserved(module: nn.Module | None = None) -> Iterator[None]:
    """Restore all random states, the grad mode, and the mode of each module below ``module``."""
    modes = [(child, child.training) for child in module.modules()] if module is not None else []
    grad = torch.is_grad_enabled()
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else None
    # All devices by name: without the list, torch warns where there are several.
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if initialised else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            torch.set_grad_enabled(grad)
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(legacy)
            for child, training in modes:
                child.training = training


@contextmanager
def neutral() -> Iterator[None]:
    """Leave inference mode, gradients, autocast and interception: none of the caller's modes reaches what is built."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        modes.enter_context(not_intercepting())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        yield
