"""Finds, for each recorded graph of a module, the fastest engine that is right, or keeps eager."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aitune_hf.backends.base import Backend
from aitune_hf.backends.export import capture
from aitune_hf.cache import Environment, KeyLockedError, LocalStore
from aitune_hf.config import TuneConfig
from aitune_hf.errors import CandidateError, CorrectnessError, EngineLoadError, GraphBreakException, UntunableError
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.structure import unflattener
from aitune_hf.jit.dispatcher import Dispatcher, InstalledEngine
from aitune_hf.jit.module_report import parameter_count
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.recorder import RecordedGraph
from aitune_hf.tuning.axes import Axes, fixed_axes, varying_axes
from aitune_hf.tuning.candidate import Subject, build_candidate, build_request, load_engine
from aitune_hf.tuning.correctness import EagerReference, check_engine
from aitune_hf.tuning.plan import repeated_blocks
from aitune_hf.tuning.progress import Progress
from aitune_hf.tuning.ranks import Rank, shared_out
from aitune_hf.tuning.results import CandidateResult, GraphResult
from aitune_hf.tuning.timing import paired_timing
from aitune_hf.tuning.verdict import (
    EngineRecord,
    Verdict,
    policy_digest,
    read_undecided,
    read_verdict,
    verdict_name,
    verdicts_of,
    write_undecided,
    write_verdict,
)
from aitune_hf.version import __version__

__all__ = ["EngineTuner"]

logger = logging.getLogger("aitune_hf")

#: Where one engine cannot take all shapes seen, an engine for each of the most frequent ones is tried.
MAX_STATIC_ENGINES = 4
#: Shapes of one graph that are timed.
MAX_TIMED_SHAPES = 3


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Everything at hand while one graph is tuned."""

    subject: Subject
    recorded: RecordedGraph
    reference: EagerReference
    result: GraphResult


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """One engine to build: which axes vary, what to trace with, and the shapes it is for."""

    axes: Axes
    sample: Sample
    covers: list[Any]

    @property
    def is_dynamic(self) -> bool:
        return any(axis for row in self.axes for axis in row)


