"""Letting an entry of somebody else's cache into the one of this machine, or saying why not.

What is checked, in this order, so that little is done for what is refused, and nothing is executed before the end:

1. the manifest: its digest where the caller knows it, strict JSON within bounds, one spelling, the key asked for;
2. the names and sizes it lists, and that just these files are there;
3. for native engines, that the user trusts the source; data needs no trust;
4. a private copy of the files, hashed as it is copied. From here on only the copy counts, and it is what the cache gets;
5. what the files hold: archives, references to other files;
6. for native engines, the first load in a child process, which the caller provides. What crashed is not tried again.

Whether an engine is native is decided by the backend installed here, never by what the entry says of itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from aitune_hf.backends.registry import get_backend
from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.cache.entry import Entry
from aitune_hf.cache.key import EngineKey
from aitune_hf.cache.manifest import MANIFEST_NAME, Manifest, UnknownSchemaError
from aitune_hf.cache.slot import Slot
from aitune_hf.cache.store import LocalStore
from aitune_hf.errors import CacheError, ConfigError, CorruptEntryError
from aitune_hf.hub.contents import check_contents, check_data_names
from aitune_hf.hub.intake import check_file_set, copy_file, open_folder, read_file
from aitune_hf.hub.objection import Limits, Objection, RefusalKind
from aitune_hf.hub.signature import SIGNATURE_NAME
from aitune_hf.hub.trust import Decision, Policy, Source, Trust

__all__ = ["AdmissionPolicy", "Admitted", "Refused", "Trial", "admit", "is_native"]

#: Loads and runs an engine where a crash does no harm, given its folder and manifest. Whatever it raises is held against
#: the engine, which is not tried again; but an ``Objection`` says that it could not be tried here, and is not remembered.
Trial = Callable[[Path, Manifest], None]
#: Why an entry is in the store: by the user's trust, because it is data, or because it was there already.
AdmissionPolicy = Literal[Policy, "data", "present"]

_MAX_TEXT = 200
_REASON = 500


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """An entry that lies in the local store now, and by which policy it came there."""

    entry: Entry
    policy: AdmissionPolicy


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why an entry was not let in: ``kind`` to count by, ``reason`` a sentence that names the file."""

    kind: RefusalKind
    reason: str


def admit(
    folder: Path,
    expected: EngineKey,
    *,
    manifest_sha256: str | None,
    source: Source,
    trust: Trust,
    store: LocalStore,
    trial: Trial | None = None,
    limits: Limits | None = None,
) -> Admitted | Refused:
    """Check the entry in ``folder`` and put it into ``store``, where it is an engine like those built here.

    Args:
        folder: holds the manifest and the files it lists as regular files, no links; perhaps ``manifest.json.sig``.
        expected: the key that was asked for.
        manifest_sha256: digest of the manifest's bytes, where the caller has it from elsewhere.
        source: where the folder's content came from.
        trust: whom the user trusts.
        store: the cache of this machine. Of many processes that admit one entry, one does the work.
        trial: the first load of a native engine. None: the caller loads it where a crash is contained.
        limits: bounds on sizes.

    Returns:
        The entry in the store; or a refusal, in which case nothing of it is there.

    Raises:
        CacheError: if this machine has no room for the files; that says nothing about the entry.
    """
    limits = limits or Limits()
    try:
        with open_folder(Path(folder)) as opened:
            data, manifest = _read_manifest(opened, manifest_sha256)
            _check_key(manifest, expected)
            is_data = not is_native(expected)
            _check_listing(opened, manifest, limits, is_data=is_data)
            decision = None if is_data else trust.decide(source, data)
            if decision is not None and not decision.trusted:
                raise Objection("untrusted", f"{MANIFEST_NAME} is of a native engine, and {decision.reason}")
            with store.reserve(expected) as slot:
                if slot.entry is not None:
                    return Admitted(entry=slot.entry, policy="present")
                if (earlier := store.rejection(manifest)) is not None:
                    raise Objection("crashed", f"{_first_file(manifest)} failed here earlier: {earlier}")
                _copy(opened, slot, manifest)
                check_contents(slot.workdir, manifest.files, limits, is_data=is_data)
                if trial is not None and not is_data:
                    _try(trial, slot, manifest, store)
                return _commit(slot, manifest, _origin(source, decision, data))
    except Objection as objection:
        return Refused(kind=objection.kind, reason=objection.reason)


