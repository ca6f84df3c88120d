"""The one file that says everything that a remote has for one pipeline structure.

``aitune/v1/pipelines/<pipeline hash>.json``: per environment, which module paths are tuned, of what structure they are,
and per structure what was decided for each graph, with the key, shapes, results, sizes and digests of the engines. So
one request tells hit from miss, and what to fetch. It is written by whoever pushes and read by strangers: reading it
opens, imports and runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aitune_hf.cache import EngineKey, Environment, FileDigest, UnknownSchemaError, canonical_json
from aitune_hf.cache.fields import exact_fields, object_field, text_field, whole_number
from aitune_hf.cache.key import LAYOUT
from aitune_hf.cache.manifest import MANIFEST_NAME, check_file_names
from aitune_hf.cache.sealed import seal, unseal
from aitune_hf.errors import AITuneError, CorruptEntryError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.hub.plausibility import check_lost, check_record, check_text
from aitune_hf.hub.signature import SIGNATURE_NAME
from aitune_hf.tuning.verdict import EngineRecord

__all__ = ["SCHEMA", "PipelineRecord", "SharedEngine", "SharedVerdict", "TunedIn", "record_path"]

#: 2: a lossy engine has a fallback.
SCHEMA = 2
_MAX_FILE_BYTES = 64 * 2**30


def record_path(pipeline_hash: str) -> str:
    """Where a remote keeps the record of a pipeline structure."""
    return str(LAYOUT / _seal_name(pipeline_hash))


def _seal_name(pipeline_hash: str) -> str:
    return f"pipelines/{pipeline_hash}.json"


@dataclass(frozen=True, kw_only=True)
class SharedEngine:
    """An engine that a remote has: the decision it won, and its files, the manifest included."""

    record: EngineRecord
    files: Mapping[str, FileDigest]

    @property
    def key(self) -> EngineKey:
        """The engine's identity."""
        return self.record.key

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(digest.size for digest in self.files.values())

    @property
    def shapes(self) -> str:
        """The shapes it takes, in a form to compare by."""
        return canonical_json(self.record.envelope.to_dict()).decode()

    @property
    def speedup(self) -> float:
        """Eager / engine where it was built; 0 if it was not timed."""
        return self.record.result.timing.speedup if self.record.result.timing else 0.0

    def paths(self, names: Iterable[str] | None = None) -> dict[str, FileDigest]:
        """Path in the remote → digest, of all files or of those with these names."""
        chosen = self.files if names is None else {name: self.files[name] for name in names if name in self.files}
        return {str(self.key.entry_path / name): digest for name, digest in chosen.items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        files = {name: {"sha256": one.sha256, "size": one.size} for name, one in self.files.items()}
        return {**self.record.to_dict(), "files": files}

    @classmethod
    def from_dict(cls, data: object) -> SharedEngine:
        """Inverse of :meth:`to_dict`."""
        fields = _object(data)
        listed = object_field(fields, "files")
        if MANIFEST_NAME not in listed:
            raise CorruptEntryError(f"an engine without {MANIFEST_NAME}")
        check_file_names(name for name in listed if name not in (MANIFEST_NAME, SIGNATURE_NAME))
        files = {}
        for name, value in listed.items():
            one = exact_fields(value, ("sha256", "size"), name)
            files[name] = FileDigest(sha256=text_field(one, "sha256", "[0-9a-f]{64}"), size=whole_number(one, "size"))
            if files[name].size > _MAX_FILE_BYTES:
                raise CorruptEntryError(f"{name}: {files[name].size} bytes are more than an engine can have")
        record = EngineRecord.from_dict({key: fields[key] for key in fields if key != "files"})
        for each in record.chain():
            check_record(each)
        return cls(record=record, files=files)


@dataclass(frozen=True, kw_only=True)
class SharedVerdict:
    """What was decided for one graph: the engines, and the shapes for which eager was faster (``lost``, as JSON).

    Its JSON form lists the fastest engine first.
    """

    graph: GraphSpec
    engines: tuple[SharedEngine, ...] = ()
    lost: tuple[Mapping[str, Any], ...] = ()

    def merged(self, other: SharedVerdict) -> SharedVerdict:
        """Both. An engine that both have stays as it is here."""
        known = {engine.key for engine in self.engines}
        engines = [*self.engines, *(engine for engine in other.engines if engine.key not in known)]
        lost = {canonical_json(item): item for item in (*self.lost, *other.lost)}
        return replace(self, engines=tuple(engines), lost=tuple(lost.values()))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        engines = sorted(self.engines, key=lambda engine: (-engine.speedup, engine.key.digest))
        return {
            "graph": self.graph.to_dict(),
            "engines": [engine.to_dict() for engine in engines],
            "lost": sorted(self.lost, key=canonical_json),
        }

    @classmethod
    def from_dict(cls, data: object, structure: str) -> SharedVerdict:
        """Inverse of :meth:`to_dict`. ``structure``: the hierarchy hash that its engines must be for."""
        fields = exact_fields(data, ("graph", "engines", "lost"), "verdict")
        graph = GraphSpec.from_dict(object_field(fields, "graph"))
        engines = tuple(SharedEngine.from_dict(item) for item in _items(fields, "engines"))
        for record in (step for engine in engines for step in engine.record.chain()):
            if record.key.hierarchy_hash != structure or record.key.graph_key != graph.key[:32]:
                raise CorruptEntryError("an engine that is not for the graph it is listed under")
        return cls(graph=graph, engines=engines, lost=tuple(check_lost(item) for item in _items(fields, "lost")))


@dataclass(frozen=True, kw_only=True)
class TunedIn:
    """What was tuned in one environment: module path → structure, and structure → verdicts."""

    environment: Environment
    modules: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, tuple[SharedVerdict, ...]] = field(default_factory=dict)

    def merged(self, other: TunedIn) -> TunedIn:
        """Both."""
        verdicts: dict[str, tuple[SharedVerdict, ...]] = dict(self.verdicts)
        for structure, theirs in other.verdicts.items():
            by_graph = {verdict.graph.key: verdict for verdict in verdicts.get(structure, ())}
            for verdict in theirs:
                mine = by_graph.get(verdict.graph.key)
                by_graph[verdict.graph.key] = mine.merged(verdict) if mine else verdict
            verdicts[structure] = tuple(by_graph.values())
        return replace(self, modules={**other.modules, **self.modules}, verdicts=verdicts)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "environment": self.environment.to_dict(),
            "modules": dict(self.modules),
            "verdicts": {
                structure: [one.to_dict() for one in sorted(found, key=lambda one: one.graph.key)]
                for structure, found in self.verdicts.items()
            },
        }

    @classmethod
    def from_dict(cls, data: object) -> TunedIn:
        """Inverse of :meth:`to_dict`."""
        fields = exact_fields(data, ("environment", "modules", "verdicts"), "environment")
        verdicts = object_field(fields, "verdicts")
        modules = object_field(fields, "modules")
        for path in modules:
            check_text(path, "module path")
        if not all(re.fullmatch("[0-9a-f]{64}", structure) for structure in verdicts):
            raise CorruptEntryError("verdicts: expected hierarchy hashes")
        return cls(
            environment=Environment.from_dict(fields["environment"]),
            modules={path: text_field(modules, path, "[0-9a-f]{64}") for path in modules},
            verdicts={
                structure: tuple(SharedVerdict.from_dict(item, structure) for item in _items(verdicts, structure))
                for structure in verdicts
            },
        )


