"""Times engines the way they are called in use: through the dispatcher, on recorded inputs, in the recorded mode."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aitune_hf.config import TuneConfig
from aitune_hf.errors import CandidateError
from aitune_hf.graph.sample_store import Sample
from aitune_hf.jit.dispatcher import Dispatcher, InstalledEngine
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.tuning.progress import Progress
from aitune_hf.tuning.results import Timing
from aitune_hf.tuning.timed_calls import RunCall, rotated_samples, rotating, timed_shapes
from aitune_hf.tuning.timing import Run, paired_timing, run_off_timing
from aitune_hf.tuning.trial import Contender, Work

__all__ = ["EagerAnsweredError", "Stopwatch"]


class EagerAnsweredError(CandidateError):
    """Eager answered a call that an engine was timed with, so there is nothing to compare.

    Attributes:
        engine: the one that did not answer.
    """

    def __init__(self, reason: str, engine: InstalledEngine) -> None:
        super().__init__(f"eager answered while it was timed: {reason}")
        self.engine = engine


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Times engines by the rules of one configuration.

    Each way of timing raises :class:`EagerAnsweredError` as soon as eager answers instead of an engine.
    """

    config: TuneConfig
    progress: Progress

    def against_eager(self, patched: PatchedModule, work: Work, contender: Contender, place: str) -> Timing:
        """Time one engine and eager in turn, at the shapes that matter."""
        cases = self._cases(patched, work, [contender.engine])
        pairs = self.config.timing_pairs
        with self._measuring(work, [contender.engine]):
            what = f"{work.subject.path}: timing {contender.candidate.label} ({place})"
            with self.progress.phase(what, pairs * len(cases), "pair") as bar:
                pair_cases = [(weight, eager, engine) for weight, eager, engine in cases]
                return paired_timing(pair_cases, pairs, work.subject.device, self.config.min_speedup, bar.update)

    def run_off(self, patched: PatchedModule, work: Work, one: Contender, other: Contender) -> tuple[Timing, Timing]:
        """Time two engines and eager in turn, in one run."""
        engines = [one.engine, other.engine]
        cases = self._cases(patched, work, engines)
        rounds = self.config.timing_pairs
        with self._measuring(work, engines):
            what = f"{work.subject.path}: {one.candidate.label} against {other.candidate.label}"
            with self.progress.phase(what, rounds * len(cases), "round") as bar:
                return run_off_timing(
                    [(weight, eager, first, second) for weight, eager, first, second in cases],
                    rounds,
                    work.subject.device,
                    self.config.min_speedup,
                    bar.update,
                )

    def at(self, patched: PatchedModule, work: Work, engine: InstalledEngine, sample: Sample, what: str) -> Timing:
        """Time one engine and eager in turn on one sample."""
        eager, ours = _runs(patched, work, [engine], [sample])
        pairs, least = self.config.timing_pairs, self.config.min_speedup
        phase = self.progress.phase(f"{work.subject.path}: timing {what}", pairs, "pair")
        with self._measuring(work, [engine]), phase as bar:
            return paired_timing([(1, eager, ours)], pairs, work.subject.device, least, bar.update)

    def _cases(self, patched: PatchedModule, work: Work, engines: Sequence[InstalledEngine]) -> list[Any]:
        """``(weight, eager, engine…)`` per shape that all engines take."""
        store = work.recorded.samples
        shapes = timed_shapes(store, lambda one: all(engine.envelope.mismatch(one) is None for engine in engines))
        return [(store.counts[one], *_runs(patched, work, engines, rotated_samples(store, one))) for one in shapes]

    @contextmanager
    def _measuring(self, work: Work, engines: Sequence[InstalledEngine]) -> Iterator[None]:
        start = time.perf_counter()
        for engine in engines:
            engine.trusted = True  # It has passed every check; an untrusted one would be checked again here.
        try:
            yield
        finally:
            work.subject.stats.add_seconds("time", time.perf_counter() - start)


def _runs(
    patched: PatchedModule, work: Work, engines: Sequence[InstalledEngine], samples: Sequence[Sample]
) -> list[Run]:
    """Eager first, then each engine; each goes through the samples by itself."""
    module, forward, signature = work.subject.module, work.subject.forward, patched.signature

    def eager(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return forward(*args, **kwargs)

    def through(engine: InstalledEngine) -> RunCall:
        reasons: list[str] = []
        dispatcher = Dispatcher(module, signature, [engine], {}, lambda: None, reasons.append)

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            answer = dispatcher.call(forward, module, args, kwargs)
            if reasons:
                raise EagerAnsweredError(reasons[0], engine)
            return answer

        return call

    return [rotating(samples, signature, call) for call in (eager, *map(through, engines))]
