"""Lossy engines in use: admitted by what the whole pipeline gives with them, or taken back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aitune_hf.errors import CandidateError
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.quality import QualityBudget
from aitune_hf.tuning.candidate import Subject
from aitune_hf.tuning.results import CandidateResult, GraphResult
from aitune_hf.tuning.verdict import EngineRecord, Verdict, write_verdict
from aitune_hf.tuning.verdict_book import Chosen, VerdictBook

__all__ = ["LossyEngine"]

logger = logging.getLogger("aitune_hf")


@dataclass(kw_only=True, eq=False)
class LossyEngine:
    """A lossy engine that answers a graph of one module, until it is taken back.

    Attributes:
        shapes: recorded combinations of shapes that it takes.
        before: engines that it took the place of, because they missed the budget.
    """

    patched: PatchedModule
    subject: Subject
    result: GraphResult
    chosen: Chosen
    shapes: Sequence[Shapes]
    before: Sequence[EngineRecord] = ()

    @property
    def engine(self) -> str:
        """Where it is in the cache; equal modules share one."""
        return str(self.chosen.record.key.entry_path)

    @property
    def label(self) -> str:
        """Module and candidate, for people."""
        return f"{self.patched.label}: {self.chosen.record.result.label}"

    @property
    def similarity(self) -> float:
        """The least cosine similarity of its outputs to eager's on the module's own samples."""
        mine = self.chosen.record.result
        measured = (one.similarity for one in self.result.candidates if one.engine == mine.engine)
        known = next(measured, mine.similarity)
        return known if known is not None else 1.0

    @property
    def is_checked(self) -> bool:
        """True once its outputs were compared with eager's in this process."""
        return self.chosen.installed.trusted or self.failed is not None

    @property
    def failed(self) -> str | None:
        """Why it must not be used at all."""
        return self.chosen.installed.failed

    def admit(self, book: VerdictBook, budget: QualityBudget, value: float) -> None:
        """Keep it, and note in the verdict what was measured, and with which weights."""
        verdict, record = self._verdict(book), self.chosen.record
        measured = {"metric": str(budget), "value": value, "weights": self.subject.weights.digest()}
        verdict.add(replace(record, admitted=measured))
        write_verdict(book.store, verdict)

    def take_back(self, book: VerdictBook, why: str) -> LossyEngine | None:
        """Put the next best engine that is nearer to eager in its place, or eager, here and in the verdict.

        Returns:
            What took its place, if that is lossy too, and so has yet to be admitted.
        """
        verdict, record = self._verdict(book), self.chosen.record
        found = self._next(book)
        kept = [one for one in self.patched.engines if one is not self.chosen.installed]
        reasons = dict(self.patched.reasons)
        if found is not None:
            kept.append(found.installed)
        else:
            reasons[verdict.graph.key] = why
        self.patched._dispatcher = None  # The engines go on; only this one is closed.
        self.patched._install(kept, reasons)
        self.chosen.installed.engine.close()
        if found is not None and found.record.result.lossy:  # Nothing is decided yet.
            book.withdraw(verdict, record)  # But what an earlier tuning said of it holds no more, come what may.
            self._note(found, why)
            return replace(self, chosen=found, before=[*self.before, record])
        verdict.remove(record)
        if found is None:
            shapes = [[list(shape) for shape in combination] for combination in self.shapes]
            verdict.lost.append({"shapes": shapes, "reason": why, "structural": False})
        else:
            verdict.add(found.record)
        write_verdict(book.store, verdict)
        self._note(found, why)
        return None

    def _verdict(self, book: VerdictBook) -> Verdict:
        """The verdict as others have left it, without the engines that missed the budget."""
        verdict = book.merged(self.chosen.verdict)
        for record in self.before:
            verdict.remove(record)
        return verdict

    def _next(self, book: VerdictBook) -> Chosen | None:
        """The first of its fallbacks that can be loaded and holds the module's weights, ready to answer."""
        for record in self.chosen.record.chain():
            if record is self.chosen.record or not record.is_for(self.subject.weights):
                continue
            try:
                installed = book.load(self.subject, self.chosen.verdict, record)
            except CandidateError as error:
                logger.warning("%s: a fallback of a lossy engine is not used: %s", self.patched.label, error)
                continue
            return Chosen(installed=installed, record=record, verdict=self.chosen.verdict)
        return None

    def _note(self, found: Chosen | None, why: str) -> None:
        result, record = self.result, self.chosen.record
        winner: CandidateResult | None = None
        if found is not None:
            winner = replace(found.record.result, source="loaded", load_s=found.installed.load_s)
        noted: list[CandidateResult] = []
        for one in result.candidates:
            if one.engine == record.result.engine:
                noted.append(replace(one, outcome="taken back", reason=why))
            elif winner is not None and one.engine == winner.engine:
                noted.append(replace(one, outcome="won", reason=""))
            else:
                noted.append(one)
        result.candidates, result.winner = noted, winner
        result.reason = "" if winner else why
