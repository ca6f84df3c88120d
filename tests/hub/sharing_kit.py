"""Machines with engine caches, and modules that were tuned on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_hf import TuneConfig, tune
from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.testing import FakeBackend, FakeEngine
from aitune_hf.cache import EngineKey, Entry, Environment
from aitune_hf.hub.lookup import Lookup, look_up
from aitune_hf.hub.outcome import PullResult
from aitune_hf.hub.publish import PushResult, push
from aitune_hf.hub.pull import pull
from aitune_hf.hub.remote import Remote, open_remote
from aitune_hf.hub.target import Target
from aitune_hf.hub.trust import Trust
from aitune_hf.tuning.verdict import Verdict, write_verdict

TOKEN = "hf_goodtokengoodtoken"
X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Many(nn.Module):
    """Children of as many structures."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block(number + 1) for number in range(count))
        self.eval()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part(x) for part in self.parts]


class PlainBackend(FakeBackend):
    """Remembers nothing of what it loaded: a tuned model holds its settings, and guards look at what changes there."""

    def load(self, request: LoadRequest) -> FakeEngine:
        return FakeEngine(request.module, request.engine, self.spoil)


@dataclass(frozen=True)
class Machine:
    """A machine: an engine cache, and the settings used on it."""

    cache: Path
    options: Mapping[str, Any] | None = None

    def config(self, **settings: Any) -> TuneConfig:
        backend = PlainBackend()
        backend.recipes = lambda device: [replace(each, options=dict(self.options or {})) for each in _RECIPES]  # type: ignore[method-assign]
        return TuneConfig(
            **{
                "backends": (backend,),
                "strategy": "first_working",
                "cache_dir": self.cache,
                "progress": False,
                **settings,
            }
        )

    def with_options(self, **options: Any) -> Machine:
        return Machine(self.cache, options)

    def target(self, module: nn.Module, **settings: Any) -> Target:
        return Target({"": module}, self.config(**settings), type(module).__name__)

    def tuned(self, module: nn.Module) -> Target:
        tune(module, [X], self.config())
        return self.target(module)

    def push(self, module: nn.Module, repo: str | Path, **options: Any) -> PushResult:
        return push(self.target(module), _remote(repo), **options)

    def pull(self, module: nn.Module, *repos: str | Path, trust: Any = True, **options: Any) -> PullResult:
        return pull(self.target(module), [_remote(repo) for repo in repos], trust=Trust.parse(trust), **options)

    def look_up(self, module: nn.Module, repo: str | Path, **options: Any) -> Lookup:
        return look_up(self.target(module), _remote(repo), **options)

    def stock(self, module: Many, *, data: bytes = b"\0engine") -> Target:
        """Put an engine for each part of a module into the cache, as a tuning of each would."""
        sample = Block(99)
        known = self.tuned(sample)
        verdict = known.verdicts(sample)[0]
        found = known.store.lookup(verdict.engines[0].key)
        assert isinstance(found, Entry)
        engine = found.manifest.engine
        target = self.target(module)
        paths = [f"parts.{number}" for number in range(len(module.parts))]
        for path in paths:
            part = target.module(path)
            assert part is not None
            structure = target.structure(part)
            record = verdict.engines[0]
            key = EngineKey(**{**vars_of(record.key), "hierarchy_hash": structure})
            with target.store.reserve(key) as slot:
                if slot.entry is None:
                    slot.write("model.bin", data + structure.encode())
                    slot.commit(engine=engine)
            write_verdict(
                target.store,
                replace_verdict(verdict, hierarchy_hash=structure, engines=[replace(record, key=key)]),
            )
        target.remember(paths)
        return self.target(module)


def call(module: nn.Module) -> Any:
    with torch.no_grad():
        return module(X)


def replace_verdict(verdict: Verdict, **changes: Any) -> Verdict:
    return replace(verdict, **changes)


def vars_of(key: EngineKey) -> dict[str, Any]:
    names = ("hierarchy_hash", "graph_key", "environment", "backend", "backend_version", "options", "weights_digest")
    return {name: getattr(key, name) for name in names}


def elsewhere(monkeypatch: Any, **facts: Any) -> None:
    """Be on another machine from now on."""
    here = Environment.current("cpu")
    monkeypatch.setattr(Environment, "current", classmethod(lambda cls, device: replace(here, **facts)))


def _remote(repo: str | Path) -> Remote:
    return open_remote(repo)


_RECIPES = FakeBackend().recipes(torch.device("cpu"))
