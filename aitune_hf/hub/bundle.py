"""The engines that a pipeline uses, copied out of the local cache, and the record that lists them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from aitune_hf.cache import EngineKey, FileDigest, Miss
from aitune_hf.cache.manifest import MANIFEST_NAME
from aitune_hf.hub.plausibility import printable
from aitune_hf.hub.record import PipelineRecord, SharedEngine, SharedVerdict, TunedIn
from aitune_hf.hub.signature import SIGNATURE_NAME, sign_manifest
from aitune_hf.hub.target import Target
from aitune_hf.tuning.baked import WeightsDigest
from aitune_hf.tuning.verdict import EngineRecord, Verdict

__all__ = ["Bundle", "collect"]


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What there is to push: the record of it, the folder with each engine's files, and what is gone."""

    record: PipelineRecord
    folders: Mapping[EngineKey, Path]
    missing: tuple[str, ...] = ()


def collect(target: Target, folder: Path, signing_key: bytes | None = None) -> Bundle:
    """Copy the engines that a pipeline uses into ``folder``, every byte checked.

    Only winners are taken, not what was tried beside them; and what was built for machines that are not here.
    """
    tuned: dict[str, TunedIn] = {}
    shelf = _Shelf(target=target, folder=folder, signing_key=signing_key)
    for path in target.tuned_paths:
        module = target.module(path)
        if module is None:
            continue
        structure, environment = target.structure(module), target.environment(module)
        found = tuple(shelf.shared(verdict, module) for verdict in target.verdicts(module))
        mine = TunedIn(environment=environment, modules={path: structure}, verdicts={structure: found})
        place = tuned.get(environment.tag)
        # Modules of equal structure may use different engines: those that hold weights.
        tuned[environment.tag] = place.merged(mine) if place else mine
    for kind, paths in target.unverified_paths.items():
        for path in paths:
            module = target.module(path)
            if module is not None:
                structure = target.structure(module)
                found = tuple(shelf.shared(each, module) for each in target.unverified_verdicts(module, kind))
                mine = TunedIn(environment=kind, modules={path: structure}, verdicts={structure: found})
                tuned[kind.tag] = tuned[kind.tag].merged(mine) if kind.tag in tuned else mine
    record = PipelineRecord(
        pipeline_hash=target.pipeline_hash,
        pipeline=target.name,
        roots=target.root_hashes,
        tuned=tuple(tuned[tag] for tag in sorted(tuned)),
    )
    return Bundle(record=record, folders=shelf.folders, missing=tuple(shelf.missing))


@dataclass(frozen=True, kw_only=True)
class _Shelf:
    """The engines copied so far, each once."""

    target: Target
    folder: Path
    signing_key: bytes | None
    engines: dict[EngineKey, SharedEngine] = field(default_factory=dict)
    folders: dict[EngineKey, Path] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def shared(self, verdict: Verdict, module: nn.Module) -> SharedVerdict:
        """A verdict with the engines in it that this module uses."""
        weights = WeightsDigest(module)
        used = [record for record in verdict.engines if record.is_for(weights)]
        strict = [record.strict for record in used if record.result.lossy]
        used += [record for record in strict if record is not None and record.is_for(weights)]
        found = [engine for record in used if (engine := self._engine(record)) is not None]
        lost = tuple({**item, "reason": printable(str(item["reason"]))} for item in verdict.lost)
        return SharedVerdict(graph=verdict.graph, engines=tuple(found), lost=lost)

    def _engine(self, record: EngineRecord) -> SharedEngine | None:
        key = record.key
        if key not in self.engines:
            copied = _copy(self.target, key, self.folder / str(len(self.folders)), self.signing_key)
            if isinstance(copied, Miss):
                self.missing.append(f"{key.entry_path}: {copied.reason}")
                return None
            self.folders[key], files = copied
            self.engines[key] = SharedEngine(record=_for_others(record), files=files)
        return self.engines[key]


def _copy(
    target: Target, key: EngineKey, folder: Path, signing_key: bytes | None
) -> tuple[Path, dict[str, FileDigest]] | Miss:
    """The entry's files in a folder of our own, where nobody changes them while they are uploaded."""
    found = target.store.checkout(key, folder)
    if isinstance(found, Miss):
        return found
    data = found.manifest.to_bytes()  # A manifest has one spelling, so this is what was read.
    (folder / MANIFEST_NAME).write_bytes(data)
    files = {**found.manifest.files, MANIFEST_NAME: _digest(data)}
    if signing_key is not None:
        signature = sign_manifest(signing_key, data)
        (folder / SIGNATURE_NAME).write_bytes(signature)
        files[SIGNATURE_NAME] = _digest(signature)
    return folder, files


def _for_others(record: EngineRecord) -> EngineRecord:
    # Lossy ones that were never measured on a whole pipeline stay here.
    strict = record.strict if record.result.lossy else None
    fallback = None if strict is None else _for_others(strict)
    return replace(record, result=replace(record.result, reason=printable(record.result.reason)), fallback=fallback)


def _digest(data: bytes) -> FileDigest:
    return FileDigest(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
