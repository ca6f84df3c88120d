"""Which files a push adds, given what the remote has: never another engine in the place of one that is there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aitune_hf.cache import EngineKey, FileDigest, Manifest
from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.cache.manifest import MANIFEST_NAME
from aitune_hf.errors import CacheError, HubError
from aitune_hf.hub.bundle import Bundle
from aitune_hf.hub.record import PipelineRecord
from aitune_hf.hub.remote import Addition, Head, Remote
from aitune_hf.hub.signature import SIGNATURE_NAME, SIGNATURE_SIZE

__all__ = ["Upload", "plan_upload"]

_Files = Mapping[str, FileDigest]


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What to add on top of one state of a remote.

    Attributes:
        record: what the record says then.
        additions: files of engines.
        unsigned: engines that are there with other bytes than here, or signed by somebody else: what is not one's own is
            not signed.
        bytes: of the additions.
    """

    record: PipelineRecord
    additions: tuple[Addition, ...] = ()
    unsigned: tuple[str, ...] = ()
    bytes: int = 0


def plan_upload(bundle: Bundle, theirs: PipelineRecord | None, remote: Remote, head: Head, *, force: bool) -> Upload:
    """Compare the engines of a push with what the remote has.

    An engine that is there, be it by this record or by that of another pipeline, stays: two builds of one key differ in
    their bytes, and a record must say those that are there. Where they are the very ones from here, a signature is added.

    Args:
        theirs: the remote's record at ``head``.
        force: replace what is there.

    Raises:
        HubError: if the manifest of an engine in the remote is damaged.
    """
    ours = {key: engine.files for key, engine in bundle.record.engines().items()}
    if force:
        wanted: dict[EngineKey, Sequence[str]] = {key: list(files) for key, files in ours.items()}
        there: dict[EngineKey, _Files] = dict(ours)
        unsigned: list[str] = []
    else:
        known = theirs.engines() if theirs else {}
        there = {key: known[key].files for key in ours if key in known}
        there |= dict(_elsewhere_listed([key for key in ours if key not in known], remote, head))
        wanted = {key: list(files) for key, files in ours.items() if key not in there}
        unsigned = []
        for key in sorted(ours.keys() & there.keys(), key=lambda key: key.digest):
            mine, found = ours[key], there[key]
            if SIGNATURE_NAME not in mine or mine == found:
                continue
            if {name: one for name, one in mine.items() if name != SIGNATURE_NAME} == found:
                wanted[key], there[key] = [SIGNATURE_NAME], mine
            else:
                unsigned.append(str(key.entry_path))
    mine_there = bundle.record.with_files(there)
    return Upload(
        record=theirs.with_files(there).merged(mine_there) if theirs else mine_there,
        additions=tuple(
            Addition(path=str(key.entry_path / name), source=bundle.folders[key] / name, force=force)
            for key, names in wanted.items()
            for name in sorted(names)
        ),
        unsigned=tuple(unsigned),
        bytes=sum(ours[key][name].size for key, names in wanted.items() for name in names),
    )


def _elsewhere_listed(keys: Sequence[EngineKey], remote: Remote, head: Head) -> Iterator[tuple[EngineKey, _Files]]:
    """Those of these engines that lie in the remote all the same, since another pipeline uses them too."""
    if not keys:
        return
    at = head.commit or None
    names = (MANIFEST_NAME, SIGNATURE_NAME)
    found = remote.present([str(key.entry_path / name) for key in keys for name in names], revision=at)
    for key in keys:
        path = str(key.entry_path / MANIFEST_NAME)
        data = remote.read(path, revision=at, max_bytes=MAX_JSON_BYTES).data if path in found else None
        if data is None:
            continue
        files = {**_listed(remote, key, data), MANIFEST_NAME: _digest(data)}
        path = str(key.entry_path / SIGNATURE_NAME)
        signature = remote.read(path, revision=at, max_bytes=SIGNATURE_SIZE).data if path in found else None
        if signature is not None:
            files[SIGNATURE_NAME] = _digest(signature)
        yield key, files


def _listed(remote: Remote, key: EngineKey, data: bytes) -> _Files:
    try:
        manifest = Manifest.from_bytes(data)
        if manifest.key == key:
            return manifest.files
        why = f"it is of another engine: {key.difference(manifest.key)}"
    except CacheError as error:
        why = str(error)
    raise HubError(
        f"{remote.url}: {key.entry_path / MANIFEST_NAME} cannot be used, so its engine cannot be listed: {why}. Remove that "
        "folder, or give force=True to replace the engine."
    )


def _digest(data: bytes) -> FileDigest:
    return FileDigest(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