@dataclass(frozen=True, kw_only=True)
class PipelineRecord:
    """What a remote has for one pipeline structure.

    Attributes:
        pipeline_hash: identity of the structure.
        pipeline: class name of the target, for people.
        roots: component → hierarchy hash, which tells two pipelines' difference.
        tuned: one item per environment.
    """

    pipeline_hash: str
    pipeline: str
    roots: Mapping[str, str]
    tuned: tuple[TunedIn, ...] = ()

    @property
    def path(self) -> str:
        """Its path in a remote."""
        return record_path(self.pipeline_hash)

    def engines(self) -> dict[EngineKey, SharedEngine]:
        """Every engine in it."""
        return {
            engine.key: engine
            for tuned in self.tuned
            for verdicts in tuned.verdicts.values()
            for verdict in verdicts
            for engine in verdict.engines
        }

    def with_files(self, files: Mapping[EngineKey, Mapping[str, FileDigest]]) -> PipelineRecord:
        """The same, where engines with these keys have these files."""

        def changed(verdict: SharedVerdict) -> SharedVerdict:
            engines = (replace(each, files=files.get(each.key, each.files)) for each in verdict.engines)
            return replace(verdict, engines=tuple(engines))

        return replace(
            self,
            tuned=tuple(
                replace(one, verdicts={key: tuple(map(changed, found)) for key, found in one.verdicts.items()})
                for one in self.tuned
            ),
        )

    def merged(self, other: PipelineRecord) -> PipelineRecord:
        """What this one says, and what ``other`` adds."""
        places = {canonical_json(tuned.environment.to_dict()): tuned for tuned in self.tuned}
        for tuned in other.tuned:
            place = canonical_json(tuned.environment.to_dict())
            # One engine may be listed under several environments; it has one set of files.
            fixed = replace(tuned, verdicts={key: self._as_here(found) for key, found in tuned.verdicts.items()})
            places[place] = places[place].merged(fixed) if place in places else fixed
        return replace(self, tuned=tuple(places.values()))

    def _as_here(self, verdicts: Sequence[SharedVerdict]) -> tuple[SharedVerdict, ...]:
        known = self.engines()
        return tuple(
            replace(verdict, engines=tuple(known.get(engine.key, engine) for engine in verdict.engines))
            for verdict in verdicts
        )

    def to_bytes(self) -> bytes:
        """The bytes of the file: canonical JSON that knows its own digest. Equal contents give equal bytes."""
        body = {
            "schema": SCHEMA,
            "pipeline_hash": self.pipeline_hash,
            "pipeline": self.pipeline,
            "roots": dict(self.roots),
            "tuned": sorted((tuned.to_dict() for tuned in self.tuned), key=canonical_json),
        }
        return seal(_seal_name(self.pipeline_hash), body)

    @classmethod
    def from_bytes(cls, pipeline_hash: str, data: bytes) -> PipelineRecord:
        """The record in these bytes.

        Raises:
            UnknownSchemaError: if it was written for another version of the format.
            CorruptEntryError: if it is anything but a record of this pipeline.
        """
        body = unseal(_seal_name(pipeline_hash), data)
        if body.get("schema") != SCHEMA:
            raise UnknownSchemaError(
                f"the record has schema {body.get('schema')!r}, this version reads {SCHEMA}: upgrade aitune-hf"
            )
        try:
            record = cls._from_body(pipeline_hash, body)
            record.to_bytes()  # Whoever adds to it must be able to write it.
            return record
        except CorruptEntryError:
            raise
        except (AITuneError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            raise CorruptEntryError(f"the record of {pipeline_hash[:12]}: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_body(cls, pipeline_hash: str, body: Mapping[str, object]) -> PipelineRecord:
        fields = exact_fields(body, ("schema", "pipeline_hash", "pipeline", "roots", "tuned"), "record")
        if fields["pipeline_hash"] != pipeline_hash:
            raise CorruptEntryError("the record belongs to another pipeline")
        roots = object_field(fields, "roots")
        for text in (text_field(fields, "pipeline"), *roots):
            check_text(text, "name of a pipeline or component")
        return cls(
            pipeline_hash=pipeline_hash,
            pipeline=text_field(fields, "pipeline"),
            roots={path: text_field(roots, path, "[0-9a-f]{64}") for path in roots},
            tuned=tuple(TunedIn.from_dict(item) for item in _items(fields, "tuned")),
        )


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptEntryError("expected a list")
    return value


def _items(data: Mapping[str, object], name: str) -> list[object]:
    return _list(data[name])


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptEntryError("expected an object")
    return value
