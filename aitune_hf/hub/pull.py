"""Taking the engines that others tuned: what fits this machine and is trusted, and the recipes of the rest.

Nothing that a remote does or says makes a pull raise: a pipeline works without engines, and can be tuned here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from aitune_hf.backends.isolation import IsolatedBuilder
from aitune_hf.cache import Entry
from aitune_hf.errors import AITuneError
from aitune_hf.hub.admission import Admitted, Refused
from aitune_hf.hub.fetch import Fetcher
from aitune_hf.hub.lookup import Finding, Lookup, look_up
from aitune_hf.hub.outcome import ModuleOutcome, PullResult
from aitune_hf.hub.record import SharedEngine, SharedVerdict
from aitune_hf.hub.remote import Remote, RemoteError, redacted, revision_of
from aitune_hf.hub.target import Target
from aitune_hf.hub.trust import Source, Trust
from aitune_hf.jit.module_state import ModuleState
from aitune_hf.jit.patcher import patched_of
from aitune_hf.jit.statistics import ModuleStats
from aitune_hf.tuning.baked import WeightsDigest
from aitune_hf.tuning.drive import restore_modules
from aitune_hf.tuning.hints import RecipeHint, write_hints
from aitune_hf.tuning.verdict import EngineRecord, Verdict, read_verdict, write_verdict

__all__ = ["pull"]

logger = logging.getLogger("aitune_hf")
#: A foreign engine that does not load within this time is refused.
_TRIAL_S = 120.0


def pull(
    target: Target,
    remotes: Sequence[Remote],
    *,
    revision: str | None = None,
    trust: Trust | None = None,
    local_only: bool = False,
) -> PullResult:
    """Take over engines for a target's modules from remotes, the first that has one for a module first.

    Args:
        revision: branch, tag or commit of every remote. If None, a repository is read at the commit that its name says,
            or at which alone it is trusted, else as it stands.
        trust: whose native engines may run here; nobody's if None.
        local_only: make no requests; go by what earlier pulls or ``hf download`` have left on this machine.

    Raises:
        ConfigError: if a remote's name says another commit than ``revision``.

    Returns:
        What was taken and what not, with the reason. A failing remote is a line in ``problems``, and one warning.
    """
    for remote in remotes:
        revision_of(remote, revision)
    work = _Pull(target=target, revision=revision, trust=trust or Trust(), local_only=local_only)
    with ExitStack() as stack:
        tester = stack.enter_context(IsolatedBuilder(timeout_s=_TRIAL_S))
        for remote in remotes:
            try:
                work.ask(remote, tester)
            except Exception as error:  # What strangers wrote may fail in ways that nobody thought of.
                if target.config.debug and not isinstance(error, (AITuneError, OSError)):
                    raise
                logger.debug("%s failed", remote.url, exc_info=True)
                work.repos.setdefault(remote.url, "")
                work.note(remote, error)
    nothing = not any(outcome.engines for outcome in work.outcomes.values())
    for line in (work.failures or work.problems if nothing else work.failures)[:1]:
        logger.warning("Tuned engines: %s. Modules without one run eager; tune() works as always.", line)
    if nothing and work.barred:
        logger.warning("Tuned engines: %s", _advice(work.barred))
    outcomes = tuple(work.outcomes[path] for path in sorted(work.outcomes))
    installed, outcomes = _install(target, outcomes)
    return PullResult(
        repos=tuple(f"{url}@{commit[:12]}" if commit else url for url, commit in work.repos.items()),
        modules=outcomes,
        problems=tuple(work.problems),
        bytes=work.bytes,
        installed=installed,
        probe=lambda path: _stats(target, path),
    )


@dataclass(kw_only=True)
class _Pull:
    """A pull under way."""

    target: Target
    revision: str | None
    trust: Trust
    local_only: bool
    outcomes: dict[str, ModuleOutcome] = field(default_factory=dict)
    repos: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    barred: dict[str, set[str]] = field(default_factory=dict)
    bytes: int = 0
    _answers: dict[str, Admitted | Refused] = field(default_factory=dict)
    _silent: dict[str, str] = field(default_factory=dict)

    def note(self, remote: Remote, error: Exception) -> None:
        """Take down a failure."""
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        self.failures.append(redacted(line if remote.url in line else f"{remote.url}: {line}"))
        self.problems.append(self.failures[-1])

    def ask(self, remote: Remote, tester: IsolatedBuilder) -> None:
        """Take from one remote what earlier ones did not have."""
        revision = revision_of(remote, self.revision) or self.trust.commit_for(Source(url=remote.url))
        found = look_up(self.target, remote, revision=revision, local_only=self.local_only)
        self.repos[remote.url] = found.commit
        if found.reason:
            self.problems.append(f"{remote.url}: {found.reason}")
        fetcher = Fetcher(
            target=self.target,
            remote=remote,
            commit=found.commit,
            trust=self.trust,
            local_only=self.local_only,
            tester=tester,
        )
        alike: dict[tuple[object, ...], ModuleOutcome] = {}
        for finding in found.findings:
            known = self.outcomes.get(finding.path)
            if known is None or not known.engines:
                module = self.target.module(finding.path)
                tag = self.target.environment(module).tag if module is not None else ""
                kind = finding.structure, tag, finding.reason, *(engine.key for engine in finding.engines)
                if kind not in alike:
                    alike[kind] = self._module(finding, found, fetcher)
                new = replace(alike[kind], path=finding.path)
                if known is None or new.engines or (new.answer == "recipe" and known.answer == "miss"):
                    self.outcomes[finding.path] = new

    def _module(self, finding: Finding, found: Lookup, fetcher: Fetcher) -> ModuleOutcome:
        taken: list[str] = []
        refused: list[tuple[SharedEngine, Refused]] = []
        answers = set()
        reason = finding.reason
        for verdict in finding.verdicts:
            local = self._local(finding, verdict)
            if local is not None:
                answers.add("local")
                taken += [str(record.key.entry_path) for record in local.engines]
                reason = reason or ("" if local.engines else "eager was faster when it was tuned here")
                continue
            admitted = self._admitted(finding, verdict, fetcher, refused)
            if admitted:
                self._keep(finding, verdict, admitted)
                taken += [str(engine.key.entry_path) for engine in admitted]
                answers.add("hit")
        for verdict in () if answers else finding.unverified:  # What was timed comes first.
            admitted = self._admitted(finding, verdict, fetcher, refused)
            if admitted:
                records = [_as_local(engine.record) for engine in admitted]
                self.target.keep_unverified(finding.path, verdict.graph, records)
                taken += [str(engine.key.entry_path) for engine in admitted]
                answers.add("hit")
        if refused:
            reason = refused[0][1].reason
        untrusted = [engine for engine, answer in refused if answer.kind == "untrusted"]
        at = f"{found.repo}@{found.commit}" if found.commit else found.repo
        if untrusted:
            self.barred.setdefault(at, set()).update(engine.key.digest for engine in untrusted)
        hinted = not taken and self._hints(finding, [*untrusted, *finding.elsewhere], at)
        if hinted:
            reason += "; its recipe is kept, and tune() tries it first"
        return ModuleOutcome(
            path=finding.path,
            answer="hit" if "hit" in answers else "local" if "local" in answers else "recipe" if hinted else "miss",
            reason="" if taken else reason,
            engines=tuple(dict.fromkeys(taken)),
            repo=found.repo,
        )

    def _admitted(
        self,
        finding: Finding,
        verdict: SharedVerdict,
        fetcher: Fetcher,
        refused: list[tuple[SharedEngine, Refused]],
    ) -> list[SharedEngine]:
        """Of the engines for each shapes, the first that may run here; those before it go to ``refused``."""
        admitted: dict[str, SharedEngine] = {}
        for engine in verdict.engines:
            if engine.shapes in admitted:
                continue
            answer = self._engine(engine, verdict, finding, fetcher)
            if isinstance(answer, Admitted):
                admitted[engine.shapes] = engine
            else:
                refused.append((engine, answer))
        return list(admitted.values())

    def _engine(
        self, engine: SharedEngine, verdict: SharedVerdict, finding: Finding, fetcher: Fetcher
    ) -> Admitted | Refused:
        """Fetch an engine, once for all modules of equal structure."""
        place = f"{fetcher.remote.url}@{fetcher.commit} {engine.key.digest}"
        if place not in self._answers:
            self._answers[place] = answer = self._fetch(engine, verdict, finding, fetcher)
            if isinstance(answer, Admitted) and answer.policy != "present":
                self.bytes += engine.size
        return self._answers[place]

    def _fetch(
        self, engine: SharedEngine, verdict: SharedVerdict, finding: Finding, fetcher: Fetcher
    ) -> Admitted | Refused:
        """Fetch an engine. A remote that did not answer once is not asked for the next one."""
        url = fetcher.remote.url
        try:
            if url in self._silent:
                fetcher = replace(fetcher, local_only=True)
            return fetcher.fetch(engine, verdict.graph, finding.path)
        except RemoteError as error:
            if url not in self._silent:
                self.note(fetcher.remote, error)
            if error.cause not in ("broken", "absent"):
                self._silent.setdefault(url, str(error))
            return Refused(kind="damaged", reason=self._silent.get(url, str(error)))

    def _local(self, finding: Finding, verdict: SharedVerdict) -> Verdict | None:
        """What was decided here for a graph, if its engines are still there."""
        module = self.target.module(finding.path)
        assert module is not None
        known = self._known(finding, verdict)
        if known is None or (not known.engines and not known.lost):
            return None
        weights = WeightsDigest(module)
        engines = [record for record in known.engines if record.is_for(weights)]
        if known.engines and not engines:
            return None  # They hold the weights of other modules.
        there = all(isinstance(self.target.store.lookup(record.key), Entry) for record in engines)
        return replace(known, engines=engines) if there else None

    def _known(self, finding: Finding, verdict: SharedVerdict) -> Verdict | None:
        module = self.target.module(finding.path)
        assert module is not None
        here, tuner = self.target.environment(module), self.target.tuner
        return read_verdict(tuner.store, finding.structure, verdict.graph.key[:32], here, tuner.policy)

    def _keep(self, finding: Finding, verdict: SharedVerdict, admitted: Sequence[SharedEngine]) -> None:
        """Write which engines won elsewhere as a decision of this cache."""
        module = self.target.module(finding.path)
        assert module is not None
        known = self._known(finding, verdict) or Verdict(
            hierarchy_hash=finding.structure,
            graph=verdict.graph,
            environment=self.target.environment(module),
            policy=self.target.tuner.policy,
        )
        for engine in reversed(admitted):
            known.add(_as_local(engine.record))
        write_verdict(self.target.store, known)

    def _hints(self, finding: Finding, engines: Sequence[SharedEngine], source: str) -> bool:
        """Keep the recipes of engines that may not or cannot run here. True if there were any."""
        by_graph: dict[str, list[RecipeHint]] = {}
        for engine in engines:
            options = {name: value for name, value in engine.key.options.items() if name not in ("axes", "shapes")}
            hint = RecipeHint(backend=engine.key.backend, options=options, axes=engine.key.options.get("axes"))
            hints = by_graph.setdefault(engine.key.graph_key, [])
            if hint not in hints:
                hints.append(hint)
        for graph_key, hints in by_graph.items():
            write_hints(self.target.store, finding.structure, graph_key, source=redacted(source), hints=hints)
        return bool(by_graph)


def _advice(barred: Mapping[str, Collection[str]]) -> str:
    """What to do where engines fit, and nobody whom the user trusts made them."""
    place, engines = next(iter(barred.items()))
    given = f"trust={place!r}" if "@" in place else "trust=True if only people you trust can write there"
    return (
        f"{len(engines)} engines of {redacted(place)} fit this machine, and none of them may run: loading one runs its "
        f"author's code, and you did not say that you trust them. If you do, give {given}, or the key that signed them "
        "(SECURITY.md). Until then modules run eager, and tune() builds from their recipes."
    )


def _as_local(record: EngineRecord) -> EngineRecord:
    return replace(record, result=replace(record.result, engine=str(record.key.entry_path), source="loaded"))


def _install(target: Target, outcomes: Sequence[ModuleOutcome]) -> tuple[int, tuple[ModuleOutcome, ...]]:
    """Put the engines in place, and see where they are."""
    paths = [outcome.path for outcome in outcomes if outcome.engines]
    if not paths:
        return 0, tuple(outcomes)
    target.remember(paths)
    for path in paths:
        module = target.module(path)
        patched = patched_of(module) if module is not None else None
        if patched is not None and patched.state is not ModuleState.TUNED:
            patched._unpatch()  # It only counts calls; what restores engines leaves patched modules alone.
    installed = restore_modules(target.roots, target.config)
    seen = []
    for outcome in outcomes:
        lost = outcome.engines and _stats(target, outcome.path) is None
        reason = "its engine could not be installed; the log says why" if lost else outcome.reason
        seen.append(replace(outcome, reason=reason))
    return installed, tuple(seen)


def _stats(target: Target, path: str) -> ModuleStats | None:
    """Counters of a module that has engines now."""
    module = target.module(path)
    patched = patched_of(module) if module is not None else None
    return patched.stats if patched is not None and patched.state is ModuleState.TUNED else None
