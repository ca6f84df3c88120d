"""What tuning must leave as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["preserved"]


@contextmanager
def preserved(module: nn.Module | None = None) -> Iterator[None]:
    """Restore the random state of all devices, the grad mode, and the mode of each module below ``module``."""
    modes = [(child, child.training) for child in module.modules()] if module is not None else []
    grad = torch.is_grad_enabled()
    with torch.random.fork_rng(enabled=True):
        try:
            yield
        finally:
            torch.set_grad_enabled(grad)
            for child, training in modes:
                child.training = training
