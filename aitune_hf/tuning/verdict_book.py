"""The engines that earlier tunings chose, taken from the cache by the rules of one configuration."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from aitune_hf.backends.base import Backend, full_version
from aitune_hf.cache import EngineKey, Environment, LocalStore
from aitune_hf.config import TuneConfig
from aitune_hf.errors import CandidateError, CorrectnessError, EngineLoadError, UntunableError
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.tuning.candidate import Subject, load_engine
from aitune_hf.tuning.correctness import check_engine
from aitune_hf.tuning.results import CandidateResult
from aitune_hf.tuning.trial import Work, closed_on_error, first_line
from aitune_hf.tuning.unverified import unverified_engines
from aitune_hf.tuning.verdict import (
    EngineRecord,
    Verdict,
    policy_digest,
    read_undecided,
    read_verdict,
    verdict_name,
    verdicts_of,
    write_verdict,
)
from aitune_hf.version import __version__

__all__ = ["Chosen", "VerdictBook", "policy_of"]

logger = logging.getLogger("aitune_hf")


@dataclass(kw_only=True)
class Chosen:
    """An engine in use, with the verdict that says so."""

    installed: InstalledEngine
    record: EngineRecord
    verdict: Verdict

    def takes(self, shapes: Shapes) -> bool:
        """True if these shapes lie within the engine's."""
        return self.record.envelope.mismatch(shapes) is None


def policy_of(config: TuneConfig, backends: Sequence[Backend]) -> str:
    """Digest of all settings that decide between engines: with others, everything is decided anew."""
    tolerance, quality = config.tolerance, config.quality
    return policy_digest(
        {
            "aitune_hf": __version__,
            "backends": [[backend.name, _version(backend)] for backend in backends],
            "strategy": repr(config.chosen_strategy),
            "effort": config.effort,
            "precision": config.precision,
            "quality": None if quality is None else quality.to_dict(),
            "batch_sizes": list(config.swept_batch_sizes),
            "min_speedup": config.min_speedup,
            "tolerance": None if tolerance is None else [tolerance.atol, tolerance.rtol],
        }
    )


def _version(backend: Backend) -> str:
    try:
        return full_version(backend)
    except Exception as error:  # noqa: BLE001 - code of third parties; such a backend is named as unavailable later.
        return f"unknown: {type(error).__name__}"


