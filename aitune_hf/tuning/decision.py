"""The decision about one graph: which engines answer its calls, and what the verdict says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.tuning.axes import fixed_axes, varying_axes
from aitune_hf.tuning.batch_sweep import BatchSweep, sweep_batch_sizes
from aitune_hf.tuning.contest import Contest, Outcome
from aitune_hf.tuning.hints import read_hints
from aitune_hf.tuning.recipes import Candidates, candidates_for
from aitune_hf.tuning.results import CandidateResult
from aitune_hf.tuning.stopwatch import Stopwatch
from aitune_hf.tuning.trial import CandidateTrial, Contender, Variant, Work, closed_on_error
from aitune_hf.tuning.verdict import EngineRecord, Verdict, write_undecided, write_verdict
from aitune_hf.tuning.verdict_book import Chosen, VerdictBook, eager_sizes

__all__ = ["GraphDecision"]

#: Where one engine cannot take all shapes seen, an engine for each of the most frequent ones is tried.
MAX_STATIC_ENGINES = 4
#: Outcomes that say nothing about whether the module as a whole can be an engine.
_SAY_NOTHING = ("unavailable", "untried")


class GraphDecision:
    """Builds, checks and times what may answer the calls of one graph, and keeps the verdict."""

    def __init__(self, trial: CandidateTrial, book: VerdictBook, patched: PatchedModule, work: Work) -> None:
        self._trial = trial
        self._book = book
        self._patched = patched
        self._work = work
        self._stopwatch = Stopwatch(config=trial.config, progress=trial.progress)
        self._candidates: list[CandidateResult] = []

    def make(self) -> list[Chosen]:
        """Decide. Whatever is raised, no engine stays loaded."""
        verdict = self._book.started(self._work)
        chosen: list[Chosen] = []
        with closed_on_error(one.installed for one in chosen):
            narrowed = self._choose(verdict, chosen)
            self._conclude(narrowed)
            self._write(verdict, chosen)
        return chosen

    def _choose(self, verdict: Verdict, chosen: list[Chosen]) -> str:
        """Fill ``chosen``. Returns why its engines take recorded sizes only, if they do."""
        offered = self._offered()
        self._candidates += offered.out
        narrowed = ""
        for variant in self._variants():
            found = self._best_of(variant, offered)
            if variant.is_dynamic and found is None:
                narrowed = f"only for sizes that were recorded; for all between: {self._why()}"
            if found is not None:
                best, record = found
                chosen.append(Chosen(installed=best.engine, record=record, verdict=verdict))
                verdict.add(record)
            if variant.is_dynamic and (found is not None or not self._is_structural()):
                break  # Single sizes are the fallback for the case that one engine for all cannot be had.
        return narrowed

    def _write(self, verdict: Verdict, chosen: Sequence[Chosen]) -> None:
        work = self._work
        taken = [one.record.envelope for one in chosen]
        lost = [one for one in work.recorded.samples.shapes() if all(env.mismatch(one) for env in taken)]
        verdict.forget_lost(work.recorded.samples.shapes())
        if lost:
            entry = {"shapes": _json_shapes(lost), "reason": self._why(), "structural": work.result.structural}
            verdict.lost.append(entry)
        verdict.graph = work.recorded.spec
        # What was left open is decided by the next tuning, from the engines that are there then; and whether a lossy
        # engine may be used is decided by what the pipeline gives.
        is_open = any(candidate.outcome in ("skipped", "unsure") for candidate in self._candidates)
        is_lossy = any(one.record.result.lossy for one in chosen)
        (write_undecided if is_open or is_lossy else write_verdict)(self._book.store, verdict)

    def _offered(self) -> Candidates:
        subject, config = self._work.subject, self._trial.config
        return candidates_for(
            self._book.backends,
            subject.device,
            config,
            portable=subject.environment.is_portable and subject.device.type == "cpu",
            hints=read_hints(self._book.store, subject.hierarchy_hash, self._work.recorded.spec.key),
        )

    def _variants(self) -> list[Variant]:
        """What to build: one engine for all shapes where some axis varies, then single ones as a fallback."""
        work, store = self._work, self._work.recorded.samples
        first = next(iter(store))
        axes = varying_axes(work.recorded.spec, lambda shapes: work.reference.runs_at(first, shapes))
        static = [
            Variant(axes=fixed_axes(shapes), sample=store.first(shapes))
            for shapes in store.shapes()[:MAX_STATIC_ENGINES]
        ]
        if axes is None:
            return static
        largest = max(store.shapes(), key=lambda shapes: sum(map(math.prod, shapes)))
        return [Variant(axes=axes, sample=store.first(largest)), *static]

    # -- one variant ---------------------------------------------------------------------------------------------------

    def _best_of(self, variant: Variant, offered: Candidates) -> tuple[Contender, EngineRecord] | None:
        """The winner for one engine; one that proves wrong at a batch size in between is out, and the rest try again."""
        to_try = list(offered.to_try)
        out: list[CandidateResult] = []
        while True:
            outcome = Contest(self._trial, self._stopwatch, self._patched, self._work, variant).hold(to_try)
            best = outcome.best
            with closed_on_error([best.engine] if best is not None else []):
                sweep = self._sweep(best) if best is not None else BatchSweep()
                if best is None or sweep.wrong is None:
                    self._candidates += out
                    return self._settled(outcome, sweep)
            best.unload()
            out.append(replace(best.result, outcome="wrong", reason=sweep.wrong, structural=True))
            to_try.remove(best.candidate)

    def _sweep(self, best: Contender) -> BatchSweep:
        sizes = self._trial.config.swept_batch_sizes
        if not sizes or best.engine.envelope.is_static or not self._trial.config.chosen_strategy.times:
            return BatchSweep()
        return sweep_batch_sizes(self._patched, self._work, best, sizes, self._stopwatch)

    def _settled(self, outcome: Outcome, sweep: BatchSweep) -> tuple[Contender, EngineRecord] | None:
        best = outcome.best
        results = list(outcome.results)
        if best is not None:
            index = next(place for place, result in enumerate(results) if result is best.result)
            results[index] = best.result = replace(best.result, batches=tuple(sweep.timings))
        self._candidates += results
        if best is None:
            return None
        fallback: EngineRecord | None = None
        for one in reversed(outcome.fallbacks):
            won = replace(one.result, outcome="won", reason="")
            fallback = EngineRecord(key=one.key, envelope=one.envelope, result=won, fallback=fallback)
        record = EngineRecord(
            key=best.key,
            envelope=best.envelope,
            result=best.result,
            eager_at=tuple(sweep.eager_at),
            fallback=fallback,
        )
        best.engine.eager_at = eager_sizes(record)
        best.engine.trusted = True
        return best, record

    # -- what came of it -----------------------------------------------------------------------------------------------

    def _conclude(self, narrowed: str) -> None:
        result, candidates = self._work.result, self._candidates
        won = [candidate for candidate in candidates if candidate.outcome == "won"]
        result.structural = self._is_structural()
        result.candidates = candidates
        result.winner = won[0] if won else None
        result.reason = narrowed if won else self._why()

    def _is_structural(self) -> bool:
        """True if all that was tried failed because of what the module is."""
        tried = [candidate for candidate in self._candidates if candidate.outcome not in _SAY_NOTHING]
        return bool(tried) and all(candidate.structural for candidate in tried)

    def _why(self) -> str:
        tried = [one for one in self._candidates if one.outcome != "unavailable"] or self._candidates
        reasons = [f"{one.label}: {one.reason}" for one in tried if one.reason]
        return "; ".join(dict.fromkeys(reasons)) or "no backend"


def _json_shapes(combinations: Sequence[Shapes]) -> list[Any]:
    return [[list(shape) for shape in shapes] for shapes in combinations]
