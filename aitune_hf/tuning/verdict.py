"""What a tuning decided for one graph, kept beside its engines so that the next process decides nothing again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

from aitune_hf.cache import EngineKey, Environment, LocalStore, canonical_json
from aitune_hf.errors import AITuneError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.tuning.results import CandidateResult

__all__ = [
    "EngineRecord",
    "Verdict",
    "policy_digest",
    "read_undecided",
    "read_verdict",
    "verdict_name",
    "verdicts_of",
    "write_undecided",
    "write_verdict",
]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """An engine that won: where it is in the cache, the shapes it takes, and how it did."""

    key: EngineKey
    envelope: ShapeEnvelope
    result: CandidateResult

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "key": self.key.to_dict(),
            "envelope": self.envelope.to_dict(),
            "result": self.result.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineRecord:
        """Inverse of :meth:`to_dict`."""
        return cls(
            key=EngineKey.from_dict(data["key"]),
            envelope=ShapeEnvelope.from_dict(data["envelope"]),
            result=CandidateResult.from_dict(data["result"]),
        )


@dataclass(kw_only=True)
class Verdict:
    """The decision for one graph of one structure in one environment.

    Attributes:
        engines: winners; several where each takes other shapes.
        lost: shape combinations for which eager was kept, and why, as JSON.
        policy: digest of the settings that the decision depends on (:func:`policy_digest`).
    """

    hierarchy_hash: str
    graph: GraphSpec
    environment: Environment
    policy: str
    engines: list[EngineRecord] = field(default_factory=list)
    lost: list[dict[str, Any]] = field(default_factory=list)

    def covering(self, shapes: Sequence[Any]) -> list[EngineRecord]:
        """Engines, fewest first, that together take every combination of shapes; empty if they do not."""
        chosen: list[EngineRecord] = []
        for combination in shapes:
            if any(record.envelope.mismatch(combination) is None for record in chosen):
                continue
            fitting = [record for record in self.engines if record.envelope.mismatch(combination) is None]
            if not fitting:
                return []
            chosen.append(fitting[0])
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema": SCHEMA,
            "hierarchy_hash": self.hierarchy_hash,
            "graph": self.graph.to_dict(),
            "environment": self.environment.to_dict(),
            "policy": self.policy,
            "engines": [record.to_dict() for record in self.engines],
            "lost": self.lost,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: if the schema is another one.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"verdict schema {data.get('schema')!r}, this version reads {SCHEMA}")
        return cls(
            hierarchy_hash=data["hierarchy_hash"],
            graph=GraphSpec.from_dict(data["graph"]),
            environment=Environment.from_dict(data["environment"]),
            policy=data["policy"],
            engines=[EngineRecord.from_dict(item) for item in data["engines"]],
            lost=list(data["lost"]),
        )


def policy_digest(settings: Mapping[str, Any]) -> str:
    """Digest (16 hex digits) of the settings that decide between engines."""
    return hashlib.sha256(canonical_json(settings)).hexdigest()[:16]


def _folder(hierarchy_hash: str) -> PurePosixPath:
    return PurePosixPath(hierarchy_hash[:2]) / hierarchy_hash


def verdict_name(hierarchy_hash: str, graph_key: str, environment: Environment, policy: str) -> str:
    """The record that holds the verdict for one graph."""
    return str(_folder(hierarchy_hash) / graph_key[:32] / environment.tag / f"verdict-{policy[:8]}.json")


def _undecided_name(verdict_record: str) -> str:
    return str(PurePosixPath(verdict_record).with_name(f"open-{PurePosixPath(verdict_record).name}"))


def read_verdict(
    store: LocalStore, hierarchy_hash: str, graph_key: str, environment: Environment, policy: str
) -> Verdict | None:
    """The verdict for one graph, or None when there is none that holds here."""
    name = verdict_name(hierarchy_hash, graph_key, environment, policy)
    return _holding(_parse(store.read_record(name)), environment, policy)


def read_undecided(
    store: LocalStore, hierarchy_hash: str, graph_key: str, environment: Environment, policy: str, since: float
) -> Verdict | None:
    """What a tuning that left something open did with a graph, if that was at ``since`` (Unix time) or later."""
    name = _undecided_name(verdict_name(hierarchy_hash, graph_key, environment, policy))
    record = store.read_record(name) or {}
    written = record.get("written")
    if not isinstance(written, (int, float)) or written < since or not isinstance(record.get("verdict"), dict):
        return None
    return _holding(_parse(cast("dict[str, Any]", record["verdict"])), environment, policy)


def verdicts_of(store: LocalStore, hierarchy_hash: str, environment: Environment, policy: str) -> list[Verdict]:
    """The verdicts for every graph known of a structure."""
    names = store.records(under=str(_folder(hierarchy_hash)))
    ending = f"/{environment.tag}/verdict-{policy[:8]}.json"
    found = (_parse(store.read_record(name)) for name in names if name.endswith(ending))
    return [
        verdict
        for verdict in found
        if verdict is not None and verdict.environment == environment and verdict.policy == policy
    ]


def write_verdict(store: LocalStore, verdict: Verdict) -> None:
    """Keep a verdict."""
    store.write_record(_name_of(verdict), verdict.to_dict())


def write_undecided(store: LocalStore, verdict: Verdict) -> None:
    """Keep what was done about a graph whose decision was left open.

    It holds for the tunings that run at this moment, so that all processes and all equal modules do the same; later
    ones decide anew.
    """
    record = {"schema": SCHEMA, "written": time.time(), "verdict": verdict.to_dict()}
    store.write_record(_undecided_name(_name_of(verdict)), record)


def _name_of(verdict: Verdict) -> str:
    return verdict_name(verdict.hierarchy_hash, verdict.graph.key, verdict.environment, verdict.policy)


def _holding(verdict: Verdict | None, environment: Environment, policy: str) -> Verdict | None:
    fits = verdict is not None and verdict.environment == environment and verdict.policy == policy
    return verdict if fits else None


def _parse(data: Mapping[str, Any] | None) -> Verdict | None:
    if data is None:
        return None
    try:
        return Verdict.from_dict(data)
    except (KeyError, TypeError, ValueError, AITuneError):
        return None  # Written by another version, or tampered with: as good as absent.
