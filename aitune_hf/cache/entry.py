"""An engine found in the cache, or the reason why there is none."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.cache.digests import DigestMemo, copy_verified, open_regular, read_verified
from aitune_hf.cache.key import EngineKey
from aitune_hf.cache.layout import Layout
from aitune_hf.cache.manifest import MANIFEST_NAME, FileDigest, Manifest
from aitune_hf.errors import CacheError, CorruptEntryError

__all__ = ["Entry", "Miss", "MissKind", "explain_absence", "read_manifest", "verify_entry"]

MissKind = Literal["absent", "foreign", "corrupt", "unreadable"]
_MAX_NEIGHBOURS = 64


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An engine on disk whose bytes were right when it was handed out.

    The folder may be evicted or damaged at any later moment. Load engines through ``private_copy`` or
    ``read``: they hash the very bytes they hand on, so nothing can slip in between check and use.
    """

    path: Path
    manifest: Manifest

    def read(self, name: str) -> bytes:
        """The verified bytes of one file. Raises ``CacheError`` when it is gone or its bytes are wrong."""
        expected = self._expected(name)
        try:
            return read_verified(self.path / name, expected)
        except OSError as error:
            raise self._lost(name, error) from error

    def private_copy(self, directory: Path) -> Path:
        """Copy all files into ``directory`` (made if absent, free of these names), verifying what was copied.

        Returns ``directory``. Raises ``CorruptEntryError`` for wrong bytes, ``CacheError`` when a file is
        gone or the copy cannot be written; what was copied until then is removed.
        """
        copied: list[Path] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, expected in self.manifest.files.items():
                copy_verified(self.path / name, directory / name, expected)
                copied.append(directory / name)
        except (OSError, CacheError) as error:
            for path in copied:
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._lost(str(error.filename), error) from error
            raise
        return directory

    def _expected(self, name: str) -> FileDigest:
        if name not in self.manifest.files:
            raise CacheError(f"{self.path}: no file {name!r}; this entry has {sorted(self.manifest.files)}")
        return self.manifest.files[name]

    def _lost(self, name: str, error: OSError) -> CacheError:
        return CacheError(
            f"{self.path}: {name} cannot be copied or read ({error.strerror or error}); the entry may "
            "have been evicted meanwhile. Look it up again, and build it if it is gone."
        )


@dataclass(frozen=True, kw_only=True)
class Miss:
    """Why the cache has no engine for a key: ``kind`` to count by, ``reason`` to read."""

    reason: str
    kind: MissKind


def read_manifest(path: Path) -> Manifest:
    """The manifest of the entry at ``path``, parsed strictly. Raises ``CacheError`` or ``OSError``."""
    with open_regular(path / MANIFEST_NAME) as file:
        return Manifest.from_bytes(file.read(MAX_JSON_BYTES + 1))


def verify_entry(path: Path, memo: DigestMemo) -> Manifest:
    """The manifest of the entry at ``path``, every listed file checked, and no other file there.

    Raises ``FileNotFoundError`` when there is no entry, ``CacheError`` when it is damaged, ``OSError`` when
    it cannot be read.
    """
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise CorruptEntryError(f"{path.name} is not a folder")
    try:
        manifest = read_manifest(path)
        _check_names(path, manifest)
        for name, expected in manifest.files.items():
            memo.verify(path / name, expected)
    except FileNotFoundError as error:
        if not os.path.lexists(path):
            raise  # the whole entry went away meanwhile
        raise CorruptEntryError(f"{Path(str(error.filename)).name} is missing") from error
    return manifest


def explain_absence(layout: Layout, key: EngineKey) -> Miss:
    """A miss that names what the nearest entry was built for.

    Near is the same module, call form and backend, with another environment or other options.
    """
    nearest: list[tuple[bool, str, str]] = []
    for path in layout.neighbours(key)[:_MAX_NEIGHBOURS]:
        try:
            other = read_manifest(path).key
        except (CacheError, OSError):
            continue  # damaged, or gone: verify() tells
        if other.backend == key.backend and (reason := key.difference(other)):
            foreign = key.environment.difference(other.environment) is not None
            nearest.append((foreign, other.environment.tag, reason))
    if not nearest:
        return Miss(kind="absent", reason="absent")
    foreign, _, reason = min(nearest)
    if foreign:
        return Miss(kind="foreign", reason=f"foreign environment: {reason}")
    return Miss(kind="absent", reason=f"absent; the nearest one was {reason}")


def _check_names(path: Path, manifest: Manifest) -> None:
    found = {item.name for item in path.iterdir()}
    expected = {MANIFEST_NAME, *manifest.files}
    if missing := sorted(expected - found):
        raise CorruptEntryError(f"{missing[0]} is missing")
    if unlisted := sorted(found - expected):
        raise CorruptEntryError(f"{unlisted[0][:80]} is not listed in the manifest")
