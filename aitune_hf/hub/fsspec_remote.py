"""Any file system that fsspec knows as a remote: a shared folder, a bucket, memory.

It has no commits. Files of engines are written first and what names them last, each under a temporary name that is then
moved, so that a reader never finds half of anything. What others change too (records, the card) is written under a lock
where the file system is this machine's, and looked at again after it was written elsewhere.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from filelock import FileLock

from aitune_hf.cache import FileDigest
from aitune_hf.errors import ConfigError
from aitune_hf.hub.remote import Addition, Head, Landed, Reading, RemoteConflictError, RemoteError, redacted

__all__ = ["FsspecRemote"]

T = TypeVar("T")
_CHUNK = 1 << 20
_LOCK_NAME = ".aitune-hf.lock"


class FsspecRemote:
    """A folder behind an fsspec URL. Credentials come from where its file system looks for them."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{redacted(url)}: {error}") from error
        self._root = str(root).rstrip("/")
        self._url = redacted(url)
        protocol = self._fs.protocol
        self._is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)
        self._guard = threading.Lock()

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self._url

    def head(self, revision: str | None = None) -> Head | None:
        """See :class:`~aitune_hf.hub.remote.Remote`. There is one state only, and it is always there."""
        self._refuse(revision)
        return Head(commit="")

    def create(self, *, revision: str | None, private: bool | None) -> None:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._refuse(revision)

    def read(self, path: str, *, revision: str | None, max_bytes: int, local_only: bool = False) -> Reading:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._refuse(revision)
        self._reach(local_only)
        data = self._try(f"read {path}", lambda: self._bytes(path, max_bytes))
        return Reading(data=data, commit="")

    def names(self, prefix: str, *, revision: str | None) -> list[str]:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        self._refuse(revision)

        def find() -> list[str]:
            start = f"{self._root}/{prefix}"
            return sorted(str(found).removeprefix(f"{self._root}/") for found in self._fs.find(start))

        return self._try(f"list {prefix}", find)

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
        listed = list(additions)
        for each in listed:
            if each.replaces is None:
                self._try(f"write {each.path}", partial(self._write, each))
        shared = [each for each in listed if each.replaces is not None]
        with self._alone():
            for each in shared:
                expected = each.replaces or b""
                if self._try(f"read {each.path}", partial(self._start, each.path, len(expected) + 1)) != expected:
                    raise RemoteConflictError(f"{self.url}: {each.path} was changed by somebody else meanwhile")
            for each in shared:
                self._try(f"write {each.path}", partial(self._write, each))
        return Landed(commit="", url=self.url)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _start(self, path: str, limit: int) -> bytes:
        place = f"{self._root}/{path}"
        if not self._fs.exists(place):
            return b""
        with self._fs.open(place, "rb") as file:
            return bytes(file.read(limit))

    def _bytes(self, path: str, max_bytes: int) -> bytes | None:
        try:
            with self._fs.open(f"{self._root}/{path}", "rb") as file:
                data = bytes(file.read(max_bytes + 1))
        except FileNotFoundError:
            return None
        if len(data) > max_bytes:
            raise RemoteError(f"{self.url}: {path} is larger than the {max_bytes} bytes expected", "broken")
        return data

    def _fetch_one(self, path: str, expected: FileDigest, folder: Path) -> None:
        hasher, size = hashlib.sha256(), 0
        target = folder / PurePosixPath(path).name
        with self._fs.open(f"{self._root}/{path}", "rb") as file, target.open("wb") as out:
            while size <= expected.size and (chunk := file.read(_CHUNK)):
                hasher.update(chunk)
                size += len(chunk)
                out.write(chunk)
        if (hasher.hexdigest(), size) != (expected.sha256, expected.size):
            target.unlink(missing_ok=True)
            raise RemoteError(f"{self.url}: {path} has other bytes than its record says", "broken")

    def _write(self, addition: Addition) -> None:
        target = f"{self._root}/{addition.path}"
        staged = f"{target}.{secrets.token_hex(8)}.tmp"
        self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
        try:
            with self._fs.open(staged, "wb") as out:
                if isinstance(addition.source, bytes):
                    out.write(addition.source)
                else:
                    with addition.source.open("rb") as file:
                        while chunk := file.read(_CHUNK):
                            out.write(chunk)
            self._fs.mv(staged, target)
        except BaseException:
            if self._fs.exists(staged):
                self._fs.rm(staged)
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock: AbstractContextManager[Any] = nullcontext()
        if self._is_local:
            self._fs.makedirs(self._root, exist_ok=True)
            lock = FileLock(Path(self._root) / _LOCK_NAME)
        with self._guard, lock:
            yield

    def _try(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except RemoteError:
            raise
        except PermissionError as error:
            raise RemoteError(f"{self.url}: no permission to {what}", "denied") from error
        except FileNotFoundError as error:
            raise RemoteError(f"{self.url}: cannot {what}: it is not there", "absent") from error
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RemoteError(f"{self.url}: cannot {what}: {line}", "unreachable") from error

    def _reach(self, local_only: bool) -> None:
        if local_only and not self._is_local:
            raise RemoteError(f"{self.url} is not on this machine (local_files_only)", "offline")

    def _refuse(self, revision: str | None) -> None:
        if revision is not None:
            raise ConfigError(f"{self.url} keeps no history, so it has no revision {revision!r}: leave revision out")
