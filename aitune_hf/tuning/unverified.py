"""Engines that nobody has run yet: built for a machine that was not there.

They lie in the cache under the environment they were built for, with a verdict of their own that says ``unverified``.
The first process on such a machine takes them over, checks each against eager at its first call, and writes down what
came of it. They are not timed: ``tune`` on that machine decides as if they were not there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from aitune_hf.cache import Environment, LocalStore
from aitune_hf.errors import CandidateError, ConfigError
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.tuning.candidate import Subject
from aitune_hf.tuning.place import pipeline_hash, target_record_name
from aitune_hf.tuning.trial import closed_on_error
from aitune_hf.tuning.verdict import EngineRecord, Verdict, policy_digest, verdicts_of, write_verdict

if TYPE_CHECKING:
    from aitune_hf.tuning.verdict_book import VerdictBook

__all__ = ["UNVERIFIED_POLICY", "read_unverified_modules", "unverified_engines", "write_unverified_modules"]

logger = logging.getLogger("aitune_hf")

#: No settings decided about these engines, so those of the machine that finds them do not matter.
UNVERIFIED_POLICY = policy_digest({"decided": False})


def unverified_engines(book: VerdictBook, subject: Subject) -> list[InstalledEngine]:
    """Engines for a module that were built elsewhere for a machine like this one; none of them is trusted yet."""
    found: list[InstalledEngine] = []
    place = subject.environment.for_plans()
    for verdict in verdicts_of(book.store, subject.hierarchy_hash, place, UNVERIFIED_POLICY):
        with closed_on_error(found):
            for record in verdict.engines:
                try:
                    installed = book.load(subject, verdict, record)
                except CandidateError as error:
                    reason = "an engine that was built for this kind of machine is not used"
                    logger.warning("%s: %s: %s", subject.path, reason, error)
                    continue
                _watch(book.store, installed, verdict, record)
                found.append(installed)
    return found


def _watch(store: LocalStore, installed: InstalledEngine, verdict: Verdict, record: EngineRecord) -> None:
    """Write down what comes of its first call."""
    evict = installed.on_wrong

    def wrong(reason: str) -> None:
        evict(reason)
        _rewrite(store, verdict, record, None)

    def right() -> None:
        result = replace(record.result, outcome="right", reason="checked at its first call, not timed", source="loaded")
        _rewrite(store, verdict, record, replace(record, result=result))

    installed.on_wrong = wrong
    if record.result.outcome == "unverified":
        installed.on_right = right


def _rewrite(store: LocalStore, verdict: Verdict, old: EngineRecord, new: EngineRecord | None) -> None:
    places = verdicts_of(store, verdict.hierarchy_hash, verdict.environment, UNVERIFIED_POLICY)
    latest = next((one for one in places if one.graph.key == verdict.graph.key), verdict)
    kept = [record for record in latest.engines if record.key != old.key]
    latest.engines = kept if new is None else [new, *kept]
    write_verdict(store, latest)


def write_unverified_modules(
    store: LocalStore, roots: Mapping[str, nn.Module], place: Environment, modules: Sequence[str]
) -> None:
    """Note which modules of a target have engines for ``place``: their paths."""
    name = _record_name(roots, place)
    store.write_record(name, {"schema": 1, "modules": sorted({*_listed(store.read_record(name)), *modules})})


def read_unverified_modules(store: LocalStore, roots: Mapping[str, nn.Module]) -> list[str]:
    """Paths of the modules of a target for which engines were built elsewhere, for a machine like this one."""
    kinds = (tensor.device.type for root in roots.values() for tensor in root.parameters())
    try:
        place = Environment.current(next(kinds, "cpu")).for_plans()
    except ConfigError:
        return []
    if not any(name.endswith(f"-{place.tag}.json") for name in store.records(under="pipelines")):
        return []  # As nearly always; hashing a large target takes a moment.
    return _listed(store.read_record(_record_name(roots, place)))


def _record_name(roots: Mapping[str, nn.Module], place: Environment) -> str:
    return target_record_name(pipeline_hash(roots), place.tag)


def _listed(record: Mapping[str, Any] | None) -> list[str]:
    modules = record.get("modules") if record else None
    return [path for path in modules if isinstance(path, str)] if isinstance(modules, list) else []
