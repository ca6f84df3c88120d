"""Which modules take enough of the time to be worth tuning.

Shares are measured while the samples run, and a machine that stalls now and then measures other ones each time. What was
decided once is held on to, so that a second tuning of the same target builds nothing that the first did not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["Worth"]

#: A module that was too small before must take this many times the least share to be tuned now.
_HOLD = 3.0


@dataclass(kw_only=True)
class Worth:
    """Decides by share of time.

    Attributes:
        min_share: the least share that is worth it, 0 to 1.
        decided: modules for which the cache has a decision, which is taken whatever their share.
        small_before: modules whose share was too small in an earlier tuning.
        small: those whose share is too small now.
    """

    min_share: float
    decided: Collection[str] = ()
    small_before: Collection[str] = ()
    small: set[str] = field(default_factory=set)

    def objection(self, path: str, share: float) -> str | None:
        """Why a module is not to be tuned, or None."""
        least = self.min_share * (_HOLD if path in self.small_before else 1.0)
        if path in self.decided or share >= least:
            return None
        self.small.add(path)
        return f"takes {share:.2%} of the time (min_share is {self.min_share:.2%})"
