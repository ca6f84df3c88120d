"""Taking files out of a folder that somebody else may be changing.

Everything goes through one descriptor of the folder and one of each file, which are never looked up by name again: what
is hashed is what is copied, and only the copy is looked at and used afterwards.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from aitune_hf.cache.manifest import FileDigest
from aitune_hf.hub.objection import Objection

__all__ = ["check_file_set", "copy_file", "open_folder", "read_file"]

_CHUNK = 1 << 20
# O_NONBLOCK: a named pipe in place of a file must not make the reader wait for a writer.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder that is no link. Raises ``Objection`` where there is none."""
    try:
        folder = os.open(path, _FLAGS | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise Objection("malformed", f"the entry {path.name} is a link or a file, not a folder") from error
        raise Objection("damaged", f"the entry {path.name} cannot be read: {error.strerror or error}") from error
    try:
        yield folder
    finally:
        os.close(folder)


def check_file_set(folder: int, expected: Collection[str], ignored: Collection[str] = ()) -> None:
    """Raise ``Objection`` unless the folder holds just the ``expected`` names, and perhaps ``ignored`` ones."""
    missing = set(expected)
    with os.scandir(folder) as found:
        for item in found:  # One at a time: a folder with a million names costs nothing beyond the first wrong one.
            if item.name not in expected and item.name not in ignored:
                raise Objection("malformed", f"{item.name[:80]!r} is not listed in the manifest")
            missing.discard(item.name)
    if missing:
        raise Objection("damaged", f"{min(missing)} is missing")


def read_file(folder: int, name: str, limit: int) -> bytes:
    """The bytes of one file. Raises ``Objection`` for one that is no plain file or has more than ``limit`` bytes."""
    with _open(folder, name) as file:
        data = _read(file, name, limit + 1)
        while len(data) <= limit and (more := _read(file, name, limit + 1 - len(data))):
            data += more
    if len(data) > limit:
        raise Objection("malformed", f"{name} has more than {limit} bytes")
    return data


def copy_file(folder: int, name: str, expected: FileDigest, target: Path) -> None:
    """Copy one file to ``target``, which must not exist, and check the digest of what was copied.

    Raises ``Objection`` for one that is no plain file or has other bytes, ``OSError`` where ``target`` cannot be
    written.
    """
    hasher, size = hashlib.sha256(), 0
    with _open(folder, name) as file, target.open("xb") as out:
        found = os.fstat(file.fileno()).st_size
        if found != expected.size:
            raise Objection("damaged", f"{name} has {found} bytes, its manifest says {expected.size}")
        while size <= expected.size and (chunk := _read(file, name, _CHUNK)):
            hasher.update(chunk)
            size += len(chunk)
            out.write(chunk)
    if size != expected.size or hasher.hexdigest() != expected.sha256:
        raise Objection("damaged", f"{name} does not have the sha256 {expected.sha256[:12]}… that its manifest says")


def _open(folder: int, name: str) -> BinaryIO:
    try:
        descriptor = os.open(name, _FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Objection("malformed", f"{name} is a symbolic link") from error
        if error.errno in {errno.ENXIO, errno.ENODEV}:  # a socket, or a device that is not there
            raise Objection("malformed", f"{name} is not a regular file") from error
        raise Objection("damaged", f"{name} cannot be read: {error.strerror or error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Objection("malformed", f"{name} is not a regular file")
        if status.st_nlink != 1:
            raise Objection("malformed", f"{name} is a hard link: the same file has another name elsewhere")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def _read(file: BinaryIO, name: str, size: int) -> bytes:
    try:
        return file.read(size) or b""
    except OSError as error:  # of the source, and no reason to distrust the disk of the cache
        raise Objection("damaged", f"{name} cannot be read: {error.strerror or error}") from error
