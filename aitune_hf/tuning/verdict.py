"""What a tuning decided for one graph, kept beside its engines so that the next process decides nothing again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

from aitune_hf.cache import EngineKey, Environment, LocalStore, canonical_json
from aitune_hf.errors import AITuneError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.tuning.baked import WeightsDigest
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

#: 2: candidates carry their options; engines may be lossy, hold weights, or leave some batch sizes to eager.
#: 3: a lossy engine names the next best ones, not the best strict one alone.
SCHEMA = 3
#: Engines that one verdict remembers: engines that hold weights are one per set of weights.
MAX_ENGINES = 32


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """An engine that won: where it is in the cache, the shapes it takes, and how it did.

    Attributes:
        eager_at: ``[input, axis, size]`` of the batch sizes at which eager is faster and answers.
        admitted: of a lossy engine: the ``metric``, its ``value`` on the whole pipeline, and the digest of the module's
            ``weights`` with which that was measured.
        fallback: of a lossy engine: the next best one that is nearer to eager, for where the budget is not met. It may be
            lossy and have a fallback itself.
    """

    key: EngineKey
    envelope: ShapeEnvelope
    result: CandidateResult
    eager_at: Sequence[tuple[int, int, int]] = ()
    admitted: Mapping[str, Any] | None = None
    fallback: EngineRecord | None = None

    def chain(self) -> Iterator[EngineRecord]:
        """Itself, its fallback, that one's fallback, and so on."""
        step: EngineRecord | None = self
        while step is not None:
            yield step
            step = step.fallback

    @property
    def strict(self) -> EngineRecord | None:
        """The best one of the chain that is not lossy."""
        return next((one for one in self.chain() if not one.result.lossy), None)

    def takes_all_of(self, other: EngineRecord) -> bool:
        """True if it takes every combination of shapes that another one takes."""
        return all(self.envelope.mismatch(shapes) is None for shapes in other.envelope.corners())

    def is_for(self, weights: WeightsDigest, *, measured: bool = False) -> bool:
        """True unless it holds other weights than the module has now.

        Args:
            measured: a lossy engine must also have been measured on a whole pipeline with these very weights.
        """
        if self.key.weights_digest is not None and self.key.weights_digest != weights.digest():
            return False
        if measured and self.result.lossy:
            return self.admitted is not None and self.admitted.get("weights") == weights.digest()
        return True

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "key": self.key.to_dict(),
            "envelope": self.envelope.to_dict(),
            "result": self.result.to_dict(),
            "eager_at": [list(place) for place in self.eager_at],
            "admitted": dict(self.admitted) if self.admitted is not None else None,
            "fallback": self.fallback.to_dict() if self.fallback is not None else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineRecord:
        """Inverse of :meth:`to_dict`."""
        return cls(
            key=EngineKey.from_dict(data["key"]),
            envelope=ShapeEnvelope.from_dict(data["envelope"]),
            result=CandidateResult.from_dict(data["result"]),
            eager_at=tuple((int(index), int(axis), int(size)) for index, axis, size in data["eager_at"]),
            admitted=data["admitted"],
            fallback=cls.from_dict(data["fallback"]) if data["fallback"] is not None else None,
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

    def add(self, record: EngineRecord) -> None:
        """Take note of an engine that won just now: it comes before those that won earlier."""
        self.engines = [record, *(old for old in self.engines if old.key != record.key)][:MAX_ENGINES]

    def remove(self, record: EngineRecord) -> None:
        """Forget an engine."""
        self.engines = [old for old in self.engines if old.key != record.key]

    def forget_lost(self, shapes: Sequence[Any]) -> None:
        """Forget that eager was kept for these combinations of shapes: they are decided anew."""
        anew = [[list(shape) for shape in combination] for combination in shapes]
        kept = [{**entry, "shapes": [one for one in entry["shapes"] if one not in anew]} for entry in self.lost]
        self.lost = [entry for entry in kept if entry["shapes"]]

    def covering(self, shapes: Sequence[Any], weights: WeightsDigest) -> list[EngineRecord]:
        """Engines, fewest first, that together take every combination of shapes; empty if they do not.

        Args:
            weights: of the module; engines that hold others are passed over.
        """
        chosen: list[EngineRecord] = []
        for combination in shapes:
            if any(record.envelope.mismatch(combination) is None for record in chosen):
                continue
            fitting = (record for record in self.engines if record.envelope.mismatch(combination) is None)
            found = next((record for record in fitting if record.is_for(weights)), None)
            if found is None:
                return []
            chosen.append(found)
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
