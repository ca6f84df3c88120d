"""One candidate on one graph: built or loaded, checked, timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from aitune_hf.backends.base import Backend, Recipe
from aitune_hf.cache import LocalStore
from aitune_hf.config import TuneConfig
from aitune_hf.errors import CandidateError, CorrectnessError, EngineLoadError, GraphBreakException, UntunableError
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.structure import unflattener
from aitune_hf.jit.dispatcher import Dispatcher, InstalledEngine
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.recorder import RecordedGraph
from aitune_hf.tuning.axes import Axes
from aitune_hf.tuning.candidate import Subject, build_candidate, load_engine
from aitune_hf.tuning.correctness import EagerReference, check_engine
from aitune_hf.tuning.progress import Progress
from aitune_hf.tuning.results import CandidateResult, GraphResult
from aitune_hf.tuning.timing import paired_timing
from aitune_hf.tuning.verdict import EngineRecord

__all__ = ["CandidateTrial", "Variant", "Work", "first_line"]

#: Shapes of one graph that are timed.
MAX_TIMED_SHAPES = 3


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything at hand while one graph is tuned."""

    subject: Subject
    recorded: RecordedGraph
    reference: EagerReference
    result: GraphResult
    captured: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One engine to build: which axes vary, and what to trace with."""

    axes: Axes
    sample: Sample

    @property
    def is_dynamic(self) -> bool:
        """True if it is to take more than one size."""
        return any(axis for row in self.axes for axis in row)


@dataclass(frozen=True, kw_only=True)
class CandidateTrial:
    """Tries candidates by the rules of one configuration. ``deadline`` is in ``time.monotonic()`` seconds."""

    store: LocalStore
    config: TuneConfig
    progress: Progress
    deadline: float | None

    def run(
        self, patched: PatchedModule, work: Work, backend: Backend, recipe: Recipe, variant: Variant
    ) -> tuple[CandidateResult, tuple[EngineRecord, InstalledEngine] | None]:
        """Build or load the candidate, check it and time it.

        Returns:
            What came of it and, if it is right and beats eager, the engine.
        """
        result = CandidateResult(backend=backend.name, outcome="failed")
        unavailable = backend.available()
        if unavailable:
            return replace(result, outcome="unavailable", reason=unavailable), None
        if self.deadline is not None and time.monotonic() > self.deadline:
            return replace(result, outcome="skipped", reason="the time budget was spent"), None
        installed: InstalledEngine | None = None
        try:
            result, installed, record_key = self._build_and_load(work, backend, recipe, variant, result)
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
            return replace(result, outcome=outcome, reason=first_line(error), structural=structural), None
        if result.outcome != "won":
            installed.engine.close()
            return result, None
        installed.trusted = True
        return result, (EngineRecord(key=record_key, envelope=installed.envelope, result=result), installed)

    def _build_and_load(
        self, work: Work, backend: Backend, recipe: Recipe, variant: Variant, result: CandidateResult
    ) -> tuple[CandidateResult, InstalledEngine, Any]:
        subject, graph = work.subject, work.recorded.spec
        what = f"{subject.path}: building with {backend.name}"
        with self.progress.phase(what, None, "s"):
            entry, seconds, built = build_candidate(
                subject,
                graph,
                variant.sample,
                backend,
                recipe,
                variant.axes,
                self.store,
                samples=work.recorded.samples,
                captured=work.captured,
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

    def _check(self, work: Work, installed: InstalledEngine, result: CandidateResult) -> CandidateResult:
        start = time.perf_counter()
        total = len(work.recorded.samples) + (0 if installed.envelope.is_static else 2)
        with self.progress.phase(f"{work.subject.path}: checking {installed.backend}", total, "sample") as bar:
            error = check_engine(installed, work.recorded.samples, work.reference, on_check=bar.update)
        work.subject.stats.add_seconds("check", time.perf_counter() - start)
        return replace(result, max_error=error)

    def _time(
        self, patched: PatchedModule, work: Work, installed: InstalledEngine, result: CandidateResult
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
    work: Work, dispatcher: Dispatcher, sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any]
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


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