@dataclass(frozen=True, kw_only=True)
class VerdictBook:
    """Verdicts in a store, and the engines they name.

    Attributes:
        policy: :func:`policy_of` the configuration.
        began: when this tuning did, in Unix time: what was left open is taken from tunings that run now only.
    """

    store: LocalStore
    backends: Sequence[Backend]
    config: TuneConfig
    policy: str
    began: float = field(default_factory=time.time)

    def exclusive(self, work: Work, timeout_s: float | None) -> AbstractContextManager[None]:
        """The right to decide about a graph, for one process at a time. Raises ``KeyLockedError``."""
        return self.store.exclusive(verdict_name(*self._place(work)), timeout_s=timeout_s)

    def started(self, work: Work) -> Verdict:
        """The verdict on a graph to go on with; a new one if there is none."""
        subject = work.subject
        return read_verdict(self.store, *self._place(work)) or Verdict(
            hierarchy_hash=subject.hierarchy_hash,
            graph=work.recorded.spec,
            environment=subject.environment,
            policy=self.policy,
        )

    def merged(self, verdict: Verdict) -> Verdict:
        """A verdict together with what others have written meanwhile, such as those of equal modules with other weights."""
        place = verdict.hierarchy_hash, verdict.graph.key[:32], verdict.environment, self.policy
        latest = read_verdict(self.store, *place)
        if latest is None:
            return verdict
        for record in reversed(verdict.engines):
            if all(record.key != other.key for other in latest.engines):
                latest.add(record)
        latest.lost += [entry for entry in verdict.lost if entry not in latest.lost]
        return latest

    def verdicts(self, work: Work) -> list[Verdict]:
        """The verdict on a graph, and what a tuning under way did about it without deciding."""
        place = self._place(work)
        found = read_verdict(self.store, *place), read_undecided(self.store, *place, since=self.began)
        return [verdict for verdict in found if verdict is not None]

    def known(self, work: Work, verdicts: Sequence[Verdict]) -> list[Chosen] | None:
        """The engines for all shapes recorded now, by the first verdict that covers them; None if none does."""
        for verdict in verdicts:
            chosen = self._from_verdict(work, verdict)
            if chosen is not None:
                work.subject.stats.hits += 1
                return chosen
        return None

    def knows(self, subject: Subject) -> bool:
        """True if there is a verdict for some graph of a structure."""
        return bool(verdicts_of(self.store, subject.hierarchy_hash, subject.environment, self.policy))

    def restored(self, subject: Subject) -> tuple[list[InstalledEngine], dict[str, str]] | None:
        """Engines for a module that was not recorded; each must be checked at its first call."""
        verdicts = verdicts_of(self.store, subject.hierarchy_hash, subject.environment, self.policy)
        engines: list[InstalledEngine] = []
        reasons: dict[str, str] = {}
        for verdict in verdicts:
            with closed_on_error(engines):
                self._restore(subject, verdict, engines)
            if not verdict.engines:
                reasons[verdict.graph.key] = "eager was faster when this was tuned"
        if not verdicts:
            elsewhere = unverified_engines(self, subject)
            return (elsewhere, {}) if elsewhere else None
        return engines, reasons

    def _restore(self, subject: Subject, verdict: Verdict, engines: list[InstalledEngine]) -> None:
        """What was admitted for these weights first; a fallback only for shapes that nothing else takes."""
        taken: list[EngineRecord] = []
        lost: set[EngineKey] = set()

        def take(records: Iterable[EngineRecord]) -> None:
            for record in records:
                if any(record.key == other.key or other.takes_all_of(record) for other in taken):
                    return
                if record.key in lost:
                    continue
                try:
                    engines.append(self.load(subject, verdict, record))
                except CandidateError as error:
                    logger.warning("%s: %s", subject.path, error)
                    lost.add(record.key)
                else:
                    taken.append(record)
                    return

        for record in verdict.engines:
            if record.is_for(subject.weights, measured=True):
                take([record])
        for record in verdict.engines:
            take(one for one in record.chain() if one.is_for(subject.weights, measured=True))

    def withdraw(self, verdict: Verdict, record: EngineRecord) -> None:
        """Take back, in what was written of an engine, that it was admitted."""
        place = verdict.hierarchy_hash, verdict.graph.key[:32], verdict.environment, self.policy
        latest = read_verdict(self.store, *place)
        if latest is not None and any(one.key == record.key for one in latest.engines):
            latest.engines = [replace(one, admitted=None) if one.key == record.key else one for one in latest.engines]
            write_verdict(self.store, latest)

    def load(self, subject: Subject, verdict: Verdict, record: EngineRecord) -> InstalledEngine:
        """Load an engine that won.

        Raises:
            EngineLoadError: if it cannot be loaded here and now.
        """
        backend = next((one for one in self.backends if one.name == record.key.backend), None)
        if backend is None:
            raise EngineLoadError(f"the backend {record.key.backend} is not in use here")
        installed, seconds, _ = load_engine(subject, verdict.graph, backend, record.key, self.store)
        installed.load_s = seconds
        installed.tolerance = self.config.tolerance
        installed.eager_at = eager_sizes(record)
        subject.stats.loads += 1
        return installed

    def _place(self, work: Work) -> tuple[str, str, Environment, str]:
        subject = work.subject
        return subject.hierarchy_hash, work.recorded.spec.key[:32], subject.environment, self.policy

    def _from_verdict(self, work: Work, verdict: Verdict) -> list[Chosen] | None:
        """What an earlier tuning decided for all shapes recorded now, or None if it does not cover them."""
        shapes = list(work.recorded.samples.shapes())
        lost = [list(map(list, item)) for entry in verdict.lost for item in entry["shapes"]]
        open_shapes = [item for item in shapes if [list(shape) for shape in item] not in lost]
        try:
            records = verdict.covering(open_shapes, work.subject.weights)
        except CandidateError as failure:
            logger.warning("%s: its cached engines are not used: %s", work.subject.path, failure)
            return None
        if open_shapes and not records:
            return None
        chosen: list[Chosen] = []
        results: list[CandidateResult] = []
        for record in records:
            with closed_on_error(earlier.installed for earlier in chosen):
                found = self._loaded_and_checked(work, verdict, record)
            if found is None:
                for earlier in chosen:
                    earlier.installed.engine.close()
                return None
            installed, result = found
            chosen.append(Chosen(installed=installed, record=record, verdict=verdict))
            results.append(result)
        work.result.candidates = results
        work.result.winner = results[0] if results else None
        if not results and verdict.lost:
            work.result.reason = str(verdict.lost[-1]["reason"])
            work.result.structural = bool(verdict.lost[-1].get("structural"))
        return chosen

    def _loaded_and_checked(
        self, work: Work, verdict: Verdict, record: EngineRecord
    ) -> tuple[InstalledEngine, CandidateResult] | None:
        start = time.perf_counter()
        installed: InstalledEngine | None = None
        try:
            installed = self.load(work.subject, verdict, record)
            start = time.perf_counter()
            # The ends of its shapes were checked when it was built.
            found = check_engine(installed, work.recorded.samples, work.reference, corners=False)
        except BaseException as error:
            if installed is not None:
                installed.engine.close()
            if not isinstance(error, (CandidateError, UntunableError)):
                raise
            if isinstance(error, CorrectnessError) and installed is not None:
                installed.on_wrong(first_line(error))
            else:
                logger.warning("%s: a cached engine is not used: %s", work.subject.path, first_line(error))
            return None
        work.subject.stats.add_seconds("check", time.perf_counter() - start)
        installed.trusted = True
        result = replace(record.result, max_error=found.max_error, similarity=found.similarity, source="loaded")
        return installed, replace(result, load_s=installed.load_s, build_s=0.0)


def eager_sizes(record: EngineRecord) -> Mapping[tuple[int, int], frozenset[int]]:
    """The sizes at which eager answers, by input and axis."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for index, axis, size in record.eager_at:
        found[index, axis].add(size)
    return {place: frozenset(sizes) for place, sizes in found.items()}
