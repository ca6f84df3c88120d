"""One candidate on one graph: built or found in the cache, loaded, and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aitune_hf.backends.base import Backend, BuildRequest, BuildResult
from aitune_hf.cache import EngineKey, LocalStore
from aitune_hf.config import TuneConfig
from aitune_hf.errors import (
    CandidateError,
    CorrectnessError,
    EngineLoadError,
    GraphBreakException,
    LostBuildError,
    UntunableError,
)
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.graph.structure import unflattener
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.jit.recorder import RecordedGraph
from aitune_hf.tuning.axes import Axes
from aitune_hf.tuning.candidate import Subject, build_candidate, build_here, load_engine
from aitune_hf.tuning.correctness import EagerReference, check_engine
from aitune_hf.tuning.progress import Progress
from aitune_hf.tuning.recipes import Candidate
from aitune_hf.tuning.results import CandidateResult, GraphResult

__all__ = ["CandidateTrial", "Contender", "Variant", "Work", "closed_on_error", "first_line"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything at hand while one graph is tuned.

    Attributes:
        captured: the graph as a program, by axes: traced once for all candidates.
        given_up: candidates whose build died or took too long, and how: it is not started again for other shapes.
    """

    subject: Subject
    recorded: RecordedGraph
    reference: EagerReference
    result: GraphResult
    captured: dict[Any, Any] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One engine to build: which axes vary, and what to trace with."""

    axes: Axes
    sample: Sample

    @property
    def is_dynamic(self) -> bool:
        """True if it is to take more than one size."""
        return any(axis for row in self.axes for axis in row)


@dataclass(kw_only=True, eq=False)
class Contender:
    """A right candidate.

    Attributes:
        key: where its engine is in the cache.
        envelope: the shapes that it takes.
        result: what is known of it so far.
        installed: its engine, while that is loaded.
    """

    candidate: Candidate
    key: EngineKey
    envelope: ShapeEnvelope
    result: CandidateResult
    installed: InstalledEngine | None

    @property
    def engine(self) -> InstalledEngine:
        """Its engine, which must be loaded."""
        assert self.installed is not None
        return self.installed

    def unload(self) -> None:
        """Let go of the engine; it stays in the cache."""
        if self.installed is not None:
            self.installed.engine.close()
        self.installed = None


@dataclass(frozen=True, kw_only=True)
class CandidateTrial:
    """Tries candidates by the rules of one configuration.

    Attributes:
        deadline: in ``time.monotonic()`` seconds.
        build: runs a backend's build, here or in a child process.
    """

    store: LocalStore
    config: TuneConfig
    progress: Progress
    deadline: float | None
    build: Callable[[Backend, BuildRequest], BuildResult] = build_here

    def run(
        self, work: Work, candidate: Candidate, variant: Variant, place: str
    ) -> tuple[CandidateResult, Contender | None]:
        """Build the candidate or find it in the cache, load it and check it.

        Args:
            place: which of how many candidates it is, for the progress bar.

        Returns:
            What came of it and, if it is right, its engine.
        """
        result = candidate.result("failed")
        if self.is_late():
            return replace(result, outcome="skipped", reason="the time budget was spent"), None
        if candidate.label in work.given_up:
            reason = f"not tried again: {work.given_up[candidate.label]}"
            return replace(result, reason=reason, structural=True), None
        installed: InstalledEngine | None = None
        try:
            contender = self._build_and_load(work, candidate, variant, result, place)
            installed, result = contender.engine, contender.result
            contender.result = self._check(work, contender, place)
        except BaseException as error:
            if installed is not None:
                installed.engine.close()
            if not isinstance(error, (CandidateError, GraphBreakException, UntunableError)):
                raise
            if isinstance(error, LostBuildError):
                work.given_up[candidate.label] = first_line(error)
            # Also where the whole is wrong: what is below it may be right.
            structural = not isinstance(error, EngineLoadError)
            outcome = "wrong" if isinstance(error, CorrectnessError) else "failed"
            return replace(result, outcome=outcome, reason=first_line(error), structural=structural), None
        return contender.result, contender

    def is_late(self) -> bool:
        """True once the time budget is spent."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def load_again(self, work: Work, contender: Contender) -> InstalledEngine:
        """Load the engine of a contender that was let go of.

        Raises:
            EngineLoadError: if it is not in the cache any more.
        """
        if contender.installed is None:
            graph, backend = work.recorded.spec, contender.candidate.backend
            installed, load_s, _ = load_engine(work.subject, graph, backend, contender.key, self.store)
            contender.installed = self._fitted(work, installed, load_s)
        return contender.installed

    def _fitted(self, work: Work, installed: InstalledEngine, load_s: float) -> InstalledEngine:
        installed.tolerance, installed.load_s = self.config.tolerance, load_s
        store = work.recorded.samples
        fitting = next((shapes for shapes in store.shapes() if installed.envelope.mismatch(shapes) is None), None)
        if fitting is not None:  # With eager's own classes.
            installed.rebuild = unflattener(store.first(fitting).output_node)
        return installed

    def _build_and_load(
        self, work: Work, candidate: Candidate, variant: Variant, result: CandidateResult, place: str
    ) -> Contender:
        subject, graph = work.subject, work.recorded.spec
        with self.progress.phase(f"{subject.path}: building {candidate.label} ({place})", None, "s"):
            entry, seconds, built = build_candidate(
                subject,
                graph,
                variant.sample,
                candidate.backend,
                candidate.recipe,
                variant.axes,
                self.store,
                samples=work.recorded.samples,
                captured=work.captured,
                build=self.build,
            )
        installed, load_s, size = load_engine(subject, graph, candidate.backend, entry.manifest.key, self.store)
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
        installed = self._fitted(work, installed, load_s)
        return Contender(
            candidate=candidate,
            key=entry.manifest.key,
            envelope=installed.envelope,
            result=result,
            installed=installed,
        )

    def _check(self, work: Work, contender: Contender, place: str) -> CandidateResult:
        start, installed = time.perf_counter(), contender.engine
        total = len(work.recorded.samples) + (0 if installed.envelope.is_static else 2)
        what = f"{work.subject.path}: checking {contender.candidate.label} ({place})"
        try:
            with self.progress.phase(what, total, "sample") as bar:
                found = check_engine(installed, work.recorded.samples, work.reference, on_check=bar.update)
        finally:
            work.subject.stats.add_seconds("check", time.perf_counter() - start)
        return replace(contender.result, max_error=found.max_error, similarity=found.similarity)


@contextmanager
def closed_on_error(engines: Iterable[InstalledEngine]) -> Iterator[None]:
    """Close these engines, and what was added to them meanwhile, if anything is raised."""
    try:
        yield
    except BaseException:
        with ExitStack() as stack:  # One that cannot be closed does not keep the others.
            for one in engines:
                stack.callback(one.engine.close)
        raise


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
