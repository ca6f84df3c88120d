"""The local side of sharing: a pipeline's modules by path, their structures, and the cache that has their engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from torch import nn

from aitune_hf.cache import Environment, LocalStore
from aitune_hf.config import TuneConfig
from aitune_hf.errors import ConfigError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.tuning.drive import make_tuner, record_name
from aitune_hf.tuning.place import environment_of
from aitune_hf.tuning.ranks import local_module
from aitune_hf.tuning.tuner import EngineTuner
from aitune_hf.tuning.unverified import UNVERIFIED_POLICY, write_unverified_modules
from aitune_hf.tuning.verdict import EngineRecord, Verdict, read_verdict, verdicts_of, write_verdict

__all__ = ["Target", "place_of"]


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
    def unverified_paths(self) -> dict[Environment, list[str]]:
        """For which kinds of machine engines were built that nobody has run yet, and for which modules."""
        start = f"pipelines/{self.pipeline_hash}-"
        found: dict[Environment, list[str]] = {}
        for name in self.store.records(under="pipelines"):
            place = place_of(PurePosixPath(name).stem.removeprefix(PurePosixPath(start).name))
            if not name.startswith(start) or place is None:
                continue
            record: dict[str, Any] = self.store.read_record(name) or {}
            paths = record.get("modules")
            found[place] = sorted(str(path) for path in paths) if isinstance(paths, list) else []
        return found

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

    def unverified_verdicts(self, module: nn.Module, place: Environment) -> list[Verdict]:
        """What the local cache knows of engines for its graphs that were built for another kind of machine."""
        return verdicts_of(self.store, self.structure(module), place, UNVERIFIED_POLICY)

    def keep_unverified(
        self, path: str, graph: GraphSpec, engines: Sequence[EngineRecord], place: Environment | None = None
    ) -> None:
        """Note engines that nobody has run yet, whatever was said of them elsewhere. What was found out here stays.

        Args:
            place: the kind of machine they are for; this one if None.
        """
        place = place or self.environment(self._modules[path]).for_plans()
        structure = self.structure(self._modules[path])
        known = read_verdict(self.store, structure, graph.key[:32], place, UNVERIFIED_POLICY) or Verdict(
            hierarchy_hash=structure, graph=graph, environment=place, policy=UNVERIFIED_POLICY
        )
        there = {record.key for record in known.engines}
        for record in reversed([each for each in engines if each.key not in there]):
            known.add(replace(record, result=replace(record.result, outcome="unverified")))
        write_verdict(self.store, known)
        write_unverified_modules(self.store, self._local_roots, place, [path])

    def remember(self, paths: list[str]) -> None:
        """Note that these modules are tuned, too, so that the next process looks for their engines."""
        with self.store.exclusive(self.record_name):
            record: dict[str, Any] = self.store.read_record(self.record_name) or {}
            known = record.get("modules")
            merged = sorted({*paths, *(known if isinstance(known, list) else [])})
            self.store.write_record(self.record_name, {**record, "schema": 1, "modules": merged})


def place_of(tag: str) -> Environment | None:
    """The kind of machine that a tag such as ``cuda-sm89-x86_64-linux`` names; None for a tag of another form."""
    device, *level, arch, os = tag.split("-") if 3 <= len(tag.split("-")) <= 4 else ("", "", "")
    try:
        whole = Environment(device_type=device, sm=level[0] if level else None, arch=arch, os=os, torch="any")
    except ConfigError:
        return None
    return whole.for_plans() if whole.for_plans().tag == tag else None
