"""Finds, for each recorded graph of a module, the fastest engine that is right, or keeps eager."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aitune_hf.backends.base import Backend, Recipe
from aitune_hf.cache import Environment, KeyLockedError, LocalStore
from aitune_hf.config import TuneConfig
from aitune_hf.errors import CandidateError, CorrectnessError, EngineLoadError, UntunableError
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.jit.module_report import parameter_count
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.tuning.axes import fixed_axes, varying_axes
from aitune_hf.tuning.candidate import Subject, build_request, load_engine
from aitune_hf.tuning.correctness import EagerReference, check_engine
from aitune_hf.tuning.plan import repeated_blocks
from aitune_hf.tuning.progress import Progress
from aitune_hf.tuning.ranks import Rank, shared_out
from aitune_hf.tuning.results import CandidateResult, GraphResult
from aitune_hf.tuning.trial import CandidateTrial, Variant, Work, first_line
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
        self._trial = CandidateTrial(store=store, config=config, progress=self.progress, deadline=self._deadline)

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
                build_request(subject, recorded.spec, sample, fixed_axes(sample.shapes), Path(folder)).capture()

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
                result.structural = True
            else:
                reference = EagerReference(subject.forward, patched.signature)
                work = Work(subject=subject, recorded=recorded, reference=reference, result=result)
                engines += self._tune_graph(patched, work)
            if result.winner is None:
                reasons[identity] = result.reason
        self.results += own
        patched.results = list(own)
        if not engines and own and all(result.structural for result in own):
            raise UntunableError(own[0].reason)
        return engines, reasons

    # -- one graph -----------------------------------------------------------------------------------------------------

    def _subject(self, patched: PatchedModule) -> Subject:
        module = patched.module
        tensors = (*module.parameters(), *module.buffers())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        environment = Environment.current(device.type)
        return Subject(
            path=patched.label,
            module=module,
            forward=patched._original_forward.__wrapped__,
            hierarchy_hash=hierarchy_hash(module),
            environment=environment.portable() if self.config.portable and device.type == "cpu" else environment,
            device=device,
            stats=patched.stats,
        )

    def _tune_graph(self, patched: PatchedModule, work: Work) -> list[InstalledEngine]:
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
            work.result.reason = f"the time budget was spent while another process decided: {first_line(error)}"
            work.result.candidates = [CandidateResult(backend="any", outcome="skipped", reason=work.result.reason)]
            return []

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _verdict_place(self, work: Work) -> tuple[str, str, Environment, str]:
        subject = work.subject
        return subject.hierarchy_hash, work.recorded.spec.key[:32], subject.environment, self.policy

    def _verdicts(self, work: Work) -> list[Verdict]:
        """The verdict on a graph, and what a tuning under way did about it without deciding."""
        place = self._verdict_place(work)
        found = read_verdict(self.store, *place), read_undecided(self.store, *place, since=self.began)
        return [verdict for verdict in found if verdict is not None]

    def _known(self, work: Work, verdicts: Sequence[Verdict]) -> list[InstalledEngine] | None:
        for verdict in verdicts:
            engines = self._from_verdict(work, verdict)
            if engines is not None:
                work.subject.stats.hits += 1
                return engines
        return None

    def _decide(self, patched: PatchedModule, work: Work) -> list[InstalledEngine]:
        """Build, check and time what may answer a graph, and keep the verdict."""
        subject, graph = work.subject, work.recorded.spec
        verdict = read_verdict(self.store, *self._verdict_place(work)) or Verdict(
            hierarchy_hash=subject.hierarchy_hash, graph=graph, environment=subject.environment, policy=self.policy
        )
        engines: list[InstalledEngine] = []
        candidates: list[CandidateResult] = []
        for variant in self._variants(work):
            best = self._best_of(patched, work, variant, candidates)
            if best is not None:
                record, installed = best
                verdict.engines = [old for old in verdict.engines if old.key != record.key] + [record]
                engines.append(installed)
            if variant.is_dynamic and (best is not None or not all(one.structural for one in candidates)):
                break  # Single sizes are the fallback for the case that one engine for all cannot be had.
        structural = bool(candidates) and all(candidate.structural for candidate in candidates)
        eager = [shapes for shapes in work.recorded.samples.shapes() if not verdict.covering([shapes])]
        if eager:
            verdict.lost.append({"shapes": _json_shapes(eager), "reason": _why(candidates), "structural": structural})
        verdict.graph = graph
        work.result.structural = structural
        won = [candidate for candidate in candidates if candidate.outcome == "won"]
        work.result.candidates = candidates
        work.result.winner = won[0] if won else None
        work.result.reason = "" if won else _why(candidates)
        # What was left open is decided by the next tuning, from the engines that are there then.
        is_open = any(candidate.outcome in ("skipped", "unsure") for candidate in candidates)
        (write_undecided if is_open else write_verdict)(self.store, verdict)
        return engines

    def _variants(self, work: Work) -> list[Variant]:
        """What to build: one engine for all shapes where some axis varies, then single ones as a fallback."""
        graph, store = work.recorded.spec, work.recorded.samples
        first = next(iter(store))
        axes = varying_axes(graph, lambda shapes: work.reference.runs_at(first, shapes))
        static = [
            Variant(axes=fixed_axes(shapes), sample=store.first(shapes))
            for shapes in store.shapes()[:MAX_STATIC_ENGINES]
        ]
        if axes is None:
            return static
        largest = max(store.shapes(), key=lambda shapes: sum(map(math.prod, shapes)))
        return [Variant(axes=axes, sample=store.first(largest)), *static]

    def _from_verdict(self, work: Work, verdict: Verdict) -> list[InstalledEngine] | None:
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
            except CorrectnessError as wrong:
                installed.engine.close()
                installed.on_wrong(first_line(wrong))
                return None
            except CandidateError as failure:
                logger.warning("%s: a cached engine is not used: %s", work.subject.path, failure)
                return None
            installed.trusted = True
            engines.append(installed)
            load_s = installed.load_s
            results.append(replace(record.result, source="loaded", max_error=error, load_s=load_s, build_s=0.0))
        work.result.candidates = results
        work.result.winner = results[0] if results else None
        if not results and verdict.lost:
            work.result.reason = str(verdict.lost[-1]["reason"])
            work.result.structural = bool(verdict.lost[-1].get("structural"))
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

    def _recipes(self, work: Work) -> list[tuple[Backend, Recipe]]:
        """What to try: the plain recipe of every backend."""
        portable = work.subject.environment.is_portable and work.subject.device.type == "cpu"
        found = []
        for backend in self.backends:
            for recipe in backend.recipes(work.subject.device)[:1]:
                options = {**recipe.options, "portable": True} if portable and backend.native else recipe.options
                found.append((backend, replace(recipe, options=options)))
        return found

    # -- one variant ---------------------------------------------------------------------------------------------------

    def _best_of(
        self, patched: PatchedModule, work: Work, variant: Variant, candidates: list[CandidateResult]
    ) -> tuple[EngineRecord, InstalledEngine] | None:
        best: tuple[EngineRecord, InstalledEngine] | None = None
        for backend, recipe in self._recipes(work):
            result, found = self._trial.run(patched, work, backend, recipe, variant)
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


def _why(candidates: Sequence[CandidateResult]) -> str:
    return "; ".join(dict.fromkeys(f"{one.backend}: {one.reason}" for one in candidates if one.reason)) or "no backend"


def _speed(result: CandidateResult) -> float:
    return result.timing.speedup if result.timing else 0.0


def _json_shapes(combinations: Sequence[Shapes]) -> list[Any]:
    return [[list(shape) for shape in shapes] for shapes in combinations]
