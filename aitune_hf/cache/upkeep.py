"""Keeping a cache folder small, clean and right: size, eviction, sweeping, verification.

Everything here may run while other processes build and load: an entry is touched only under its lock, and
leaves its place in one rename.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from aitune_hf.cache.atomic import remove_empty_parents, remove_tree
from aitune_hf.cache.digests import DigestMemo
from aitune_hf.cache.entry import verify_entry
from aitune_hf.cache.layout import Layout, lock_id_of
from aitune_hf.cache.locking import KeyLock
from aitune_hf.errors import CacheError, CorruptEntryError

__all__ = ["Collected", "Problem", "clear", "collect", "entry_problem", "sweep", "sweep_key", "total_size"]

_ABANDONED_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What ``gc`` or ``clear`` removed, in entries and bytes, and how many entries stayed, being in use."""

    entries: int
    bytes: int
    busy: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something wrong in the cache: the path relative to its root, and why."""

    path: str
    reason: str


def total_size(layout: Layout) -> int:
    """Bytes of all entries, records and quarantined remains."""
    return _tree_size(layout.shared) + _tree_size(layout.quarantine)


def collect(layout: Layout, max_bytes: int, *, keep: Collection[PurePosixPath] = ()) -> Collected:
    """Evict until at most ``max_bytes`` are used: quarantined remains first, then entries unused the longest.

    Entries in ``keep`` and those being built stay. Records stay. Never raises for a file system that refuses.
    """
    sweep(layout)
    total, freed, removed, busy = total_size(layout), 0, 0, 0
    if total > max_bytes:
        freed += _remove_quarantine(layout)
    for _, path in sorted(_last_uses(layout)):
        if total - freed <= max_bytes:
            break
        if path in keep:
            continue
        size = _remove_entry(layout, path)
        if size is None:
            busy += 1
        else:
            freed, removed = freed + size, removed + 1
    return Collected(entries=removed, bytes=freed, busy=busy)


def clear(layout: Layout) -> Collected:
    """Remove every entry that is not being built, every record, all quarantined remains and what was rejected."""
    before = total_size(layout)
    collected = collect(layout, -1)
    for name in list(layout.record_names()):
        path = layout.shared / name
        with suppress(OSError):
            path.unlink()
        remove_empty_parents(path, stop=layout.base)
    shutil.rmtree(layout.rejected, ignore_errors=True)
    return Collected(entries=collected.entries, bytes=before - total_size(layout), busy=collected.busy)


def sweep(layout: Layout) -> int:
    """Remove what dead builders left in the temporary folder; returns how many.

    A work directory belongs to its key's lock: free lock, dead builder. One made by another machine, whose
    locks this one may not see, goes only after an hour, as does a staged record.
    """
    removed = 0
    for path, purpose, ours in list(layout.temporaries()):
        old = _age(path) > _ABANDONED_S
        if purpose == "record":
            removed += old and _remove_any(path)
        elif ours or old:
            with _if_free(layout, purpose) as free:
                removed += free and _remove_any(path)
    return removed


def sweep_key(layout: Layout, lock_id: str) -> None:
    """Remove what a dead builder of one key left. The caller holds the key's lock."""
    for path, purpose, ours in list(layout.temporaries()):
        if purpose == lock_id and (ours or _age(path) > _ABANDONED_S):
            _remove_any(path)


def entry_problem(layout: Layout, path: PurePosixPath) -> str | None:
    """What is wrong with the entry at this path, if anything: bytes, names, or the place it is in."""
    try:
        manifest = verify_entry(layout.root / path, DigestMemo())
        if manifest.key.entry_path != path:
            raise CorruptEntryError(f"its manifest belongs to {manifest.key.entry_path}")
    except FileNotFoundError:
        return None
    except (CacheError, OSError) as error:
        return str(error)
    return None


@contextmanager
def _if_free(layout: Layout, lock_id: str) -> Iterator[bool]:
    lock = KeyLock(layout.locks, lock_id)
    try:
        held = lock.try_acquire()
    except OSError:
        held = False
    try:
        yield held
    finally:
        if held:
            lock.release()


def _remove_entry(layout: Layout, path: PurePosixPath) -> int | None:
    """Bytes freed, or None when the entry is in a builder's hands or cannot be removed."""
    lock_id, place = lock_id_of(path), layout.root / path
    with _if_free(layout, lock_id) as free:
        if not free:
            return None
        size = _tree_size(place)
        remove_tree(place, aside=layout.new_temporary(lock_id))
        if place.exists():
            return None
        remove_empty_parents(place, stop=layout.shared)
        return size


def _remove_quarantine(layout: Layout) -> int:
    size = _tree_size(layout.quarantine)
    shutil.rmtree(layout.quarantine, ignore_errors=True)
    return size - _tree_size(layout.quarantine)


def _last_uses(layout: Layout) -> Iterator[tuple[int, PurePosixPath]]:
    for path in list(layout.entry_paths()):
        with suppress(OSError):
            yield (layout.root / path).stat().st_mtime_ns, path


def _tree_size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _remove_any(path: Path) -> bool:
    with suppress(OSError):
        path.unlink()
        return True
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)
