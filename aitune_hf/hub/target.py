"""The local side of sharing: a pipeline's modules by path, their structures, and the cache that has their engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from torch import nn

from aitune_hf.cache import Environment, LocalStore
from aitune_hf.config import TuneConfig
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.tuning.drive import make_tuner, record_name
from aitune_hf.tuning.place import environment_of
from aitune_hf.tuning.ranks import local_module
from aitune_hf.tuning.tuner import EngineTuner
from aitune_hf.tuning.verdict import Verdict, verdicts_of

__all__ = ["Target"]


@dataclass(frozen=True, eq=False)
class Target:
    """What is pushed or pulled for.

    Attributes:
        roots: component → module.
        config: the settings it is tuned with.
        name: its class name, for people.
    """

    roots: Mapping[str, nn.Module]
    config: TuneConfig
    name: str

    @cached_property
    def tuner(self) -> EngineTuner:
        """Knows the cache, the backends in use, and the policy that verdicts are kept under."""
        return make_tuner(self.config)

    @property
    def store(self) -> LocalStore:
        """The local cache."""
        return self.tuner.store

    @cached_property
    def record_name(self) -> str:
        """The local record of which of its modules are tuned."""
        return record_name(self._local_roots, self.tuner)

    @cached_property
    def pipeline_hash(self) -> str:
        """Identity of its whole structure; the same for every machine, checkpoint and policy."""
        return PurePosixPath(self.record_name).stem.rpartition("-")[0]

    @cached_property
    def root_hashes(self) -> dict[str, str]:
        """Component → hierarchy hash."""
        return {path: self.structure(module) for path, module in self._local_roots.items()}

    @cached_property
    def tuned_paths(self) -> list[str]:
        """Paths of the modules that the local cache says are tuned."""
        record: dict[str, Any] = self.store.read_record(self.record_name) or {}
        paths = record.get("modules")
        return sorted(str(path) for path in paths) if isinstance(paths, list) else []

    @cached_property
    def _local_roots(self) -> dict[str, nn.Module]:
        return {path: local_module(root) for path, root in self.roots.items()}

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return {
            ".".join(part for part in (path, name) if part): module
            for path, root in self._local_roots.items()
            for name, module in root.named_modules()
        }

    @cached_property
    def _structures(self) -> dict[int, str]:
        return {}

    def module(self, path: str) -> nn.Module | None:
        """The module at a path."""
        return self._modules.get(path)

    def structure(self, module: nn.Module) -> str:
        """Its hierarchy hash."""
        known = self._structures
        if id(module) not in known:
            known[id(module)] = hierarchy_hash(module)
        return known[id(module)]

    def environment(self, module: nn.Module) -> Environment:
        """Where its engines must be valid, as the tuner has it."""
        return environment_of(module, self.config)

    def verdicts(self, module: nn.Module) -> list[Verdict]:
        """What the local cache knows of its graphs."""
        return verdicts_of(self.store, self.structure(module), self.environment(module), self.tuner.policy)

    def remember(self, paths: list[str]) -> None:
        """Note that these modules are tuned, too, so that the next process looks for their engines."""
        with self.store.exclusive(self.record_name):
            record: dict[str, Any] = self.store.read_record(self.record_name) or {}
            known = record.get("modules")
            merged = sorted({*paths, *(known if isinstance(known, list) else [])})
            self.store.write_record(self.record_name, {**record, "schema": 1, "modules": merged})
