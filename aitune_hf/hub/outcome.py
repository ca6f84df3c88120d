"""What came of a pull, per module, and whether the engines that it brought really answer calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from aitune_hf.jit.statistics import ModuleStats

__all__ = ["Confirmation", "ModuleOutcome", "PullResult"]

#: ``hit``: engines came from a remote; ``local``: the local cache had decided already; ``recipe``: no engine may be used,
#: and what it was built with is kept for the next ``tune``; ``miss``: nothing.
Answer = Literal["hit", "local", "recipe", "miss"]
Probe = Callable[[str], "ModuleStats | None"]


@dataclass(frozen=True, kw_only=True)
class ModuleOutcome:
    """What came of a pull for one module.

    Attributes:
        reason: why there is no engine; empty for a hit.
        engines: where they are in the local cache.
        repo: the remote that had the answer.
    """

    path: str
    answer: Answer
    reason: str = ""
    engines: tuple[str, ...] = ()
    repo: str = ""


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """Whether pulled engines answer calls: module path → what happened."""

    ran: tuple[str, ...]
    idle: Mapping[str, str]

    def __bool__(self) -> bool:
        """True if engines ran, and none of those pulled stood idle."""
        return bool(self.ran) and not self.idle

    def summary(self) -> str:
        """A line, and one more per module whose engine did not run."""
        lines = [f"engines answer calls of {len(self.ran)} of {len(self.ran) + len(self.idle)} modules pulled"]
        return "\n".join([*lines, *(f"  {path or 'the model'}: {why}" for path, why in self.idle.items())])


@dataclass(frozen=True, kw_only=True)
class PullResult:
    """What a pull did.

    Attributes:
        repos: the remotes that were asked, each with the state it was read at.
        modules: per module that some remote knows of.
        problems: failures of remotes, and why there is nothing in one.
        bytes: of the engines fetched.
        installed: engines that answer calls from now on.
    """

    repos: tuple[str, ...]
    modules: tuple[ModuleOutcome, ...] = ()
    problems: tuple[str, ...] = ()
    bytes: int = 0
    installed: int = 0
    probe: Probe = field(default=lambda path: None, repr=False, compare=False)

    @property
    def hits(self) -> list[ModuleOutcome]:
        """Modules that have an engine, pulled or there already."""
        return [outcome for outcome in self.modules if outcome.engines]

    @property
    def misses(self) -> dict[str, str]:
        """Module path → why it has no engine."""
        return {outcome.path: outcome.reason for outcome in self.modules if not outcome.engines}

    def summary(self) -> str:
        """A line, and one more per module and per problem."""
        lines = [
            f"{', '.join(self.repos)}: engines for {len(self.hits)} of {len(self.modules)} modules, "
            f"{self.bytes / 1e6:.2f} MB fetched, {self.installed} installed"
        ]
        for outcome in self.modules:
            text = f"{outcome.answer}: {outcome.reason}" if outcome.reason else outcome.answer
            lines.append(f"  {outcome.path or 'the model'}: {text}")
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])

    def confirm(self) -> Confirmation:
        """Look, after some calls, whether the engines of the modules that were hit answered them."""
        ran: list[str] = []
        idle: dict[str, str] = {}
        for outcome in self.hits:
            stats = self.probe(outcome.path)
            if stats is not None and stats.engine_calls:
                ran.append(outcome.path)
            elif stats is None:
                idle[outcome.path] = "no engine is installed on it"
            else:
                reasons = ", ".join(f"{reason} ({count} calls)" for reason, count in stats.eager_calls.items())
                idle[outcome.path] = f"eager answered: {reasons}" if reasons else "it was not called yet"
        return Confirmation(ran=tuple(ran), idle=idle)
