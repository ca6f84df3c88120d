"""From a finished session to its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from aitune_hf.jit.hierarchy import walk
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.session import TuningSession
from aitune_hf.jit.statistics import TuningStats
from aitune_hf.tuning.quality_gate import QualityOutcome
from aitune_hf.tuning.report import ModuleRow, TuningReport
from aitune_hf.tuning.tuner import EngineTuner

__all__ = ["summarize"]


def summarize(
    session: TuningSession,
    tuner: EngineTuner,
    samples: int,
    start: float,
    quality: QualityOutcome | None = None,
) -> TuningReport:
    """The report of a session: modules at the top, and those below that were tuned by themselves.

    Args:
        samples: how many were recorded.
        start: ``time.perf_counter()`` when the tuning began.
        quality: what relaxed precision came to.
    """
    modules = [patched for patched in walk(session.heads) if patched.level == 0 or patched.results]
    total = sum(head.recorder.seconds for head in session.heads) or 1.0
    rows = [row for patched in modules for row in _rows(patched, total)]
    winners = [result.winner for result in tuner.results if result.winner is not None]
    sizes = {winner.engine: winner.artifact_bytes for winner in winners}
    weights = {id(p): p for patched in modules if patched.engines for p in patched.module.parameters()}
    store = tuner.store
    return TuningReport(
        rows=_merged(rows),
        results=list(tuner.results),
        stats=TuningStats({patched.label: patched.stats for patched in modules}),
        samples=samples,
        quality=quality,
        seconds=time.perf_counter() - start,
        engine_bytes=sum(sizes.values()),
        weights_bytes=sum(p.numel() * p.element_size() for p in weights.values()),
        cache_dir=f"in memory ({store.unwritable_reason})" if store.unwritable_reason else str(store.root),
    )


def _rows(patched: PatchedModule, total: float) -> list[ModuleRow]:
    module = patched.module
    parameters = sum(parameter.numel() for parameter in module.parameters())
    name = patched.label
    results = patched.results or [None]
    rows = []
    for index, result in enumerate(results):
        winner = result.winner if result else None
        seconds = result.seconds if result else patched.recorder.seconds
        note = result.reason if result else patched.reasons.get("module", "eager stays")
        rows.append(
            ModuleRow(
                path=name if len(results) == 1 else f"{name}[{index}]",
                class_name=type(module).__name__,
                parameters=parameters,
                share=seconds / total,
                backend=winner.label if winner else "eager",
                speedup=winner.timing.speedup if winner and winner.timing else None,
                max_error=winner.max_error if winner else None,
                seconds=(winner.build_s or winner.load_s) if winner else 0.0,
                source=winner.source if winner else "",
                engine=winner.engine if winner else "",
                note=note,
            )
        )
    return rows


def _merged(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Blocks that share an engine are one line."""
    found: dict[tuple[str, str, str], ModuleRow] = {}
    for row in rows:
        key = (row.class_name, row.engine, "" if row.engine else row.path)
        first = found.get(key)
        if first is None:
            found[key] = row
            continue
        found[key] = replace(
            first,
            count=first.count + 1,
            parameters=first.parameters + row.parameters,
            share=first.share + row.share,
            max_error=max(first.max_error or 0.0, row.max_error or 0.0),
        )
    return list(found.values())
