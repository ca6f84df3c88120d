"""The engine cache on this machine's disk, shared by all its processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from aitune_hf.cache.digests import DigestMemo
from aitune_hf.cache.entry import Entry, Miss, explain_absence, read_manifest, verify_entry
from aitune_hf.cache.key import EngineKey
from aitune_hf.cache.layout import Layout, lock_id_of
from aitune_hf.cache.locking import ExclusiveKeys, KeyLock
from aitune_hf.cache.manifest import Manifest
from aitune_hf.cache.quarantine import quarantine
from aitune_hf.cache.records import Records
from aitune_hf.cache.rejections import Rejections
from aitune_hf.cache.slot import Slot
from aitune_hf.cache.upkeep import (
    Collected,
    Problem,
    clear,
    collect,
    entry_problem,
    sweep,
    sweep_key,
    total_size,
)
from aitune_hf.cache.writable import WritableState
from aitune_hf.errors import CacheError, CorruptEntryError

__all__ = ["LocalStore"]

logger = logging.getLogger(__name__)
_SECOND_LOOKS = 5
_SECOND_LOOK_AFTER_S = 0.02


class LocalStore:
    """Engines by key under one folder.

    Safe for any number of processes and threads. Damage to the folder, a full disk or missing permissions
    cost time, never a crash and never a wrong engine: damaged entries are set aside and count as missing, and
    what cannot be written lives in a temporary directory of this process. ``max_bytes``: evict the least
    recently used beyond it, after each build.
    """

    def __init__(self, root: Path, max_bytes: int | None = None) -> None:
        self._layout = Layout(root=Path(root).absolute())
        self._max_bytes = max_bytes
        self._memo = DigestMemo()
        self._state = WritableState(self.root)
        self._records = Records(self._layout, self._state)
        self._rejections = Rejections(self._layout, self._state)
        self._private: dict[str, Entry] = {}
        self._locks = ExclusiveKeys(self._layout.locks, self._state)
        self._swept = False

    @property
    def root(self) -> Path:
        """The folder this store lives in. ``root/aitune/v1`` is what a Hub repo holds."""
        return self._layout.root

    @property
    def unwritable_reason(self) -> str | None:
        """Why the latest failed write failed; None while all went well."""
        return self._state.reason

    def lookup(self, key: EngineKey) -> Entry | Miss:
        """The engine for ``key``, every byte checked, or why there is none. Never waits for a builder.

        ``Miss.kind``: ``absent``, ``foreign`` (built for another environment; the reason names the first
        difference), ``corrupt`` (damaged; set aside) or ``unreadable``.
        """
        return self._find(key, lock_held=False)

    def checkout(self, key: EngineKey, directory: Path) -> Entry | Miss:
        """As ``lookup``, with the files copied to ``directory`` and checked as copied.

        The entry returned lives there: what happens to the cache afterwards cannot reach it. This is how to
        load native code.
        """
        for _ in range(2):
            found = self.lookup(key)
            if isinstance(found, Miss):
                return found
            try:
                return replace(found, path=found.private_copy(directory))
            except CacheError as error:  # evicted or damaged since: look again
                reason = str(error)
        return Miss(kind="unreadable", reason=reason)

    @contextmanager
    def reserve(self, key: EngineKey, *, timeout_s: float | None = None, warn_after_s: float = 30.0) -> Iterator[Slot]:
        """The right to build the engine for ``key``, for one builder at a time over all processes.

        ::

            with store.reserve(key) as slot:
                if slot.entry is None:
                    slot.write("model.pt2", data)
                    slot.commit(engine={...})
            entry = slot.entry

        Waits while another process builds the same key, saying so every ``warn_after_s`` seconds, and then
        finds its entry. Raises ``KeyLockedError`` after ``timeout_s`` seconds, and ``CacheError`` when this
        thread holds the key already.
        """
        first = self.lookup(key)
        if isinstance(first, Entry):
            yield self._slot(key, first, workdir=None)
            return
        with self._locks.hold(lock_id_of(key.entry_path), str(key.entry_path), timeout_s, warn_after_s):
            again = self._find(key, lock_held=True)
            if isinstance(again, Entry):
                yield self._slot(key, again, workdir=None)
                return
            slot = self._slot(key, first, workdir=self._new_workdir(key))
            pid = os.getpid()
            try:
                yield slot
            finally:
                if os.getpid() == pid:  # a child forked meanwhile leaves its parent's work alone
                    self._settle(slot)

    def read_record(self, name: str) -> dict[str, object] | None:
        """The record at ``aitune/v1/<name>``; None when there is none, or it was damaged and set aside."""
        return self._records.read(name)

    def write_record(self, name: str, obj: Mapping[str, object]) -> None:
        """Write a small JSON record at ``aitune/v1/<name>``, ending in ``.json``. The last writer wins."""
        self._records.write(name, obj)

    @contextmanager
    def exclusive(self, name: str, *, timeout_s: float | None = None, warn_after_s: float = 30.0) -> Iterator[None]:
        """Be the only one, of all processes, to work on what the record ``name`` will say.

        Read the record again inside: another process may have written it meanwhile. Ends with the process, and
        excludes only the threads of this one where the cache cannot be written. Raises as ``reserve`` does.
        """
        lock_id = lock_id_of(PurePosixPath(self._layout.record(name).relative_to(self.root).as_posix()))
        with self._locks.hold(lock_id, name, timeout_s, warn_after_s):
            yield

    def entries(self) -> list[Entry]:
        """Every entry with a readable manifest. Their files are not checked: ``verify`` does that."""
        found: list[Entry] = []
        for path in self._layout.entry_paths():
            with suppress(CacheError, OSError):
                found.append(Entry(path=self.root / path, manifest=read_manifest(self.root / path)))
        return found

    def records(self, under: str = "") -> list[str]:
        """The names of all records on disk, or of those in one folder, given as ``aitune/v1/<under>``."""
        return sorted(self._layout.record_names(under))

    def size(self) -> int:
        """Bytes of all entries, records and quarantined remains."""
        return total_size(self._layout)

    def gc(self, max_bytes: int | None = None) -> Collected:
        """Remove quarantined remains, then entries unused the longest, down to ``max_bytes``.

        Without a number, down to the ``max_bytes`` of the store.
        """
        limit = self._max_bytes if max_bytes is None else max_bytes
        if limit is None:
            raise CacheError("gc needs a size: this store was made without max_bytes, and none was given")
        return collect(self._layout, limit)

    def verify(self) -> list[Problem]:
        """Read every entry and record in full; returns what is wrong and changes nothing."""
        problems = [
            Problem(path=str(path), reason=reason)
            for path in self._layout.entry_paths()
            if (reason := entry_problem(self._layout, path))
        ]
        for name in self.records():
            if reason := self._records.problem(name):
                problems.append(Problem(path=f"aitune/v1/{name}", reason=reason))
        return problems

    def clear(self) -> Collected:
        """Remove all entries, records and remains, but for what is being built; forget what was rejected."""
        return clear(self._layout)

    def sweep(self) -> int:
        """Remove what killed builders left behind; returns how many. ``reserve`` and ``gc`` sweep too."""
        return sweep(self._layout)

    def evict(self, entry: Entry, reason: str) -> None:
        """Set an entry aside that proved wrong in use, unless another one has taken its place meanwhile.

        One that came from somewhere else counts as rejected, so that it is not fetched again.
        """
        key = entry.manifest.key
        self._private.pop(key.digest, None)
        path = self.root / key.entry_path
        with suppress(CacheError, OSError):
            if read_manifest(path) == entry.manifest:
                quarantine(self._layout, path, reason)
                if "admitted" in entry.manifest.provenance:
                    self._rejections.remember(entry.manifest.content_digest, reason)

    def reject(self, slot: Slot, manifest: Manifest, reason: str) -> None:
        """Set aside what lies in a slot's work directory, and remember that these files failed here."""
        self._rejections.remember(manifest.content_digest, reason)
        with suppress(OSError, ValueError):  # a work directory outside the cache just goes with its slot
            quarantine(self._layout, slot.workdir, reason)

    def rejection(self, manifest: Manifest) -> str | None:
        """Why an entry with this key and these files was rejected earlier; None if it was not."""
        return self._rejections.reason(manifest.content_digest)

    def _find(self, key: EngineKey, *, lock_held: bool) -> Entry | Miss:
        if entry := self._private.get(key.digest):
            with suppress(CacheError, OSError):
                verify_entry(entry.path, self._memo)
                return entry
            self._private.pop(key.digest, None)
        path = self.root / key.entry_path
        try:
            manifest = self._verified(key)
        except (FileNotFoundError, NotADirectoryError):
            return explain_absence(self._layout, key)
        except CacheError as error:
            return self._set_aside(key, str(error)) if lock_held else self._second_look(key, str(error))
        except OSError as error:
            return Miss(kind="unreadable", reason=f"unreadable: {error.strerror or error}")
        with suppress(OSError):
            os.utime(path)  # the folder's own time is the time of its last use
        return Entry(path=path, manifest=manifest)

    def _verified(self, key: EngineKey) -> Manifest:
        manifest = verify_entry(self.root / key.entry_path, self._memo)
        if manifest.key != key:
            raise CorruptEntryError(f"its manifest belongs to another engine: {key.difference(manifest.key)}")
        return manifest

    def _second_look(self, key: EngineKey, reason: str) -> Entry | Miss:
        """Check a damaged entry again under its lock: it may have been replaced while it was read.

        Whoever holds the lock now is rebuilding or evicting it: a few more looks may find it right, or gone.
        """
        lock = KeyLock(self._layout.locks, lock_id_of(key.entry_path))
        for _ in range(_SECOND_LOOKS):
            try:
                free = lock.try_acquire()
            except OSError as error:
                outcome = f"left in place: {error.strerror or error}"
                return Miss(kind="corrupt", reason=f"corrupt: {reason} ({outcome})")
            if free:
                try:
                    return self._find(key, lock_held=True)
                finally:
                    lock.release()
            time.sleep(_SECOND_LOOK_AFTER_S)
            try:
                return Entry(path=self.root / key.entry_path, manifest=self._verified(key))
            except FileNotFoundError:
                return explain_absence(self._layout, key)
            except (CacheError, OSError) as error:
                reason = str(error)
        return Miss(kind="corrupt", reason=f"corrupt: {reason} (being rebuilt)")

    def _set_aside(self, key: EngineKey, reason: str) -> Miss:
        path = self.root / key.entry_path
        try:
            moved = quarantine(self._layout, path, reason)
        except OSError as error:
            outcome = f"left in place: {error.strerror or error}"
        else:
            outcome = "quarantined" if moved else "gone since"
        logger.warning("Cache entry %s is damaged and is not used (%s): %s", path, outcome, reason)
        return Miss(kind="corrupt", reason=f"corrupt: {reason} ({outcome})")

    def _new_workdir(self, key: EngineKey) -> Path | None:
        """A work directory, made with the key's lock held; None where the cache cannot be written."""
        lock_id = lock_id_of(key.entry_path)
        if not self._swept:
            self._swept = True
            sweep(self._layout)
        sweep_key(self._layout, lock_id)
        path = self._layout.new_temporary(lock_id)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            self._state.degrade(error)
            return None
        return path

    def _slot(self, key: EngineKey, found: Entry | Miss, workdir: Path | None) -> Slot:
        return Slot(
            key=key,
            found=found,
            target=self.root / key.entry_path,
            state=self._state,
            workdir=workdir,
            resolve=lambda: self._find(key, lock_held=True),
        )

    def _settle(self, slot: Slot) -> None:
        slot.close()
        if slot.entry is None:
            return
        if slot.is_private:
            self._private[slot.key.digest] = slot.entry
        elif self._max_bytes is not None:
            collect(self._layout, self._max_bytes, keep=[PurePosixPath(slot.key.entry_path)])
