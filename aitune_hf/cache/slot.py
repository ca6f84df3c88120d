"""The place where one builder makes one engine: a work directory that becomes an entry whole, or vanishes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from aitune_hf.cache.atomic import move_whole, sync_directory, write_durably
from aitune_hf.cache.digests import digest_of
from aitune_hf.cache.entry import Entry, Miss
from aitune_hf.cache.key import EngineKey
from aitune_hf.cache.manifest import MANIFEST_NAME, FileDigest, Manifest, check_file_names
from aitune_hf.cache.writable import WritableState
from aitune_hf.errors import CacheError, CorruptEntryError

__all__ = ["Slot"]


class Slot:
    """What ``LocalStore.reserve`` hands out: the ``entry`` that exists, or a ``workdir`` to build it in.

    ``miss`` says why there was no entry. ``write`` and ``add`` put files into ``workdir`` and move it
    elsewhere when the disk is full; files written into ``workdir`` directly are taken too. Nothing is kept
    without ``commit``.
    """

    def __init__(
        self,
        *,
        key: EngineKey,
        found: Entry | Miss,
        target: Path,
        state: WritableState,
        workdir: Path | None,
        resolve: Callable[[], Entry | Miss],
    ) -> None:
        self.key = key
        self.entry: Entry | None = found if isinstance(found, Entry) else None
        self.miss: Miss | None = found if isinstance(found, Miss) else None
        self.is_private = False
        self._target = target
        self._state = state
        self._workdir = workdir
        self._resolve = resolve
        if self.entry is None and workdir is None:
            self._workdir, self.is_private = state.private_directory(), True

    @property
    def workdir(self) -> Path:
        """The folder to build in. Raises ``CacheError`` when the entry exists already, or was committed."""
        if self.entry is not None or self._workdir is None:
            raise CacheError(f"{self._target}: there is nothing to build here; use the slot's entry")
        return self._workdir

    def write(self, name: str, data: bytes) -> None:
        """Put a file with these bytes into the entry."""
        self.put(name, lambda path: path.write_bytes(data))

    def add(self, name: str, source: Path) -> None:
        """Put a copy of ``source`` into the entry."""
        if not source.is_file():
            raise CacheError(f"{source} is no file: it cannot be added to the engine's entry as {name}")
        self.put(name, lambda path: shutil.copyfile(source, path))

    def put(self, name: str, fill: Callable[[Path], object]) -> None:
        """Put a file into the entry that ``fill`` makes at a path.

        An ``OSError`` of it means that the disk does not take the file: it is called once more, for another disk.
        """
        check_file_names([name])
        try:
            fill(self.workdir / name)
        except OSError as error:
            if self.is_private:
                raise CacheError(f"{self.workdir / name} cannot be written ({error.strerror or error})") from error
            self._state.degrade(error)
            with suppress(OSError):
                (self.workdir / name).unlink(missing_ok=True)
            self._retreat()
            self.put(name, fill)

    def commit(
        self,
        *,
        engine: Mapping[str, object],
        results: Mapping[str, object] | None = None,
        provenance: Mapping[str, object] | None = None,
        factors: Mapping[str, object] | None = None,
        files: Mapping[str, FileDigest] | None = None,
    ) -> Entry:
        """Make an entry of the work directory, and return it.

        When another builder, by some way around the lock, finished first, theirs is returned. Where the cache
        cannot be written the entry lives in a temporary directory until this process ends. Raises
        ``CacheError`` for a work directory that holds folders, links or odd names, and ``CorruptEntryError``
        for one that does not hold exactly ``files``, if given.
        """
        found = self._digest_files()
        if files is not None and found != files:
            changed = sorted(name for name in {*found, *files} if found.get(name) != files.get(name))
            raise CorruptEntryError(f"{changed[0]} is not what it should be; it was changed after it was checked")
        manifest = Manifest(
            key=self.key,
            files=found,
            engine=engine,
            results=results or {},
            provenance={"created": datetime.now(timezone.utc).strftime("%Y-%m-%d"), **(provenance or {})},
            factors=factors or {},
        )
        data = manifest.to_bytes()
        manifest = Manifest.from_bytes(data)  # what a reader will see, and a proof that it can
        try:
            self.entry = self._publish(data, manifest)
        except OSError as error:
            self._state.degrade(error)
            self._retreat()
            self.entry = self._finish_privately(data, manifest)
        return self.entry

    def close(self) -> None:
        """Remove the work directory if it did not become an entry."""
        if self._workdir is not None and (self.entry is None or self.entry.path != self._workdir):
            shutil.rmtree(self._workdir, ignore_errors=True)
        self._workdir = None

    def _publish(self, data: bytes, manifest: Manifest) -> Entry:
        if self.is_private:
            return self._finish_privately(data, manifest)
        workdir = self.workdir
        for name in manifest.files:
            _sync_file(workdir / name)
        write_durably(workdir / MANIFEST_NAME, data)
        sync_directory(workdir)
        if not move_whole(workdir, self._target):
            winner = self._resolve()  # sets a damaged one aside
            if isinstance(winner, Entry):
                return winner
            if not move_whole(workdir, self._target):
                raise FileExistsError(f"{self._target} is in the way: {winner.reason}")
        return Entry(path=self._target, manifest=manifest)

    def _finish_privately(self, data: bytes, manifest: Manifest) -> Entry:
        path = self.workdir
        try:
            (path / MANIFEST_NAME).unlink(missing_ok=True)
            write_durably(path / MANIFEST_NAME, data)
        except OSError as error:
            raise CacheError(
                f"{path}: the engine cannot be written there ({error.strerror or error}); free some room"
            ) from error
        return Entry(path=path, manifest=manifest)

    def _digest_files(self) -> dict[str, FileDigest]:
        workdir = self.workdir
        try:
            names = sorted(item.name for item in workdir.iterdir())
            check_file_names(names)
            return {name: digest_of(workdir / name) for name in names}
        except OSError as error:
            raise CacheError(
                f"{workdir}: the engine's files cannot be read back ({error.strerror or error})"
            ) from error

    def _retreat(self) -> None:
        """Carry on in a private directory, with the files made so far."""
        old = self.workdir
        new = self._state.private_directory()
        try:
            shutil.copytree(old, new, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise CacheError(f"{old}: the engine's files can be neither kept nor moved to {new} ({error})") from error
        shutil.rmtree(old, ignore_errors=True)
        self._workdir, self.is_private = new, True


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
