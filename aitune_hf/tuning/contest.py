"""The candidates for one engine, tried one after the other, until the best right one is known.

Two engines at most are loaded at a time: the best so far, and the one on trial. What loses is let go of at once, and is
loaded again from the cache should it be timed a second time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aitune_hf.errors import CandidateError
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.strategy import TuneStrategy
from aitune_hf.tuning.recipes import Candidate
from aitune_hf.tuning.results import CandidateResult, Timing
from aitune_hf.tuning.stopwatch import EagerAnsweredError, Stopwatch
from aitune_hf.tuning.trial import CandidateTrial, Contender, Variant, Work, first_line

__all__ = ["Contest", "Outcome"]

#: Eager's own time may differ by so much between two timings before one of them is doubted.
STEADY = 1.25


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a contest ended.

    Attributes:
        best: who won, with its engine loaded; None where eager stays.
        fallbacks: where ``best`` is lossy: the next best ones, each nearer to eager than those before it, until one that
            is not lossy. None of them is loaded.
        results: what came of each candidate.
    """

    best: Contender | None
    fallbacks: Sequence[Contender]
    results: Sequence[CandidateResult]


class Contest:
    """Finds the best of several candidates for one engine of one graph."""

    def __init__(
        self, trial: CandidateTrial, stopwatch: Stopwatch, patched: PatchedModule, work: Work, variant: Variant
    ) -> None:
        self._trial = trial
        self._stopwatch = stopwatch
        self._patched = patched
        self._work = work
        self._variant = variant
        self._strategy: TuneStrategy = trial.config.chosen_strategy
        self._best: Contender | None = None
        self._entries: list[Contender | CandidateResult] = []
        self._doubtful: list[Contender] = []
        self._timed_again: list[Contender] = []
        self._eager_ms: list[float] = []

    def hold(self, candidates: Sequence[Candidate]) -> Outcome:
        """Try the candidates in their order. Whatever is raised, no engine stays loaded."""
        try:
            for index, candidate in enumerate(candidates):
                enough = self._enough(candidate)
                if enough:
                    self._entries.append(candidate.result("untried", enough))
                else:
                    self._enter(candidate, f"{index + 1} of {len(candidates)}")
            self._time_again()
            return self._outcome()
        except BaseException:
            for entry in self._entries:
                if isinstance(entry, Contender):
                    entry.unload()
            raise

    def _outcome(self) -> Outcome:
        results = [entry.result if isinstance(entry, Contender) else entry for entry in self._entries]
        if self._strategy.times and self._strategy.beats_eager:
            for one in (result for result in results if result.outcome == "won"):
                assert one.timing is not None, f"{one.label} won and was not timed"
                assert one.timing.wins(self._trial.config.min_speedup), f"{one.label} won and does not beat eager"
        return Outcome(best=self._best, fallbacks=self._fallbacks(), results=results)

    def _fallbacks(self) -> list[Contender]:
        found: list[Contender] = []
        last = self._best
        right = [one for one in self._entries if isinstance(one, Contender) and one.result.outcome == "right"]
        for one in sorted(right, key=_speed, reverse=True):
            if last is None or not last.result.lossy:
                break
            if _likeness(one) > _likeness(last):
                found.append(one)
                last = one
        return found

    def _enough(self, candidate: Candidate) -> str | None:
        """Why a candidate need not be tried any more, or None."""
        best = self._best
        if best is None:
            return None
        if best.candidate.hinted and not candidate.hinted:
            return f"{best.candidate.label}, the recipe that won elsewhere, won here too"
        timing = best.result.timing
        if self._strategy.settles(timing.slowest_ms if timing else None):
            return f"{best.candidate.label} is good enough for the strategy {self._strategy.name}"
        return None

    def _enter(self, candidate: Candidate, place: str) -> None:
        result, contender = self._trial.run(self._work, candidate, self._variant, place)
        if contender is None:
            self._entries.append(result)
            return
        self._entries.append(contender)
        if not self._strategy.times:
            self._crown(contender)
        else:
            self._time(contender, place)

    def _time(self, contender: Contender, place: str) -> None:
        try:
            timing = self._stopwatch.against_eager(self._patched, self._work, contender, place)
        except EagerAnsweredError as error:
            self._fail(contender, error)
        else:
            self._judge({contender: timing})
        if contender.result.outcome == "won":
            self._challenge(contender)

    def _fail(self, contender: Contender, error: CandidateError) -> None:
        contender.unload()
        reason = first_line(error)
        # What is below the module may well be answered by an engine.
        contender.result = replace(contender.result, outcome="failed", reason=reason, structural=True, timing=None)

    def _judge(self, timings: Mapping[Contender, Timing]) -> None:
        """What one run says of those timed in it. Who does not win is let go of, and timed once more if in doubt."""
        doubtful = [one for one, timing in timings.items() if self._is_doubtful(timing)]
        for contender, timing in timings.items():
            contender.result = self._judged(contender.result, timing)
            self._eager_ms.append(timing.eager_ms)
            if contender.result.outcome == "won":
                continue
            contender.unload()
            in_doubt = contender in doubtful or contender.result.outcome == "unsure"
            if in_doubt and contender not in self._timed_again:
                self._doubtful.append(contender)

    def _is_doubtful(self, timing: Timing) -> bool:
        """True if something else seems to have run meanwhile."""
        usual = min(self._eager_ms, default=timing.eager_ms)
        return timing.is_noisy or not usual / STEADY <= timing.eager_ms <= usual * STEADY

    def _judged(self, result: CandidateResult, timing: Timing) -> CandidateResult:
        least = self._trial.config.min_speedup
        if not self._strategy.beats_eager or timing.wins(least):
            return replace(result, outcome="won", reason="", timing=timing)
        speed = f"{timing.speedup:.2f}x eager's speed"
        if timing.decides(least):
            return replace(result, outcome="slower", reason=f"{speed}, {least:.2f}x is needed", timing=timing)
        reason = f"{speed}, but too much noise to be sure ({timing.sure:.2f}x at least)"
        return replace(result, outcome="unsure", reason=reason, timing=timing)

    def _challenge(self, contender: Contender) -> None:
        """A contender that beats eager against the best so far, in a run-off where their times alone do not tell."""
        best = self._best
        if best is None:
            self._crown(contender)
            return
        mine, its = contender.result.timing, best.result.timing
        assert mine is not None
        assert its is not None
        if self._strategy.settles(mine.slowest_ms) and not self._strategy.settles(its.slowest_ms):
            self._crown(contender)
            self._beaten(best, contender)
            return
        if mine.overlaps(its):
            try:
                mine, its = self._stopwatch.run_off(self._patched, self._work, contender, best)
            except EagerAnsweredError as error:
                self._fail(best if error.engine is best.engine else contender, error)
            else:
                self._judge({contender: mine, best: its})
        if any(one.result.outcome != "won" for one in (contender, best)):
            self._crown_who_is_left()
        elif mine.speedup > its.speedup:
            self._crown(contender)
            self._beaten(best, contender)
        else:
            self._beaten(contender, best)

    def _crown_who_is_left(self) -> None:
        """The next best, where the run-off showed that one of the two, or neither, beats eager."""
        right = [one for one in self._entries if isinstance(one, Contender) and one.result.outcome in ("won", "right")]
        # Whoever won the run-off is loaded, and was timed last; after that, the fastest.
        left = sorted(right, key=lambda one: (one.result.outcome == "won", _speed(one)), reverse=True)
        self._best = None
        for contender in left:
            try:
                self._trial.load_again(self._work, contender)
            except CandidateError:
                continue  # Evicted meanwhile.
            self._crown(contender)
            return

    def _crown(self, contender: Contender) -> None:
        contender.result = replace(contender.result, outcome="won", reason="")
        self._best = contender

    def _beaten(self, loser: Contender, winner: Contender) -> None:
        loser.unload()
        mine, its = loser.result.timing, winner.result.timing
        reason = f"{winner.candidate.label} was chosen"
        if mine and its:
            what = "was faster" if its.speedup >= mine.speedup else f"meets the strategy {self._strategy.name}"
            speeds = f"{its.speedup:.2f}x eager's speed against {mine.speedup:.2f}x"
            reason = f"{winner.candidate.label} {what}: {speeds}"
        loser.result = replace(loser.result, outcome="right", reason=reason)

    def _time_again(self) -> None:
        """A second timing, some time later, for those that the first one was not kind or not clear to."""
        while self._doubtful and not self._trial.is_late():
            contender = self._doubtful.pop(0)
            self._timed_again.append(contender)
            try:
                self._trial.load_again(self._work, contender)
            except CandidateError:
                continue  # Evicted meanwhile: the first timing stands.
            self._time(contender, "once more")


def _speed(contender: Contender) -> float:
    return contender.result.timing.speedup if contender.result.timing else 0.0


def _likeness(contender: Contender) -> float:
    """How near to eager: the cosine similarity of a lossy one, and more than any of those where it is not."""
    result = contender.result
    return (result.similarity or 0.0) if result.lossy else math.inf
