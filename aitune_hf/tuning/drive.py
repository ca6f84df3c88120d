"""Tunes a set of named modules by running what the user runs: record, tune, report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.registry import get_backend, known_backends
from aitune_hf.cache import LocalStore, default_cache_dir
from aitune_hf.config import TuneConfig
from aitune_hf.errors import AITuneError, SampleError, UntunableError
from aitune_hf.jit.hierarchy import walk
from aitune_hf.jit.module_report import parameter_count
from aitune_hf.jit.module_state import ModuleState
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.patcher import Patcher, patched_modules, patched_of, unpatch_tree
from aitune_hf.jit.preserved import preserved
from aitune_hf.jit.session import TuningSession, use_session
from aitune_hf.jit.statistics import TuningStats
from aitune_hf.strategy import OneBackend
from aitune_hf.tuning.output_metrics import kept_output
from aitune_hf.tuning.place import pipeline_hash, target_record_name
from aitune_hf.tuning.quality_gate import QualityOutcome, hold_to_budget
from aitune_hf.tuning.ranks import Rank, agreed, local_module, shared_out, spread_over_processes
from aitune_hf.tuning.report import TuningReport
from aitune_hf.tuning.summary import summarize
from aitune_hf.tuning.tuner import EngineTuner
from aitune_hf.tuning.unverified import read_unverified_modules
from aitune_hf.tuning.worth import Worth

__all__ = ["make_tuner", "record_name", "record_samples", "restore_modules", "stats_of", "tune_heads", "tune_modules"]

logger = logging.getLogger("aitune_hf")
#: Passes over the samples: one, and one per level that could not be replayed.
MAX_PASSES = 4


def make_tuner(config: TuneConfig) -> EngineTuner:
    """A tuner over the local cache with the backends the configuration names.

    Raises:
        ConfigError: if one of them does not exist.
    """
    if config.backends is None:
        backends = known_backends()
    else:
        backends = [get_backend(item) if isinstance(item, str) else item for item in config.backends]
    strategy = config.chosen_strategy
    if isinstance(strategy, OneBackend) and strategy.backend is not None:
        wanted = [backend for backend in backends if backend.name == strategy.backend]
        backends = wanted or [get_backend(strategy.backend)]
    store = LocalStore(config.cache_dir or default_cache_dir(os.environ), config.max_cache_bytes)
    return EngineTuner(store, backends, config)


def tune_modules(
    roots: Mapping[str, nn.Module],
    drive: Callable[[Any], object],
    samples: Sequence[Any],
    config: TuneConfig,
    rank: Rank | None = None,
) -> TuningReport:
    """Record ``drive(sample)`` for each sample, then tune the modules that were called.

    Whatever happens, the modules work afterwards: tuned, or as they were.

    Args:
        roots: path → module to look at, with all below it.
        drive: runs the target once.
        rank: which of several processes that tune the same target this one is; alone if None.

    Raises:
        SampleError: if there is no sample, or the target raises on one; nothing is changed then.
        UntunableError: if the strategy asks for one backend, and it has no engine for the target.
    """
    if not samples:
        raise SampleError("tune needs at least one sample: a prompt, a dict of call arguments, or a callable")
    start = time.perf_counter()
    roots = {path: local_module(root) for path, root in roots.items()}
    for root in roots.values():
        unpatch_tree(root)
    tuner = make_tuner(config)
    tuner.rank = rank or Rank()
    session = TuningSession(config, tuner)
    session.replaying = True  # Nothing is tuned in the middle of a call: that comes after the recording.
    worth = Worth(min_share=config.min_share)
    with tuner, ExitStack() as undo:
        for root in roots.values():
            undo.callback(unpatch_tree, root)
        with use_session(session):
            Patcher(session).patch_all(roots.items())
            eager = record_samples(session, tuner, drive, samples)
            session.replaying = False
            if not session.heads:
                raise SampleError(f"the samples called none of the modules {', '.join(roots)}; nothing can be tuned")
            if config.mode != "inspect":
                if tuner.rank.count > 1:
                    _agree_on_times(session, tuner, roots)
                worth = _worth(session, tuner, roots)
                tune_heads(session, tuner.rank, worth)
                if isinstance(config.chosen_strategy, OneBackend):
                    _require_engines(session, tuner)
            quality = _hold_quality(session, tuner, drive, samples, eager)
            report = summarize(session, tuner, len(samples), start, quality)
        _settle(roots)
        _remember(roots, tuner, worth)
        undo.pop_all()
    return report


def record_samples(
    session: TuningSession,
    tuner: EngineTuner,
    drive: Callable[[Any], object],
    samples: Sequence[Any],
) -> list[Any]:
    """Run all samples until everything is recorded that can be.

    Returns:
        Eager's outputs, as far as the quality budget needs them.
    """
    budget = session.config.quality
    for _ in range(MAX_PASSES):
        start = time.perf_counter()
        outputs: list[Any] = []
        with tuner.progress.phase("recording", len(samples), "sample") as bar:
            for index, sample in enumerate(samples):
                output = _run_sample(drive, sample, index)
                if budget is not None:
                    outputs.append(kept_output(output, budget))
                bar.update()
        logger.debug("recorded %d samples in %.2f s", len(samples), time.perf_counter() - start)
        if not _record_deeper(session):
            break
    return outputs


def _hold_quality(
    session: TuningSession,
    tuner: EngineTuner,
    drive: Callable[[Any], object],
    samples: Sequence[Any],
    eager: Sequence[Any],
) -> QualityOutcome | None:
    budget = session.config.quality
    if budget is None or not _has_engines(session):
        return None  # Without lossy engines it is measured too: whoever gives a budget wants to know.
    session.replaying = True  # What is still being recorded must not be tuned in the middle of this.
    try:
        return hold_to_budget(tuner.lossy, budget, drive, samples, eager, tuner.book, tuner.progress)
    finally:
        session.replaying = False


def _has_engines(session: TuningSession) -> bool:
    return any(patched.engines for patched in walk(session.heads))


def _require_engines(session: TuningSession, tuner: EngineTuner) -> None:
    if _has_engines(session):
        return
    why = [f"{result.path}: {result.reason}" for result in tuner.results if result.reason]
    why += [f"{head.label}: {head.reasons['module']}" for head in session.heads if head.reasons.get("module")]
    name = tuner.backends[0].name
    raise UntunableError(
        f"the strategy asks for {name} alone, and {name} has no engine for this target. {'; '.join(why[:5])}. "
        "Nothing was changed; choose another backend or strategy."
    )


def _run_sample(drive: Callable[[Any], object], sample: Any, index: int) -> object:
    try:
        with preserved():
            return drive(sample)
    except AITuneError:
        raise
    except Exception as error:
        raise SampleError(
            f"sample {index} ({_short(sample)}) failed in the target itself: {type(error).__name__}: {error}. "
            "Nothing was tuned; run the same call without tune() to see it fail alone."
        ) from error


def _short(sample: Any) -> str:
    if isinstance(sample, torch.Tensor):
        return f"a tensor of shape {list(sample.shape)}"
    text = " ".join(repr(sample).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _record_deeper(session: TuningSession) -> bool:
    """Where a module cannot become an engine nor be replayed, its children need samples of their own."""
    again = False
    for patched in walk(session.heads):
        graphs = patched.recorder.graphs.values()
        hopeless = bool(graphs) and all(graph.untunable for graph in graphs)
        if patched.state is ModuleState.RECORDING and patched.recorder.keep_samples and hopeless:
            if any(len(graph.samples) for graph in graphs):
                continue
            for child in patched.children:
                if not child.recorder.keep_samples:
                    child.recorder.keep_samples = again = True
    return again


def _agree_on_times(session: TuningSession, tuner: EngineTuner, roots: Mapping[str, nn.Module]) -> None:
    """Let all ranks go by the times that one of them recorded, so that all choose the same modules to tune."""
    recorders = {patched.fq_name: patched.recorder for patched in walk(session.heads)}
    name = record_name(roots, tuner).replace("pipelines/", "times/")
    times = agreed(tuner.store, name, tuner.began, lambda: {key: one.seconds for key, one in recorders.items()})
    for key, recorder in recorders.items():
        seconds = times.get(key)
        if isinstance(seconds, (int, float)) and recorder.seconds:
            ratio = seconds / recorder.seconds
            recorder.seconds *= ratio
            for graph in recorder.graphs.values():
                graph.seconds *= ratio


def _worth(session: TuningSession, tuner: EngineTuner, roots: Mapping[str, nn.Module]) -> Worth:
    record: Mapping[str, Any] = tuner.store.read_record(record_name(roots, tuner)) or {}
    small = record.get("small")
    return Worth(
        min_share=session.config.min_share,
        decided={head.label for head in session.heads if tuner.has_decided(head)},
        small_before=small if isinstance(small, list) else (),
    )


def tune_heads(session: TuningSession, rank: Rank, worth: Worth | None = None) -> None:
    """Tune what was recorded at the top, the slowest first, shared out over the ranks."""
    worth = worth or Worth(min_share=session.config.min_share)
    total = sum(head.recorder.seconds for head in session.heads) or 1.0
    heads = sorted(session.heads, key=lambda head: -head.recorder.seconds)
    heads = shared_out(heads, rank, structure=PatchedModule._get_hierarchy_hash, size=parameter_count)
    for head in heads:
        share = head.recorder.seconds / total
        if head.state is not ModuleState.RECORDING:
            continue
        spread = spread_over_processes(head.module)
        objection = spread if spread is not None else worth.objection(head.label, share)
        if objection is not None:
            head.keep_eager(objection)
        else:
            head.tune()


def _settle(roots: Mapping[str, nn.Module]) -> None:
    """Keep the patches that answer calls, and those that count them at the top; lift all others."""
    for root in roots.values():
        for patched in list(patched_modules(root)):
            counts_at_the_top = patched.level == 0 and patched.state is ModuleState.EAGER
            if patched.state is not ModuleState.TUNED and not counts_at_the_top:
                patched._unpatch()


def record_name(roots: Mapping[str, nn.Module], tuner: EngineTuner) -> str:
    """The local record of which modules of a target are tuned."""
    return target_record_name(pipeline_hash(roots), tuner.policy[:8])


def _remember(roots: Mapping[str, nn.Module], tuner: EngineTuner, worth: Worth) -> None:
    """Note which modules of this target are tuned, so that the next process need not look at all of them."""
    paths = [p.path for root in roots.values() for p in patched_modules(root) if p.state is ModuleState.TUNED]
    record = {"schema": 1, "modules": sorted(paths), "small": sorted(worth.small)}
    tuner.store.write_record(record_name(roots, tuner), record)


def restore_modules(roots: Mapping[str, nn.Module], config: TuneConfig) -> int:
    """Take over the engines that the local cache has for a target that was tuned before, without running it.

    Each engine is checked against eager at its first call.

    Returns:
        The number of engines taken over.
    """
    roots = {path: local_module(root) for path, root in roots.items()}
    tuner = make_tuner(config)
    record = tuner.store.read_record(record_name(roots, tuner))
    paths = record.get("modules") if record else None
    if not isinstance(paths, list):
        paths = read_unverified_modules(tuner.store, roots)
    session = TuningSession(config, tuner)
    taken: list[PatchedModule] = []
    try:
        for path, module in _paths(roots):
            if path in paths and patched_of(module) is None:  # One that is tuned already stays as it is.
                patched = Patcher(session).patch(module, path)
                taken.append(patched)
                if not patched.restore():
                    taken.pop()._unpatch()
    except BaseException:
        for patched in taken:
            patched._unpatch()
        raise
    return sum(len(patched.engines) for patched in taken)


def _paths(roots: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    return [
        (".".join(part for part in (path, name) if part), module)
        for path, root in roots.items()
        for name, module in root.named_modules()
    ]


def stats_of(roots: Mapping[str, nn.Module]) -> TuningStats:
    """Counters of every module that is still observed."""
    found = {patched.label: patched.stats for root in roots.values() for patched in patched_modules(root)}
    return TuningStats(found)
