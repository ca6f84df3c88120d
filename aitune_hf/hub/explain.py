"""Why a remote has what it has for a pipeline: engine by engine, or in what the pipelines that it has differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.errors import CorruptEntryError
from aitune_hf.hub.lookup import Fit, Lookup, look_up
from aitune_hf.hub.record import PipelineRecord, record_path
from aitune_hf.hub.remote import Remote, revision_of
from aitune_hf.hub.target import Target

__all__ = ["explain_remote"]

_RECORDS = str(PurePosixPath(record_path("")).parent)
_MAX_OTHERS = 8


def explain_remote(target: Target, remote: Remote, *, revision: str | None = None) -> str:
    """What a remote has for a pipeline, in words; where that is nothing, how the pipelines that it has differ.

    Raises:
        RemoteError: if the remote fails.
    """
    found = look_up(target, remote, revision=revision)
    if not found.reason:
        return "\n".join([found.summary(), *_details(target, found)])
    at = found.commit or revision_of(remote, revision)
    paths = [path for path in remote.names(_RECORDS, revision=at) if path.endswith(".json")]
    records = [_other(remote, path, at) for path in paths[:_MAX_OTHERS]]
    lines = _nearest(target, [record for record in records if record is not None])
    more = [f"  and {len(paths) - _MAX_OTHERS} more, which were not read"] if len(paths) > _MAX_OTHERS else []
    return "\n".join([found.summary(), *(f"  {line}" for line in lines or ["it has none at all"]), *more])


def _details(target: Target, found: Lookup) -> Iterator[str]:
    fit = {engine.key for finding in found.findings for engine in finding.engines}
    for finding in found.findings:
        module = target.module(finding.path)
        if module is None:
            continue
        check = Fit(target=target, module=module, here=target.environment(module))
        for engine in (*finding.engines, *finding.elsewhere):
            word = "fits" if engine.key in fit else check.objection(engine)
            yield f"    {finding.path or 'the model'}: {engine.key.backend} for {engine.key.environment.tag}: {word}"


def _other(remote: Remote, path: str, revision: str | None) -> PipelineRecord | None:
    data = remote.read(path, revision=revision, max_bytes=MAX_JSON_BYTES).data
    try:
        return None if data is None else PipelineRecord.from_bytes(PurePosixPath(path).stem, data)
    except CorruptEntryError:
        return None


def _nearest(target: Target, others: Sequence[PipelineRecord]) -> list[str]:
    """How a pipeline differs from others by component, the most similar first."""
    mine = target.root_hashes
    lines: list[tuple[int, str]] = []
    for other in others:
        roots = other.roots
        groups = {
            "equal": [path for path in mine if roots.get(path) == mine[path]],
            "of another structure": [path for path in mine if path in roots and roots[path] != mine[path]],
            "only here": sorted(set(mine) - set(roots)),
            "only there": sorted(set(roots) - set(mine)),
        }
        parts = [
            f"{word}: {', '.join(path or 'the model' for path in found)}" for word, found in groups.items() if found
        ]
        lines.append((-len(groups["equal"]), f"{other.pipeline} {other.pipeline_hash[:12]}: {'; '.join(parts)}"))
    return [line for _, line in sorted(lines)]
