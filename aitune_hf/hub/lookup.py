"""What a remote has for a pipeline, and what of it fits this machine: decided by one small file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from torch import nn

from aitune_hf.backends.base import full_version, unread_format
from aitune_hf.cache import Environment, UnknownSchemaError
from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.errors import CandidateError, CorruptEntryError
from aitune_hf.hub.record import PipelineRecord, SharedEngine, SharedVerdict, TunedIn, record_path
from aitune_hf.hub.remote import Reading, Remote, RemoteError, is_commit, revision_of
from aitune_hf.hub.target import Target
from aitune_hf.tuning.baked import WeightsDigest

__all__ = ["Finding", "Fit", "Lookup", "look_up"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a remote has for one module.

    Attributes:
        path: of the module.
        structure: its hierarchy hash.
        verdicts: per graph, the engines that fit, the fastest first; empty if none does. Where several take the same
            shapes, the first that may run here is used.
        unverified: per graph, engines that were built for this kind of machine on another one, and never timed.
        reason: why there is none, or in what the nearest one does not fit.
        elsewhere: per graph, engines for other machines: their recipes may be worth a try.
    """

    path: str
    structure: str
    verdicts: tuple[SharedVerdict, ...] = ()
    unverified: tuple[SharedVerdict, ...] = ()
    reason: str = ""
    elsewhere: tuple[SharedEngine, ...] = ()

    @property
    def engines(self) -> list[SharedEngine]:
        """Those that fit."""
        return [engine for verdict in (*self.verdicts, *self.unverified) for engine in verdict.engines]

    @property
    def first_choices(self) -> list[SharedEngine]:
        """Of those that take the same shapes, the first."""
        chosen: dict[tuple[str, str], SharedEngine] = {}
        for verdict in (*self.verdicts, *self.unverified):
            for engine in verdict.engines:
                chosen.setdefault((verdict.graph.key, engine.shapes), engine)
        return list(chosen.values())


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What a remote has for a pipeline.

    Attributes:
        commit: the state it was read at; empty where the remote keeps no history.
        reason: why there is nothing at all; empty if there is a record of this structure.
    """

    repo: str
    commit: str
    findings: tuple[Finding, ...] = ()
    reason: str = ""

    @property
    def hits(self) -> list[Finding]:
        """Modules for which some engine fits."""
        return [finding for finding in self.findings if finding.engines]

    def summary(self) -> str:
        """A line per module."""
        at = f" at {self.commit[:12]}" if self.commit else ""
        lines = [f"{self.repo}{at}: {self.reason or f'engines for {len(self.hits)} of {len(self.findings)} modules'}"]
        for finding in self.findings:
            size = sum(engine.size for engine in finding.first_choices)
            backends = ", ".join(dict.fromkeys(engine.key.backend for engine in finding.first_choices))
            answer = f"hit: {backends}, {size / 1e6:.2f} MB" if finding.engines else f"miss: {finding.reason}"
            lines.append(f"  {finding.path or 'the model'}: {answer}")
        return "\n".join(lines)


def look_up(target: Target, remote: Remote, *, revision: str | None = None, local_only: bool = False) -> Lookup:
    """Read the record of the target's structure, in one request, and compare it with this machine.

    The record is kept in the local cache, so that without a network, or at a commit, the same question needs no
    request.

    Raises:
        RemoteError: if the remote fails.
    """
    revision = revision_of(remote, revision)
    for is_last in (False, True):
        reading = _read(target, remote, revision, local_only)
        if reading.data is None:
            if is_commit(revision):
                _keep(target, remote, revision, reading)
            return Lookup(repo=remote.url, commit=reading.commit, reason="no engines for this pipeline structure")
        try:
            record = PipelineRecord.from_bytes(target.pipeline_hash, reading.data)
            break
        except CorruptEntryError as error:
            # What was garbled on the way is right the second time.
            if is_last or isinstance(error, UnknownSchemaError):
                raise RemoteError(
                    f"{remote.url}: its record of this pipeline cannot be used: {error}", "broken"
                ) from error
    _keep(target, remote, revision, reading)
    return Lookup(repo=remote.url, commit=reading.commit, findings=tuple(_findings(target, record)))


# -- one request, or none ----------------------------------------------------------------------------------------------


def _read(target: Target, remote: Remote, revision: str | None, local_only: bool) -> Reading:
    path = record_path(target.pipeline_hash)
    kept = _kept(target, remote, revision)
    if kept is not None and is_commit(revision):
        return kept
    try:
        return remote.read(path, revision=revision, max_bytes=MAX_JSON_BYTES, local_only=local_only)
    except RemoteError as error:
        if error.cause == "offline" and kept is not None:
            return kept
        raise


def _kept_name(target: Target, remote: Remote, revision: str | None) -> str:
    place = hashlib.sha256(f"{remote.url}@{revision or 'main'}".encode()).hexdigest()[:32]
    return f"remotes/{place}/{target.pipeline_hash[:32]}.json"


def _kept(target: Target, remote: Remote, revision: str | None) -> Reading | None:
    record = target.store.read_record(_kept_name(target, remote, revision)) or {}
    text, commit = record.get("record"), record.get("commit")
    if not isinstance(text, (str, type(None))) or not isinstance(commit, str):
        return None
    return Reading(data=None if text is None else text.encode(), commit=commit)


def _keep(target: Target, remote: Remote, revision: str | None, reading: Reading) -> None:
    """Keep what was read, by the name it was asked for and by its commit; that there is nothing, by its commit alone."""
    if reading.data is not None and len(reading.data) > MAX_JSON_BYTES // 2:
        return  # It would not fit into a record when quoted; it is read again.
    text = None if reading.data is None else reading.data.decode()
    body = {"schema": 1, "remote": remote.url, "commit": reading.commit, "record": text}
    for name in {_kept_name(target, remote, revision), _kept_name(target, remote, reading.commit or revision)}:
        if target.store.read_record(name) != body:
            target.store.write_record(name, body)


# -- hit or miss -------------------------------------------------------------------------------------------------------


def _findings(target: Target, record: PipelineRecord) -> Iterator[Finding]:
    paths = sorted({path for tuned in record.tuned for path in tuned.modules})
    for path in paths:
        module = target.module(path)
        if module is None:
            yield Finding(path=path, structure="", reason="there is no such module here")
            continue
        structure = target.structure(module)
        places = [tuned for tuned in record.tuned if tuned.modules.get(path) == structure]
        if not places:
            yield Finding(path=path, structure=structure, reason="built for another module structure")
        else:
            yield _finding(target, path, module, places)


def _finding(target: Target, path: str, module: nn.Module, places: Sequence[TunedIn]) -> Finding:
    structure, here = target.structure(module), target.environment(module)
    here_first = sorted(places, key=lambda tuned: _distance(here, tuned.environment))
    fit = Fit(target=target, module=module, here=here)
    verdicts: dict[str, SharedVerdict] = {}
    unverified: dict[str, SharedVerdict] = {}
    reasons: list[str] = []
    elsewhere: list[SharedEngine] = []
    for tuned in here_first:
        is_unverified = tuned.environment == tuned.environment.for_plans()
        known = unverified if is_unverified else verdicts
        for verdict in tuned.verdicts.get(structure, ()):
            found = []
            for engine in verdict.engines:
                reason = fit.objection(engine)
                if reason is None:
                    found.append(engine)
                else:
                    reasons.append(reason)
                    if not is_unverified:  # A recipe that was never timed is no hint.
                        elsewhere.append(engine)
            # For which shapes eager is faster is for this machine to measure: a stranger's word would end its tuning.
            mine = known.get(verdict.graph.key)
            added = replace(verdict, engines=tuple(found), lost=())
            known[verdict.graph.key] = mine.merged(added) if mine else added
    chosen = tuple(verdict for verdict in verdicts.values() if verdict.engines)
    never_run = tuple(verdict for verdict in unverified.values() if verdict.engines)
    reason = "" if chosen or never_run else (reasons[0] if reasons else "eager was faster there")
    return Finding(
        path=path,
        structure=structure,
        verdicts=chosen,
        unverified=never_run,
        reason=reason,
        elsewhere=tuple(elsewhere),
    )


def _distance(here: Environment, other: Environment) -> tuple[bool, int]:
    mine, theirs = asdict(here), asdict(other)
    return here.device_type != other.device_type, sum(mine[name] != theirs[name] for name in mine)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether engines can run here for one module."""

    target: Target
    module: nn.Module
    here: Environment

    def objection(self, engine: SharedEngine) -> str | None:
        """Why an engine cannot, or None."""
        key = engine.key
        backend = next((one for one in self.target.tuner.backends if one.name == key.backend), None)
        if backend is None:
            return f"the backend {key.backend} is not in use here"
        if engine.record.result.lossy and self.target.config.precision != "relaxed":
            return f"the {key.backend} engine is lossy, and precision is strict here"
        if reason := self._environment_objection(key.environment):
            return reason
        if backend.native and full_version(backend) != key.backend_version:
            return f"built with {key.backend} {key.backend_version}, here {full_version(backend)}"
        return unread_format(backend, key.backend_version) or self._weights_objection(engine)

    def _environment_objection(self, built: Environment) -> str | None:
        fitting = [self.here, self.here.for_data(), self.here.for_plans()]
        if self.here.device_type == "cpu" and self.here.can_be_portable:
            fitting.append(self.here.portable())
        if built in fitting:
            return None
        if built.is_portable and not self.here.can_be_portable:
            return f"built for x86-64-v3 CPUs, this machine has {self.here.cpu_isa}"
        asked = self.here.portable() if built.is_portable and self.here.can_be_portable else self.here
        return asked.difference(built)

    def _weights_objection(self, engine: SharedEngine) -> str | None:
        weights = WeightsDigest(self.module)
        try:
            if not engine.record.is_for(weights):
                return "it holds weights, and those of other ones"
            if not engine.record.is_for(weights, measured=True):
                return "it is lossy, and its effect on the outputs was measured with other weights"
        except CandidateError as error:
            return str(error)
        return None