def is_native(key: EngineKey) -> bool:
    """Whether loading an engine of this key runs code of its author.

    It does not only where the backend installed here says that its artefacts are data and the key is of data. Raises
    ``Objection`` for a key of data whose backend is native, or not known here.
    """
    try:
        backend = get_backend(key.backend)
    except ConfigError as error:
        if not key.environment.is_data:
            return True
        raise Objection("foreign", f"{MANIFEST_NAME}: whether it is data cannot be told: {error}") from error
    if backend.native and key.environment.is_data:
        raise Objection(
            "malformed", f"{MANIFEST_NAME} says that it is data, but engines of {key.backend} are native code"
        )
    return backend.native or not key.environment.is_data


def _read_manifest(folder: int, sha256: str | None) -> tuple[bytes, Manifest]:
    data = read_file(folder, MANIFEST_NAME, MAX_JSON_BYTES)
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise Objection("damaged", f"{MANIFEST_NAME} does not have the sha256 {sha256[:12]}… that was promised")
    try:
        manifest = Manifest.from_bytes(data)
        if manifest.to_bytes() != data:
            raise CorruptEntryError("it is not spelled as this package writes it")
    except UnknownSchemaError as error:
        raise Objection("foreign", f"{MANIFEST_NAME}: {error}") from error
    except CacheError as error:
        raise Objection("malformed", f"{MANIFEST_NAME}: {error}") from error
    return data, manifest


def _check_key(manifest: Manifest, expected: EngineKey) -> None:
    if manifest.key != expected:
        raise Objection("foreign", f"{MANIFEST_NAME} is of another engine: {expected.difference(manifest.key)}")


def _check_listing(folder: int, manifest: Manifest, limits: Limits, *, is_data: bool) -> None:
    for name, digest in manifest.files.items():
        if name.lower() == SIGNATURE_NAME:
            raise Objection("malformed", f"{name} is reserved for the signature and cannot be a file of the engine")
        if digest.size > limits.file_bytes:
            raise Objection("malformed", f"{name} has {digest.size} bytes; at most {limits.file_bytes} are taken")
    if manifest.size > limits.total_bytes:
        raise Objection(
            "malformed",
            f"the files of {MANIFEST_NAME} have {manifest.size} bytes; at most {limits.total_bytes} are taken",
        )
    if is_data:
        check_data_names(manifest.files)
    check_file_set(folder, {MANIFEST_NAME, *manifest.files}, ignored={SIGNATURE_NAME})


def _copy(folder: int, slot: Slot, manifest: Manifest) -> None:
    for name, digest in manifest.files.items():
        slot.put(name, partial(copy_file, folder, name, digest))


def _try(trial: Trial, slot: Slot, manifest: Manifest, store: LocalStore) -> None:
    try:
        trial(slot.workdir, manifest)
    except Objection:
        raise
    except Exception as error:
        reason = f"{_first_file(manifest)} failed its first load: {type(error).__name__}: {str(error)[:_REASON]}"
        store.reject(slot, manifest, reason)
        raise Objection("crashed", reason) from error


def _commit(slot: Slot, manifest: Manifest, origin: tuple[AdmissionPolicy, Mapping[str, object]]) -> Admitted:
    policy, admitted = origin
    try:
        entry = slot.commit(
            engine=manifest.engine,
            results=manifest.results,
            provenance={**_harmless(manifest.provenance), "admitted": admitted},
            factors=manifest.factors,
            files=manifest.files,
        )
    except CorruptEntryError as error:
        raise Objection("damaged", str(error)) from error
    return Admitted(entry=entry, policy=policy)


def _origin(source: Source, decision: Decision | None, data: bytes) -> tuple[AdmissionPolicy, Mapping[str, object]]:
    """By which policy it is let in, and what the store notes about that."""
    policy: AdmissionPolicy = "data" if decision is None or decision.policy is None else decision.policy
    note: dict[str, object] = {
        "commit": source.commit if source.commit and re.fullmatch("[0-9a-f]{40}", source.commit) else None,
        "from": source.name,
        "manifest_sha256": hashlib.sha256(data).hexdigest(),
        "policy": policy,
    }
    if decision is not None and decision.key is not None:
        note["signer"] = decision.key.fingerprint
    return policy, note


def _harmless(provenance: Mapping[str, object]) -> dict[str, object]:
    """What the publisher says about the build: short printable texts and numbers, and no paths or addresses."""
    kept: dict[str, object] = {}
    for name, value in provenance.items():
        if not re.fullmatch("[a-z][a-z0-9_]{0,40}", name) or name == "admitted":
            continue
        if isinstance(value, str):
            if len(value) <= _MAX_TEXT and value.isprintable() and not re.match(r"[/~\\]|[A-Za-z]:\\|.*://", value):
                kept[name] = value
        elif isinstance(value, (int, float)):
            kept[name] = value
    return kept


def _first_file(manifest: Manifest) -> str:
    return next(iter(manifest.files), MANIFEST_NAME)
