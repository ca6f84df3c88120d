"""Lossy engines in use: admitted by what the whole pipeline gives with them, or taken back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aitune_hf.errors import CandidateError
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.quality import QualityBudget
from aitune_hf.tuning.candidate import Subject
from aitune_hf.tuning.results import CandidateResult, GraphResult
from aitune_hf.tuning.verdict import write_verdict
from aitune_hf.tuning.verdict_book import Chosen, VerdictBook

__all__ = ["LossyEngine"]

logger = logging.getLogger("aitune_hf")


@dataclass(kw_only=True, eq=False)
class LossyEngine:
    """A lossy engine that answers a graph of one module, until it is taken back.

    Attributes:
        shapes: recorded combinations of shapes that it takes.
    """

    patched: PatchedModule
    subject: Subject
    result: GraphResult
    chosen: Chosen
    shapes: Sequence[Shapes]

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
        known = self.result.winner.similarity if self.result.winner else None
        return known if known is not None else 1.0

    def admit(self, book: VerdictBook, budget: QualityBudget, value: float) -> None:
        """Keep it, and note in the verdict what was measured, and with which weights."""
        verdict, record = book.merged(self.chosen.verdict), self.chosen.record
        measured = {"metric": str(budget), "value": value, "weights": self.subject.weights.digest()}
        verdict.add(replace(record, admitted=measured))
        write_verdict(book.store, verdict)

    def take_back(self, book: VerdictBook, why: str) -> None:
        """Put the best engine that is not lossy in its place, or eager, here and in the verdict."""
        verdict, record = book.merged(self.chosen.verdict), self.chosen.record
        strict = self._strict_engine(book)
        kept = [one for one in self.patched.engines if one is not self.chosen.installed]
        reasons = dict(self.patched.reasons)
        if strict is not None:
            kept.append(strict)
        else:
            reasons[verdict.graph.key] = why
        self.patched._dispatcher = None  # The engines go on; only this one is closed.
        self.patched._install(kept, reasons)
        self.chosen.installed.engine.close()
        verdict.remove(record)
        if strict is not None and record.strict is not None:
            verdict.add(record.strict)
        else:
            shapes = [[list(shape) for shape in combination] for combination in self.shapes]
            verdict.lost.append({"shapes": shapes, "reason": why, "structural": False})
        write_verdict(book.store, verdict)
        self._note(strict, why)

    def _strict_engine(self, book: VerdictBook) -> InstalledEngine | None:
        record = self.chosen.record
        if record.strict is None:
            return None
        try:
            return book.load(self.subject, self.chosen.verdict, record.strict)
        except CandidateError as error:
            logger.warning("%s: eager takes the place of a lossy engine: %s", self.patched.label, error)
            return None

    def _note(self, strict: InstalledEngine | None, why: str) -> None:
        result, record = self.result, self.chosen.record
        winner: CandidateResult | None = None
        if strict is not None and record.strict is not None:
            winner = replace(record.strict.result, source="loaded", load_s=strict.load_s)
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