class EngineTuner:
    """The tuner of a session.

    Attributes:
        results: what came of each graph, in order.
        began: when this tuning did, in Unix time.
        rank: which of several processes that tune the same target this one is.
    """

    def __init__(self, store: LocalStore, backends: Sequence[Backend], config: TuneConfig) -> None:
        self.store = store
        self.backends = list(backends)
        self.config = config
        self.progress = Progress(config.progress)
        self.results: list[GraphResult] = []
        self.policy = policy_digest(
            {
                "aitune_hf": __version__,
                "backends": [[backend.name, backend.version()] for backend in self.backends],
                "strategy": config.strategy,
                "min_speedup": config.min_speedup,
                "tolerance": None if config.tolerance is None else [config.tolerance.atol, config.tolerance.rtol],
            }
        )
        self.began = time.time()
        self.rank = Rank()
        self._deadline = None if config.time_budget_s is None else time.monotonic() + config.time_budget_s

    # -- the session's tuner ---------------------------------------------------------------------------------------

    def restore(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]] | None:
        """Engines that the cache has for this module's structure; each is checked at its first call."""
        subject = self._subject(patched)
        verdicts = verdicts_of(self.store, subject.hierarchy_hash, subject.environment, self.policy)
        engines: list[InstalledEngine] = []
        reasons: dict[str, str] = {}
        for verdict in verdicts:
            for record in verdict.engines:
                try:
                    engines.append(self._load(subject, verdict, record))
                except (CandidateError, UntunableError) as error:
                    logger.warning("%s: %s", patched.label, error)
            if not verdict.engines:
                reasons[verdict.graph.key] = "eager was faster when this was tuned"
        return (engines, reasons) if verdicts else None

    def blocks(self, patched: PatchedModule) -> list[PatchedModule]:
        """See :class:`~aitune_hf.jit.session.GraphTuner`."""
        blocks = repeated_blocks(patched, self.config)
        return shared_out(blocks, self.rank, structure=PatchedModule._get_hierarchy_hash, size=parameter_count)

    def can_capture(self, patched: PatchedModule) -> None:
        """See :class:`~aitune_hf.jit.session.GraphTuner`."""
        subject = self._subject(patched)
        for recorded in patched.recorder.graphs.values():
            if recorded.untunable or not len(recorded.samples):
                continue
            sample = next(iter(recorded.samples))
            with tempfile.TemporaryDirectory(prefix="aitune-capture-") as folder:
                capture(build_request(subject, recorded.spec, sample, fixed_axes(sample.shapes), {}, Path(folder)))

    def tune(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]]:
        """See :class:`~aitune_hf.jit.session.GraphTuner`."""
        subject = self._subject(patched)
        engines: list[InstalledEngine] = []
        reasons: dict[str, str] = {}
        own: list[GraphResult] = []
        for identity, recorded in patched.recorder.graphs.items():
            result = GraphResult(
                path=patched.label,
                graph=recorded.spec,
                calls=recorded.calls,
                seconds=recorded.seconds,
            )
            own.append(result)
            if recorded.untunable or not len(recorded.samples):
                result.reason = recorded.untunable or "no sample of it was kept"
            else:
                reference = EagerReference(subject.forward, patched.signature)
                work = _Work(subject=subject, recorded=recorded, reference=reference, result=result)
                engines += self._tune_graph(patched, work)
            if result.winner is None:
                reasons[identity] = result.reason
        self.results += own
        patched.results = list(own)
        if not engines and own and all(_is_structural(result) for result in own):
            raise UntunableError(own[0].reason)
        return engines, reasons

    # -- one graph -----------------------------------------------------------------------------------------------------

    def _subject(self, patched: PatchedModule) -> Subject:
        module = patched.module
        tensors = (*module.parameters(), *module.buffers())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        return Subject(
            path=patched.label,
            module=module,
            forward=patched._original_forward.__wrapped__,
            hierarchy_hash=hierarchy_hash(module),
            environment=Environment.current(device.type),
            device=device,
            stats=patched.stats,
        )

    def _tune_graph(self, patched: PatchedModule, work: _Work) -> list[InstalledEngine]:
        seen = self._verdicts(work)
        known = self._known(work, seen)
        if known is not None:
            return known
        try:
            # One process at a time decides about a graph. The others wait and take its verdict, so that all agree.
            with self.store.exclusive(verdict_name(*self._verdict_place(work)), timeout_s=self._seconds_left()):
                now = self._verdicts(work)
                if [one.to_dict() for one in now] != [one.to_dict() for one in seen]:
                    known = self._known(work, now)
                return self._decide(patched, work) if known is None else known
        except KeyLockedError as error:
            work.result.reason = f"the time budget was spent while another process decided: {_line(error)}"
            work.result.candidates = [CandidateResult(backend="any", outcome="skipped", reason=work.result.reason)]
            return []

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _verdict_place(self, work: _Work) -> tuple[str, str, Environment, str]:
        subject = work.subject
        return subject.hierarchy_hash, work.recorded.spec.key[:32], subject.environment, self.policy

    def _verdicts(self, work: _Work) -> list[Verdict]:
        """The verdict on a graph, and what a tuning under way did about it without deciding."""
        place = self._verdict_place(work)
        found = read_verdict(self.store, *place), read_undecided(self.store, *place, since=self.began)
        return [verdict for verdict in found if verdict is not None]

    def _known(self, work: _Work, verdicts: Sequence[Verdict]) -> list[InstalledEngine] | None:
        for verdict in verdicts:
            engines = self._from_verdict(work, verdict)
            if engines is not None:
                work.subject.stats.hits += 1
                return engines
        return None

    def _decide(self, patched: PatchedModule, work: _Work) -> list[InstalledEngine]:
        """Build, check and time what may answer a graph, and keep the verdict."""
        subject, graph = work.subject, work.recorded.spec
        verdict = read_verdict(self.store, *self._verdict_place(work)) or Verdict(
            hierarchy_hash=subject.hierarchy_hash, graph=graph, environment=subject.environment, policy=self.policy
        )
        engines: list[InstalledEngine] = []
        candidates: list[CandidateResult] = []
        for variant in self._variants(work):
            best = self._best_of(patched, work, variant, candidates)
            if best is None:
                verdict.lost.append({"shapes": variant.covers, "reason": _why(candidates)})
            else:
                record, installed = best
                verdict.engines = [old for old in verdict.engines if old.key != record.key] + [record]
                engines.append(installed)
            if variant.is_dynamic and (best is not None or not all(one.structural for one in candidates)):
                break  # Single sizes are the fallback for the case that one engine for all cannot be had.
        verdict.graph = graph
        won = [candidate for candidate in candidates if candidate.outcome == "won"]
        work.result.candidates = candidates
        work.result.winner = won[0] if won else None
        work.result.reason = "" if won else _why(candidates)
        # What was left open is decided by the next tuning, from the engines that are there then.
        is_open = any(candidate.outcome in ("skipped", "unsure") for candidate in candidates)
        (write_undecided if is_open else write_verdict)(self.store, verdict)
        return engines

    def _variants(self, work: _Work) -> list[_Variant]:
        """What to build: one engine for all shapes where some axis varies, then single ones as a fallback."""
        graph, store = work.recorded.spec, work.recorded.samples
        first = next(iter(store))
        axes = varying_axes(graph, lambda shapes: work.reference.runs_at(first, shapes))
        static = [
            _Variant(axes=fixed_axes(shapes), sample=store.first(shapes), covers=_json_shapes([shapes]))
            for shapes in store.shapes()[:MAX_STATIC_ENGINES]
        ]
        if axes is None:
            return static
        largest = max(store.shapes(), key=lambda shapes: sum(map(math.prod, shapes)))
        return [_Variant(axes=axes, sample=store.first(largest), covers=_json_shapes(store.shapes())), *static]

    def _from_verdict(self, work: _Work, verdict: Verdict) -> list[InstalledEngine] | None:
        """What an earlier tuning decided for all shapes recorded now, or None if it does not cover them."""
        shapes = list(work.recorded.samples.shapes())
        lost = [list(map(list, item)) for entry in verdict.lost for item in entry["shapes"]]
        open_shapes = [item for item in shapes if [list(shape) for shape in item] not in lost]
        records = verdict.covering(open_shapes)
        if open_shapes and not records:
            return None
        engines: list[InstalledEngine] = []
        results: list[CandidateResult] = []
        for record in records:
            try:
                installed = self._load(work.subject, verdict, record)
                start = time.perf_counter()
                # The ends of its shapes were checked when it was built.
                error = check_engine(installed, work.recorded.samples, work.reference, corners=False)
                work.subject.stats.add_seconds("check", time.perf_counter() - start)
            except CandidateError as failure:
                logger.warning("%s: a cached engine is not used: %s", work.subject.path, failure)
                return None
            installed.trusted = True
            engines.append(installed)
            load_s = installed.load_s
            results.append(replace(record.result, source="loaded", max_error=error, load_s=load_s, build_s=0.0))
        work.result.candidates = results
        work.result.winner = results[0] if results else None
        if not results:
            work.result.reason = str(verdict.lost[-1]["reason"]) if verdict.lost else "no engine won"
        return engines

    def _load(self, subject: Subject, verdict: Verdict, record: EngineRecord) -> InstalledEngine:
        backend = next((one for one in self.backends if one.name == record.key.backend), None)
        if backend is None:
            raise EngineLoadError(f"the backend {record.key.backend} is not in use here")
        installed, seconds, _ = load_engine(subject, verdict.graph, backend, record.key, self.store)
        installed.load_s = seconds
        installed.tolerance = self.config.tolerance
        subject.stats.loads += 1
        return installed

    # -- one variant ---------------------------------------------------------------------------------------------------

    def _best_of(
        self, patched: PatchedModule, work: _Work, variant: _Variant, candidates: list[CandidateResult]
    ) -> tuple[EngineRecord, InstalledEngine] | None:
        best: tuple[EngineRecord, InstalledEngine] | None = None
        for backend in self.backends:
            result, found = self._try(patched, work, backend, variant)
            if found is not None and best is not None:
                loser = found if _speed(found[0].result) <= _speed(best[0].result) else best
                loser[1].engine.close()
                demoted = replace(loser[0].result, outcome="right", reason="another backend was faster")
                if loser is best:
                    candidates[candidates.index(best[0].result)] = demoted
                    best = found
                else:
                    result = demoted
            elif found is not None:
                best = found
            candidates.append(result)
            if best is not None and self.config.strategy == "first_working":
                break
        return best

    def _try(
        self, patched: PatchedModule, work: _Work, backend: Backend, variant: _Variant
    ) -> tuple[CandidateResult, tuple[EngineRecord, InstalledEngine] | None]:
        result = CandidateResult(backend=backend.name, outcome="failed")
        unavailable = backend.available()
        if unavailable:
            return replace(result, outcome="unavailable", reason=unavailable), None
        if self._deadline is not None and time.monotonic() > self._deadline:
            return replace(result, outcome="skipped", reason="the time budget was spent"), None
        installed: InstalledEngine | None = None
        try:
            result, installed, record_key = self._build_and_load(work, backend, variant, result)
            result = self._check(work, installed, result)
            if self.config.strategy == "first_working":
                result = replace(result, outcome="won")
            else:
                result = self._time(patched, work, installed, result)
        except (CandidateError, GraphBreakException, UntunableError) as error:
            if installed is not None:
                installed.engine.close()
            wrong = isinstance(error, CorrectnessError)
            # Also where the whole is wrong: what is below it may be right.
            structural = not isinstance(error, EngineLoadError)
            outcome = "wrong" if wrong else "failed"
            return replace(result, outcome=outcome, reason=_line(error), structural=structural), None
        if result.outcome != "won":
            installed.engine.close()
            return result, None
        installed.trusted = True
        return result, (EngineRecord(key=record_key, envelope=installed.envelope, result=result), installed)

    def _build_and_load(
        self, work: _Work, backend: Backend, variant: _Variant, result: CandidateResult
    ) -> tuple[CandidateResult, InstalledEngine, Any]:
        subject, graph = work.subject, work.recorded.spec
        what = f"{subject.path}: building with {backend.name}"
        with self.progress.phase(what, None, "s"):
            entry, seconds, built = build_candidate(
                subject, graph, variant.sample, backend, variant.axes, self.store, {}
            )
        installed, load_s, size = load_engine(subject, graph, backend, entry.manifest.key, self.store)
        installed.tolerance, installed.load_s = self.config.tolerance, load_s
        if not built:
            subject.stats.loads += 1
        result = replace(
            result,
            source="built" if built else "loaded",
            engine=str(entry.manifest.key.entry_path),
            build_s=seconds if built else 0.0,
            load_s=load_s,
            artifact_bytes=size,
        )
        return result, installed, entry.manifest.key

    def _check(self, work: _Work, installed: InstalledEngine, result: CandidateResult) -> CandidateResult:
        start = time.perf_counter()
        total = len(work.recorded.samples) + (0 if installed.envelope.is_static else 2)
        with self.progress.phase(f"{work.subject.path}: checking {installed.backend}", total, "sample") as bar:
            error = check_engine(installed, work.recorded.samples, work.reference, on_check=bar.update)
        work.subject.stats.add_seconds("check", time.perf_counter() - start)
        return replace(result, max_error=error)

    def _time(
        self, patched: PatchedModule, work: _Work, installed: InstalledEngine, result: CandidateResult
    ) -> CandidateResult:
        start = time.perf_counter()
        store = work.recorded.samples
        fitting = [shapes for shapes in store.shapes() if installed.envelope.mismatch(shapes) is None]
        installed.rebuild = unflattener(store.first(fitting[0]).output_node)
        installed.trusted = True  # It has passed every check; an untrusted one would be checked again here.
        dispatcher = Dispatcher(
            work.subject.module, patched.signature, [installed], {}, lambda: None, lambda reason: None
        )
        cases = []
        for shapes in fitting[:MAX_TIMED_SHAPES]:
            sample = store.first(shapes)
            args, kwargs = patched.signature.unbind(sample.bound())
            cases.append((store.counts[shapes], *_runners(work, dispatcher, sample, args, kwargs)))
        total = self.config.timing_pairs * len(cases)
        with self.progress.phase(f"{work.subject.path}: timing {installed.backend}", total, "pair") as bar:
            least = self.config.min_speedup
            timing = paired_timing(cases, self.config.timing_pairs, work.subject.device, least, bar.update)
        installed.trusted = False
        work.subject.stats.add_seconds("time", time.perf_counter() - start)
        outcome, reason = "won", ""
        if not timing.wins(least):
            outcome = "slower" if timing.decides(least) else "unsure"
            reason = f"{timing.speedup:.2f}x eager's speed, {least:.2f}x is needed"
        if outcome == "unsure":
            reason = f"{timing.speedup:.2f}x eager's speed, but too much noise to be sure ({timing.sure:.2f}x at least)"
        return replace(result, outcome=outcome, reason=reason, timing=timing)


def _runners(
    work: _Work, dispatcher: Dispatcher, sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    device_type = sample.inputs[0].device.type
    module, forward = work.subject.module, work.subject.forward

    def eager() -> object:
        with torch.no_grad(), sample.context.enter(device_type):
            return forward(*args, **kwargs)

    def engine() -> object:
        with torch.no_grad(), sample.context.enter(device_type):
            return dispatcher.call(forward, module, args, kwargs)

    return eager, engine


def _is_structural(result: GraphResult) -> bool:
    """True if the graph has no engine because the module could not be captured or compiled as a whole."""
    if not result.candidates:
        return result.winner is None and bool(result.reason)
    return all(candidate.structural for candidate in result.candidates)


def _why(candidates: Sequence[CandidateResult]) -> str:
    return "; ".join(dict.fromkeys(f"{one.backend}: {one.reason}" for one in candidates if one.reason)) or "no backend"


def _speed(result: CandidateResult) -> float:
    return result.timing.speedup if result.timing else 0.0


def _json_shapes(combinations: Sequence[Shapes]) -> list[Any]:
    return [[list(shape) for shape in shapes] for shapes in combinations]


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
