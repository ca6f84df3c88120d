"""Finds, for each recorded graph of a module, the fastest engine that is right, or keeps eager."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from aitune_hf.backends.base import Backend, BuildRequest, BuildResult
from aitune_hf.backends.isolation import IsolatedBuilder
from aitune_hf.cache import KeyLockedError, LocalStore
from aitune_hf.config import TuneConfig
from aitune_hf.errors import BuildError, LostBuildError, UntunableError
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.jit.module_report import parameter_count
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.tuning.axes import fixed_axes
from aitune_hf.tuning.baked import WeightsDigest
from aitune_hf.tuning.candidate import Subject, build_here, build_request
from aitune_hf.tuning.correctness import EagerReference
from aitune_hf.tuning.decision import GraphDecision
from aitune_hf.tuning.lossy import LossyEngine
from aitune_hf.tuning.place import device_of, environment_of
from aitune_hf.tuning.plan import repeated_blocks
from aitune_hf.tuning.progress import Progress
from aitune_hf.tuning.ranks import Rank, shared_out
from aitune_hf.tuning.results import CandidateResult, GraphResult
from aitune_hf.tuning.trial import CandidateTrial, Work, first_line
from aitune_hf.tuning.verdict_book import Chosen, VerdictBook, policy_of

__all__ = ["EngineTuner"]


class EngineTuner:
    """The tuner of a session.

    Attributes:
        results: what came of each graph, in order.
        lossy: engines in use that are lossy, which the pipeline's outputs have yet to admit.
        rank: which of several processes that tune the same target this one is.
    """

    def __init__(self, store: LocalStore, backends: Sequence[Backend], config: TuneConfig) -> None:
        self.store = store
        self.backends = list(backends)
        self.config = config
        self.progress = Progress(config.progress)
        self.results: list[GraphResult] = []
        self.lossy: list[LossyEngine] = []
        self.rank = Rank()
        self.book = VerdictBook(
            store=store, backends=self.backends, config=config, policy=policy_of(config, self.backends)
        )
        deadline = None if config.time_budget_s is None else time.monotonic() + config.time_budget_s
        self._isolated = IsolatedBuilder(config.candidate_timeout_s)
        self._keeps_child = False
        self._trial = CandidateTrial(
            store=store, config=config, progress=self.progress, deadline=deadline, build=self._build
        )

    def __enter__(self) -> EngineTuner:
        """Keep the child process that builds, for as long as several modules are tuned one after the other."""
        self._keeps_child = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._keeps_child = False
        self._isolated.close()

    def _build(self, backend: Backend, request: BuildRequest) -> BuildResult:
        if not backend.isolated:
            return build_here(backend, request)
        self._isolated.start()  # It gets ready while the graph is captured here.
        try:
            return self._isolated.build(backend, request)
        except BuildError as error:
            if self._isolated.is_running:
                raise
            raise LostBuildError(str(error)) from error

    @property
    def policy(self) -> str:
        """Digest of all settings that decide between engines."""
        return self.book.policy

    @property
    def began(self) -> float:
        """When this tuning did, in Unix time."""
        return self.book.began

    # -- the session's tuner ---------------------------------------------------------------------------------------

    def restore(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]] | None:
        """Engines that the cache has for this module's structure; each is checked at its first call."""
        return self.book.restored(self._subject(patched))

    def has_decided(self, patched: PatchedModule) -> bool:
        """True if the cache has a verdict for some graph of this module's structure."""
        return self.book.knows(self._subject(patched))

    def blocks(self, patched: PatchedModule) -> list[PatchedModule]:
        """See :class:`~aitune_hf.jit.session.GraphTuner`."""
        blocks = repeated_blocks(patched, self.config)
        return shared_out(blocks, self.rank, structure=PatchedModule._get_hierarchy_hash, size=parameter_count)

    def can_capture(self, patched: PatchedModule) -> None:
        """See :class:`~aitune_hf.jit.session.GraphTuner`."""
        subject = self._subject(patched)
        for recorded in patched.recorder.graphs.values():
            if recorded.untunable or not len(recorded.samples):
                continue
            sample = next(iter(recorded.samples))
            with tempfile.TemporaryDirectory(prefix="aitune-capture-") as folder:
                build_request(subject, recorded.spec, sample, fixed_axes(sample.shapes), Path(folder)).capture()

    def tune(self, patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]]:
        """See :class:`~aitune_hf.jit.session.GraphTuner`."""
        subject = self._subject(patched)
        chosen: list[Chosen] = []
        reasons: dict[str, str] = {}
        own: list[GraphResult] = []
        try:
            for identity, recorded in patched.recorder.graphs.items():
                result = GraphResult(
                    path=patched.label, graph=recorded.spec, calls=recorded.calls, seconds=recorded.seconds
                )
                own.append(result)
                if recorded.untunable or not len(recorded.samples):
                    result.reason = recorded.untunable or "no sample of it was kept"
                    result.structural = True
                else:
                    reference = EagerReference(subject.forward, patched.signature)
                    work = Work(subject=subject, recorded=recorded, reference=reference, result=result)
                    found = self._tune_graph(patched, work)
                    chosen += found
                    self.lossy += [
                        LossyEngine(
                            patched=patched,
                            subject=subject,
                            result=result,
                            chosen=one,
                            shapes=[shapes for shapes in recorded.samples.shapes() if one.takes(shapes)],
                        )
                        for one in found
                        if one.installed.lossy
                    ]
                if result.winner is None:
                    reasons[identity] = result.reason
        except BaseException:
            for one in chosen:
                one.installed.engine.close()
            self.lossy = [one for one in self.lossy if one.patched is not patched]
            raise
        finally:
            if not self._keeps_child:
                self._isolated.close()
        self.results += own
        patched.results = list(own)
        if not chosen and own and all(result.structural for result in own):
            raise UntunableError(own[0].reason)
        return [one.installed for one in chosen], reasons

    # -- one graph -----------------------------------------------------------------------------------------------------

    def _subject(self, patched: PatchedModule) -> Subject:
        module = patched.module
        return Subject(
            path=patched.label,
            module=module,
            forward=patched._original_forward.__wrapped__,
            hierarchy_hash=hierarchy_hash(module),
            environment=environment_of(module, self.config),
            device=device_of(module),
            stats=patched.stats,
            weights=WeightsDigest(module),
        )

    def _tune_graph(self, patched: PatchedModule, work: Work) -> list[Chosen]:
        seen = self.book.verdicts(work)
        known = self.book.known(work, seen)
        if known is not None:
            return known
        try:
            # One process at a time decides about a graph. The others wait and take its verdict, so that all agree.
            with self.book.exclusive(work, self._seconds_left()):
                now = self.book.verdicts(work)
                if [one.to_dict() for one in now] != [one.to_dict() for one in seen]:
                    known = self.book.known(work, now)
                return GraphDecision(self._trial, self.book, patched, work).make() if known is None else known
        except KeyLockedError as error:
            work.result.reason = f"the time budget was spent while another process decided: {first_line(error)}"
            work.result.candidates = [CandidateResult(backend="any", outcome="skipped", reason=work.result.reason)]
            return []

    def _seconds_left(self) -> float | None:
        deadline = self._trial.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())
