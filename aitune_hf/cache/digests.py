"""Reading files that must have a given digest, in one pass and through one open descriptor."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from aitune_hf.cache.manifest import FileDigest
from aitune_hf.errors import CorruptEntryError

__all__ = ["DigestMemo", "copy_verified", "digest_of", "open_regular", "read_verified"]

_CHUNK = 1 << 20
_SETTLE_NS = 2_000_000_000
_Identity = tuple[str, int, int, int, int]


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises ``CorruptEntryError`` for a link, folder or device, ``OSError`` as ``open`` does.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise CorruptEntryError(f"{path.name} is a symbolic link")
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptEntryError(f"{path.name} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def digest_of(path: Path) -> FileDigest:
    """SHA-256 and size of a regular file."""
    hasher, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
    return FileDigest(sha256=hasher.hexdigest(), size=size)


def read_verified(path: Path, expected: FileDigest) -> bytes:
    """The bytes of a file, hashed as they were read. Raises ``CorruptEntryError`` for other bytes."""
    chunks: list[bytes] = []
    _stream(path, expected, chunks.append)
    return b"".join(chunks)


def copy_verified(source: Path, target: Path, expected: FileDigest) -> None:
    """Copy a file and hash what was copied, so that ``target`` cannot differ from what was checked.

    Raises ``CorruptEntryError`` on a mismatch, having removed ``target``; ``FileExistsError`` when ``target``
    exists.
    """
    with target.open("xb") as out:
        try:
            _stream(source, expected, out.write)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _stream(path: Path, expected: FileDigest, sink: Callable[[bytes], object]) -> None:
    hasher, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while size <= expected.size and (chunk := file.read(_CHUNK)):
            hasher.update(chunk)
            size += len(chunk)
            sink(chunk)
    _compare(path, FileDigest(sha256=hasher.hexdigest(), size=size), expected)


def _compare(path: Path, found: FileDigest, expected: FileDigest) -> None:
    if found.size != expected.size:
        raise CorruptEntryError(f"{path.name} has {found.size} bytes or more, its manifest says {expected.size}")
    if found.sha256 != expected.sha256:
        raise CorruptEntryError(
            f"{path.name} has sha256 {found.sha256[:12]}…, its manifest says {expected.sha256[:12]}…"
        )


def _identity(path: Path, status: os.stat_result) -> _Identity:
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class DigestMemo:
    """Digests already computed in this process, so that a file is hashed once while it stays as it is.

    A file changed less than two seconds ago is not remembered: a second change within one tick of the file
    system's clock would go unseen.
    """

    def __init__(self) -> None:
        self._known: dict[_Identity, FileDigest] = {}

    def verify(self, path: Path, expected: FileDigest) -> None:
        """Raise ``CorruptEntryError`` unless the file has the expected digest."""
        status = path.lstat()
        identity = _identity(path, status)
        if stat.S_ISREG(status.st_mode) and status.st_size != expected.size:
            raise CorruptEntryError(f"{path.name} has {status.st_size} bytes, its manifest says {expected.size}")
        found = self._known.get(identity)
        if found is None:
            found = digest_of(path)
            settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLE_NS
            if settled and _identity(path, path.lstat()) == identity:
                self._known[identity] = found
        _compare(path, found, expected)
