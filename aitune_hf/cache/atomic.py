"""Making files appear whole, or not at all, also across a power cut."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "move_whole",
    "remove_empty_parents",
    "remove_tree",
    "sync_directory",
    "write_durably",
    "write_whole",
]

_ATTEMPTS = 8


def write_durably(path: Path, data: bytes) -> None:
    """Create ``path`` with these bytes and wait until the disk has them."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a folder are on disk, where the file system can tell."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(target: Path, data: bytes, *, staging: Path) -> None:
    """Put a file in place through ``staging``, a free name on the same disk. Readers see old or new bytes."""
    staging.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_durably(staging, data)
        _with_parents(target, lambda: staging.replace(target))
    except BaseException:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def move_whole(source: Path, target: Path) -> bool:
    """Rename a finished folder into place. False, and nothing changed, when ``target`` already exists."""
    if os.path.lexists(target):
        return False
    try:
        _with_parents(target, lambda: source.rename(target))
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST} and target.is_dir():
            return False
        raise
    sync_directory(target.parent)
    return True


def remove_tree(path: Path, *, aside: Path) -> None:
    """Remove a folder that others may be opening: it leaves its place whole, then its files go."""
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        path.rename(aside)
    except FileNotFoundError:
        return
    except OSError:  # a full disk may refuse even that
        aside = path
    shutil.rmtree(aside, ignore_errors=True)


def remove_empty_parents(path: Path, *, stop: Path) -> None:
    """Remove the folders above ``path`` that have become empty, up to and without ``stop``."""
    with suppress(OSError):
        for parent in path.parents:
            if parent == stop or stop not in parent.parents:
                return
            parent.rmdir()


def _with_parents(target: Path, action: Callable[[], object]) -> None:
    for attempt in range(_ATTEMPTS):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            action()
            return
        except FileNotFoundError:  # somebody tidied the empty parent away in between
            if attempt == _ATTEMPTS - 1:
                raise
