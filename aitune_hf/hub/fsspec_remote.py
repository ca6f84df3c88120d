"""Any file system that fsspec knows as a remote: a shared folder, a bucket, memory.

It has no commits. Files of engines are written first and what names them last, so that a reader never finds half of
anything. On this machine's file system all of a push happens under one lock, and each file appears by a move. Elsewhere
there is no lock: an engine's file is made only where there is none (nobody's bytes are replaced), and what others change
too (records, the card) is compared right before it is written and looked at again afterwards, which narrows a race between
writers and does not exclude it.
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from aitune_hf.cache import FileDigest
from aitune_hf.cache.digests import open_regular
from aitune_hf.cache.manifest import MANIFEST_NAME
from aitune_hf.errors import ConfigError, CorruptEntryError
from aitune_hf.hub.remote import Addition, Head, Landed, Reading, RemoteConflictError, RemoteError, redacted

__all__ = ["FsspecRemote"]

T = TypeVar("T")
_CHUNK = 1 << 20
_LOCK_NAME = ".aitune-hf.lock"
#: How long to wait for another process that pushes.
_LOCK_S = 120.0


class FsspecRemote:
    """A folder behind an fsspec URL. Credentials come from where its file system looks for them."""

    pinned: str | None = None

    def __init__(self, url: str) -> None:
        from fsspec.registry import known_implementations, registry

        protocols = [part.partition("://")[0] for part in url.split("::")]
        unknown = [each for each in protocols if each not in known_implementations and each not in registry]
        if unknown:
            raise ConfigError(f"{redacted(url)}: fsspec knows no file system {unknown[0]!r}")
        self._where = url
        self._url = redacted(url)
        self._is_local = protocols in (["file"], ["local"])

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the folder in it. Making one may load libraries, look for credentials, or connect."""
        from fsspec.core import url_to_fs

        opened: tuple[Any, str] = self._try("open it", partial(url_to_fs, self._where))
        return opened

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return str(self._opened[1]).rstrip("/")

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self._url

    def head(self, revision: str | None = None) -> Head | None:
        """See :class:`~aitune_hf.hub.remote.Remote`. There is one state only, and it is always there."""
        self._refuse(revision)
        self._forget()
        return Head(commit="")

    def create(self, *, revision: str | None, private: bool | None) -> None:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._refuse(revision)

    def read(self, path: str, *, revision: str | None, max_bytes: int, local_only: bool = False) -> Reading:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._refuse(revision)
        self._reach(local_only)
        self._forget()
        data = self._try(f"read {path}", lambda: self._bytes(path, max_bytes))
        return Reading(data=data, commit="")

    def names(self, prefix: str, *, revision: str | None) -> list[str]:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._refuse(revision)

        def find() -> list[str]:
            start = f"{self._root}/{prefix}"
            return sorted(str(found).removeprefix(f"{self._root}/") for found in self._fs.find(start))

        return self._try(f"list {prefix}", find)

    def present(self, paths: Sequence[str], *, revision: str | None) -> set[str]:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._refuse(revision)
        return {path for path in paths if self._try(f"look for {path}", partial(self._fs.exists, self._place(path)))}

    def fetch(self, files: Mapping[str, FileDigest], *, commit: str, folder: Path, local_only: bool = False) -> None:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._reach(local_only)
        for path, expected in files.items():
            self._try(f"read {path}", partial(self._fetch_one, path, expected, folder))

    def commit(
        self,
        additions: Iterable[Addition],
        *,
        parent: Head,
        revision: str | None,
        message: str,
        create_pr: bool = False,
    ) -> Landed:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._refuse(revision)
        if create_pr:
            raise RemoteError(f"{self.url} has no pull requests: they are for repositories on the Hub", "broken")
        # What says that an engine is there comes after its files, and what lists engines after those.
        listed = sorted(additions, key=lambda each: (each.replaces is not None, each.path.endswith(MANIFEST_NAME)))
        shared = [each for each in listed if each.replaces is not None]
        with self._alone():
            self._compare(shared)
            for each in listed[: len(listed) - len(shared)]:
                self._try(f"write {each.path}", partial(self._add, each))
            if not self._is_local:
                self._compare(shared)
            for each in shared:
                self._try(f"write {each.path}", partial(self._write, each))
        return Landed(commit="", url=self.url)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _compare(self, shared: Iterable[Addition]) -> None:
        for each in shared:
            expected = each.replaces or b""
            if self._try(f"read {each.path}", partial(self._start, each.path, len(expected) + 1)) != expected:
                raise RemoteConflictError(f"{self.url}: {each.path} was changed by somebody else meanwhile")

    def _add(self, addition: Addition) -> None:
        """Write a file of an engine, unless it is there."""
        target = self._place(addition.path)
        if addition.force or not self._fs.exists(target):
            self._create(addition)
        elif not self._holds(target, addition.source):
            manifest = str(PurePosixPath(target).with_name(MANIFEST_NAME))
            if not self._is_local or self._fs.exists(manifest):
                raise RemoteConflictError(f"{self.url}: {addition.path} is there with other bytes")
            self._write(addition)  # With the lock held: what a push that was killed has left.

    def _holds(self, target: str, source: bytes | Path) -> bool:
        with self._reading(target) as file, _reader(source) as expected:
            while True:
                found, wanted = file.read(_CHUNK), expected.read(_CHUNK)
                if found != wanted:
                    return False
                if not wanted:
                    return True

    def _create(self, addition: Addition) -> None:
        if self._is_local or addition.force:
            self._write(addition)
            return
        target = self._place(addition.path)
        self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
        try:
            with self._fs.open(target, "xb") as out:
                self._pour(addition.source, out)
        except FileExistsError as error:
            raise RemoteConflictError(f"{self.url}: {addition.path} was made by somebody else meanwhile") from error
        except (NotImplementedError, ValueError):  # From file systems that cannot make a file only where there is none.
            self._write(addition)

    def _write(self, addition: Addition) -> None:
        target = self._place(addition.path)
        staged = f"{target}.{secrets.token_hex(8)}.tmp"
        self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
        try:
            with self._fs.open(staged, "wb") as out:
                self._pour(addition.source, out)
            self._fs.mv(staged, target)
        except BaseException:
            if self._fs.exists(staged):
                self._fs.rm(staged)
            raise

    def _pour(self, source: bytes | Path, out: Any) -> None:
        with _reader(source) as file:
            while chunk := file.read(_CHUNK):
                out.write(chunk)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock: AbstractContextManager[Any] = nullcontext()
        if self._is_local:
            self._try("write", lambda: self._fs.makedirs(self._root, exist_ok=True))
            lock = self._try("lock", lambda: self._locked(FileLock(Path(self._root) / _LOCK_NAME)))
        with lock:
            yield

    def _locked(self, lock: FileLock) -> AbstractContextManager[Any]:
        try:
            return lock.acquire(timeout=_LOCK_S)
        except Timeout as error:
            raise RemoteError(
                f"{self.url}: another process has been writing to it for {_LOCK_S:.0f} s; try again later",
                "unreachable",
            ) from error
        except NotImplementedError as error:  # From filelock, where the file system has none.
            raise RemoteError(
                f"{self.url}: its file system has no locks, so it cannot be written safely", "broken"
            ) from error

    # -- reading -------------------------------------------------------------------------------------------------------

    def _reading(self, place: str) -> Any:
        # A named pipe must not make the reader wait for a writer. Links are followed, as clients of the Hub make them.
        return open_regular(Path(place).resolve()) if self._is_local else self._fs.open(place, "rb")

    def _start(self, path: str, limit: int) -> bytes:
        place = self._place(path)
        if not self._fs.exists(place):
            return b""
        with self._reading(place) as file:
            return bytes(file.read(limit))

    def _bytes(self, path: str, max_bytes: int) -> bytes | None:
        try:
            with self._reading(self._place(path)) as file:
                data = bytes(file.read(max_bytes + 1))
        except FileNotFoundError:
            return None
        if len(data) > max_bytes:
            raise RemoteError(f"{self.url}: {path} is larger than the {max_bytes} bytes expected", "broken")
        return data

    def _fetch_one(self, path: str, expected: FileDigest, folder: Path) -> None:
        hasher, size = hashlib.sha256(), 0
        target = folder / PurePosixPath(path).name
        with self._reading(self._place(path)) as file, target.open("wb") as out:
            while size <= expected.size and (chunk := file.read(_CHUNK)):
                hasher.update(chunk)
                size += len(chunk)
                out.write(chunk)
        if (hasher.hexdigest(), size) != (expected.sha256, expected.size):
            target.unlink(missing_ok=True)
            raise RemoteError(f"{self.url}: {path} has other bytes than its record says", "broken")

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _try(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except RemoteError:
            raise
        except PermissionError as error:
            raise RemoteError(f"{self.url}: no permission to {what}", "denied") from error
        except FileNotFoundError as error:
            raise RemoteError(f"{self.url}: cannot {what}: it is not there", "absent") from error
        except CorruptEntryError as error:
            raise RemoteError(f"{self.url}: cannot {what}: {error}", "broken") from error
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RemoteError(f"{self.url}: cannot {what}: {line}", "unreachable") from error

    def _forget(self) -> None:
        """Look anew: clients of buckets remember listings and sizes for as long as the process lives."""
        self._try("read it", lambda: self._fs.invalidate_cache())

    def _reach(self, local_only: bool) -> None:
        if local_only and not self._is_local:
            raise RemoteError(f"{self.url} is not on this machine (local_files_only)", "offline")

    def _refuse(self, revision: str | None) -> None:
        if revision is not None:
            raise ConfigError(f"{self.url} keeps no history, so it has no revision {revision!r}: leave revision out")


def _reader(source: bytes | Path) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
