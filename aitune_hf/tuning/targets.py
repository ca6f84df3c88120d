"""Engines for machines one does not have: recorded here on the CPU, built here without a GPU, first run over there."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.base import Backend, BuildRequest, BuildResult, Recipe
from aitune_hf.backends.isolation import IsolatedBuilder
from aitune_hf.backends.registry import get_backend
from aitune_hf.backends.tensorrt import TensorRTBackend
from aitune_hf.cache import Environment, LocalStore, default_cache_dir
from aitune_hf.config import TuneConfig
from aitune_hf.errors import CandidateError, ConfigError, GraphBreakException, SampleError, UntunableError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.patcher import Patcher, unpatch_tree
from aitune_hf.jit.recorder import RecordedGraph
from aitune_hf.jit.session import TuningSession, use_session
from aitune_hf.tuning import drive
from aitune_hf.tuning.axes import Axes, fixed_axes, varying_axes
from aitune_hf.tuning.baked import WeightsDigest
from aitune_hf.tuning.candidate import Subject, build_candidate
from aitune_hf.tuning.correctness import EagerReference
from aitune_hf.tuning.plan import repeated_blocks
from aitune_hf.tuning.progress import Progress
from aitune_hf.tuning.ranks import Rank, local_module
from aitune_hf.tuning.results import CandidateResult
from aitune_hf.tuning.target_report import BuildForReport, TargetBuild
from aitune_hf.tuning.unverified import UNVERIFIED_POLICY, write_unverified_modules
from aitune_hf.tuning.verdict import EngineRecord, Verdict, read_verdict, write_verdict

__all__ = ["DEFAULT_TARGETS", "Target", "build_modules_for", "graph_on"]

logger = logging.getLogger("aitune_hf")

#: The GeForce and workstation GPUs of the last three generations: RTX 30, 40 and 50.
DEFAULT_TARGETS = ("rtx:sm86", "rtx:sm89", "rtx:sm120")
#: Short name of a backend in a target.
_BACKENDS = {"rtx": "tensorrt_rtx"}
#: Where sizes that vary cannot be built as one engine, one is built for each of the most frequent combinations.
_MAX_FIXED = 4


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of machine to build for.

    Attributes:
        backend: builds the engines.
        sm: the GPU generation, such as ``"sm89"``.
        arch, os: of the machine; plans are made for the same as here.
    """

    backend: TensorRTBackend
    sm: str
    arch: str
    os: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target that ``"rtx:sm89"`` names.

        Raises:
            ConfigError: if there is no such backend or GPU generation, or the backend is not installed.
        """
        short, colon, sm = text.partition(":")
        if not colon or not re.fullmatch(r"sm\d{2,3}", sm):
            raise ConfigError(f"target {text!r}: expected a backend and a GPU generation, such as 'rtx:sm89'")
        backend = get_backend(_BACKENDS.get(short, short))
        if not isinstance(backend, TensorRTBackend):
            raise ConfigError(f"target {text!r}: {backend.name} builds for the machine at hand only; use 'rtx:{sm}'")
        problem = backend.can_aim()
        if problem:
            raise ConfigError(f"target {text!r}: {problem}")
        if sm not in backend.targets():
            raise ConfigError(f"target {text!r}: {backend.name} builds for {', '.join(backend.targets())}")
        here = Environment.current("cpu")
        return cls(backend=backend, sm=sm, arch=here.arch, os=here.os)

    @property
    def place(self) -> Environment:
        """Where its engines are valid."""
        whole = Environment(device_type="cuda", arch=self.arch, os=self.os, torch="any", sm=self.sm)
        return whole.for_plans()

    def __str__(self) -> str:
        short = {name: key for key, name in _BACKENDS.items()}.get(self.backend.name, self.backend.name)
        return f"{short}:{self.sm}"


def graph_on(graph: GraphSpec, device_type: str) -> GraphSpec:
    """The graph of the same calls where all tensors are on another kind of device.

    Raises:
        UntunableError: if that would not be the same call: it is given a device, or autocast, whose rules differ from
            device to device, was on.
    """
    if graph.context.autocast is not None:
        raise UntunableError(
            "it was called under autocast, which casts other operators on another device; load the model in the type "
            "it is to run in"
        )
    for spec in (graph.input_spec, graph.output_spec):
        for place, value in spec.values.items():
            if isinstance(value, torch.device):
                raise UntunableError(f"{place} is a device, which would be another one over there")
    moved = GraphSpec.from_dict(graph.to_dict())
    for tensor in (*moved.input_spec.tensors.values(), *moved.output_spec.tensors.values()):
        tensor.device_type = device_type
    return moved


def build_modules_for(
    roots: Mapping[str, nn.Module],
    run: Callable[[Any], object],
    samples: Sequence[Any],
    targets: Sequence[str],
    config: TuneConfig,
) -> BuildForReport:
    """Record ``run(sample)`` for each sample as a tuning does, and build engines for other machines into the cache.

    Nothing is left on the modules.

    Args:
        roots: path → module to look at, with all below it.
        run: runs the target once.
        targets: such as ``"rtx:sm89"``.

    Raises:
        ConfigError: if a target is none, or cannot be built for here.
        SampleError: if there is no sample, or the target raises on one.
    """
    if isinstance(targets, str):
        raise ConfigError(f"targets takes a list, got the string {targets!r}")
    aims = [Target.parse(text) for text in targets]
    if not aims:
        raise ConfigError(f"build_for needs at least one target, such as {DEFAULT_TARGETS[1]!r}")
    if not samples:
        raise SampleError("build_for needs at least one sample: a prompt, a dict of call arguments, or a callable")
    start = time.perf_counter()
    roots = {path: local_module(root) for path, root in roots.items()}
    # Engines for it are worth having whatever it would gain from them here.
    config = replace(config, mode="eager", dry_run=False, precision="strict", quality=None)
    store = LocalStore(config.cache_dir or default_cache_dir(os.environ), config.max_cache_bytes)
    with ExitStack() as undo:
        for root in roots.values():
            unpatch_tree(root)
            undo.callback(unpatch_tree, root)
        builder = TargetBuilder(store, config, aims, undo.enter_context(IsolatedBuilder(config.candidate_timeout_s)))
        session = TuningSession(config, builder)
        session.replaying = True  # Nothing is built in the middle of a call.
        with use_session(session):
            Patcher(session).patch_all(roots.items())
            drive.record_samples(session, builder, run, samples)  # type: ignore[arg-type]
            session.replaying = False
            if not session.heads:
                raise SampleError(f"the samples called none of the modules {', '.join(roots)}; nothing can be built")
            drive.tune_heads(session, Rank())
    for aim in aims:
        write_unverified_modules(store, roots, aim.place, builder.modules[str(aim)])
    cache = f"memory ({store.unwritable_reason})" if store.unwritable_reason else str(store.root)
    return BuildForReport(builds=builder.builds, cache_dir=cache, seconds=time.perf_counter() - start)


class TargetBuilder:
    """Stands in a session where a tuner does, but builds for other machines and installs nothing.

    Attributes:
        builds: what came of each graph.
        modules: target → paths of the modules that have engines.
    """

    def __init__(
        self, store: LocalStore, config: TuneConfig, targets: Sequence[Target], isolated: IsolatedBuilder
    ) -> None:
        self.store = store
        self.config = config
        self.targets = list(targets)
        self.progress = Progress(config.progress)
        self.builds: list[TargetBuild] = []
        self.modules: dict[str, list[str]] = {str(target): [] for target in targets}
        self._isolated = isolated

    def restore(self, patched: PatchedModule) -> None:
        """See :class:`~aitune_hf.jit.session.GraphTuner`."""

    def can_capture(self, patched: PatchedModule) -> None:
        """See :class:`~aitune_hf.jit.session.GraphTuner`; what cannot be captured shows when it is built."""

    def blocks(self, patched: PatchedModule) -> list[PatchedModule]:
        """See :class:`~aitune_hf.jit.session.GraphTuner`."""
        return repeated_blocks(patched, self.config)

    def tune(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]]:
        """Build every graph of a module for every target.

        Raises:
            UntunableError: if none could be built, so that what is below is tried.
        """
        module = patched.module
        elsewhere = {
            str(t.device) for t in (*module.parameters(), *module.buffers()) if t.device.type not in ("cpu", "cuda")
        }
        if elsewhere:
            raise UntunableError(f"its weights are on {', '.join(sorted(elsewhere))}")
        before, reasons = len(self.builds), {}
        for identity, recorded in patched.recorder.graphs.items():
            captured: dict[Any, Any] = {}
            for target in self.targets:
                reasons[identity] = f"built for {target}, not for here"
                self._build_graph(patched, recorded, target, captured)
        new = self.builds[before:]
        if not any(build.engine for build in new):
            raise UntunableError(next((build.reason for build in new if build.reason), "it was never called"))
        return [], reasons

    def _build_graph(
        self, patched: PatchedModule, recorded: RecordedGraph, target: Target, captured: dict[Any, Any]
    ) -> None:
        start = time.perf_counter()
        note = TargetBuild(path=patched.label, graph=recorded.spec.name, target=str(target), outcome="failed")
        try:
            if recorded.untunable or not len(recorded.samples):
                raise UntunableError(recorded.untunable or "no sample of it was kept")
            graph = graph_on(recorded.spec, target.place.device_type)
            found = self._build_variants(patched, recorded, graph, target, captured)
        except (CandidateError, UntunableError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.builds.append(replace(note, reason=reason, seconds=time.perf_counter() - start))
            return
        self._write_verdict(_subject(patched, target), graph, target, [record for record, _, _ in found])
        self.modules[str(target)].append(patched.path)
        self.builds.append(
            replace(
                note,
                outcome="built" if any(built for _, built, _ in found) else "found",
                engine=str(found[0][0].key.entry_path),
                bytes=sum(size for _, _, size in found),
                seconds=time.perf_counter() - start,
            )
        )

    def _build_variants(
        self,
        patched: PatchedModule,
        recorded: RecordedGraph,
        graph: GraphSpec,
        target: Target,
        captured: dict[Any, Any],
    ) -> list[tuple[EngineRecord, bool, int]]:
        """One engine for all sizes if that can be had, else one for each of the frequent combinations."""
        store, subject = recorded.samples, _subject(patched, target)
        reference = EagerReference(subject.forward, patched.signature)
        first = next(iter(store))
        axes = varying_axes(recorded.spec, lambda shapes: reference.runs_at(first, shapes))
        failed: CandidateError | GraphBreakException | None = None
        if axes is not None:
            try:
                return [self._build(subject, graph, recorded, store.shapes()[0], axes, target, captured)]
            except (CandidateError, GraphBreakException) as error:
                failed = error
        found = []
        for shapes in store.shapes()[:_MAX_FIXED]:
            try:
                found.append(self._build(subject, graph, recorded, shapes, fixed_axes(shapes), target, captured))
            except (CandidateError, GraphBreakException) as error:
                failed = failed or error
        if not found and failed is not None:
            raise failed
        return found

    def _build(
        self,
        subject: Subject,
        graph: GraphSpec,
        recorded: RecordedGraph,
        shapes: Any,
        axes: Axes,
        target: Target,
        captured: dict[Any, Any],
    ) -> tuple[EngineRecord, bool, int]:
        recipe = Recipe(options={"target": target.sm}, weights="bound")
        with self.progress.phase(f"{subject.path}: building for {target}", None, "s"):
            entry, seconds, built = build_candidate(
                subject,
                graph,
                recorded.samples.first(shapes),
                target.backend,
                recipe,
                axes,
                self.store,
                captured=captured,
                build=self._build_isolated,
            )
        key, engine = entry.manifest.key, entry.manifest.engine
        result = CandidateResult(
            backend=target.backend.name,
            outcome="unverified",
            reason=f"built for {target.sm} on a machine without it",
            engine=str(key.entry_path),
            source="built",
            build_s=seconds if built else 0.0,
            artifact_bytes=entry.manifest.size,
        )
        envelope = ShapeEnvelope.from_dict(engine["envelope"])  # type: ignore[arg-type]
        return EngineRecord(key=key, envelope=envelope, result=result), built, entry.manifest.size

    def _build_isolated(self, backend: Backend, request: BuildRequest) -> BuildResult:
        return self._isolated.build(backend, request)

    def _write_verdict(
        self, subject: Subject, graph: GraphSpec, target: Target, records: Sequence[EngineRecord]
    ) -> None:
        place = target.place
        known = read_verdict(self.store, subject.hierarchy_hash, graph.key, place, UNVERIFIED_POLICY)
        verdict = known or Verdict(
            hierarchy_hash=subject.hierarchy_hash, graph=graph, environment=place, policy=UNVERIFIED_POLICY
        )
        # What was found to be right over there, and has come back with the cache, stays so.
        there = {record.key for record in verdict.engines}
        for record in records:
            if record.key not in there:
                verdict.add(record)
        write_verdict(self.store, verdict)


def _subject(patched: PatchedModule, target: Target) -> Subject:
    module = patched.module
    tensors = (*module.parameters(), *module.buffers())
    return Subject(
        path=patched.label,
        module=module,
        forward=patched._original_forward.__wrapped__,
        hierarchy_hash=hierarchy_hash(module),
        environment=target.place,
        device=next((tensor.device for tensor in tensors), torch.device("cpu")),
        stats=patched.stats,
        weights=WeightsDigest(module),
    )
