"""Progress bars of a tuning, in the ecosystem's own way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

__all__ = ["Progress"]


class Progress:
    """One bar per phase of the work on one module: recording, building, checking, timing."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    @contextmanager
    def phase(self, what: str, total: int | None, unit: str = "it") -> Iterator[tqdm]:
        """A bar for one phase, on a terminal only; it is gone when the phase is over."""
        bar = tqdm(
            total=total, desc=what, unit=unit, disable=None if self.enabled else True, leave=False, dynamic_ncols=True
        )
        try:
            yield bar
        finally:
            bar.close()
