"""One lock per key, shared by every process that uses the cache folder.

The lock is the kernel's (``flock``): it ends with its owner, so a killed builder blocks nobody and no lock is
ever stale. Who holds it is written beside it, for messages only.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from aitune_hf.cache.writable import WritableState
from aitune_hf.errors import CacheError

__all__ = ["ExclusiveKeys", "KeyLock", "KeyLockedError"]

logger = logging.getLogger(__name__)
_OWNER_LIMIT = 4096


class KeyLockedError(CacheError):
    """Somebody else is building this key, for longer than the caller would wait."""


class KeyLock:
    """The lock of one key. Exclusive between processes and between threads; not re-entrant."""

    def __init__(self, folder: Path, lock_id: str) -> None:
        self.path = folder / f"{lock_id}.lock"
        self._owner_path = folder / f"{lock_id}.owner"
        self._lock = FileLock(self.path)
        self._pid = os.getpid()

    def try_acquire(self) -> bool:
        """Take the lock if it is free. Raises ``OSError`` when the folder cannot be written."""
        return self._attempt(0.0)

    def acquire(self, what: str, *, timeout_s: float | None = None, warn_after_s: float = 30.0) -> None:
        """Wait for the lock, saying who holds it every ``warn_after_s`` seconds.

        Raises ``KeyLockedError`` after ``timeout_s`` seconds (None: no limit), ``OSError`` when the folder
        cannot be written.
        """
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            left = warn_after_s if timeout_s is None else min(warn_after_s, max(0.0, timeout_s - waited))
            if self._attempt(left):
                self._write_owner(what)
                return
            waited = time.monotonic() - start
            if timeout_s is not None and waited >= timeout_s:
                raise KeyLockedError(
                    f"{what}: still being built by {self.holder()} after {waited:.0f} s. "
                    "Go on without this engine and look again later, or end that process."
                )
            logger.warning("%s: waiting for %s, which builds it (%.0f s so far)", what, self.holder(), waited)

    def release(self) -> None:
        """Give the lock up. Does nothing in a forked child, which never held it."""
        if os.getpid() != self._pid:
            return
        with suppress(OSError):
            self._owner_path.unlink(missing_ok=True)
        self._lock.release()

    def holder(self) -> str:
        """Who holds the lock, in words."""
        try:
            with self._owner_path.open("rb") as file:
                owner = json.loads(file.read(_OWNER_LIMIT))
            held = time.time() - float(owner["since"])
            return f"process {int(owner['pid'])} on {str(owner['host'])[:64]} (for {held:.0f} s)"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def _attempt(self, timeout_s: float) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=timeout_s)
        except Timeout:
            return False
        except NotImplementedError as error:  # From filelock, where the file system has none.
            raise OSError(errno.ENOSYS, "this file system has no locks") from error
        return True

    def _write_owner(self, what: str) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time(), "what": what}
        with suppress(OSError):
            self._owner_path.write_text(json.dumps(owner), encoding="utf-8")


class ExclusiveKeys:
    """The keys one store builds. Where the folder takes no locks, they exclude threads only."""

    def __init__(self, folder: Path, state: WritableState) -> None:
        self._folder = folder
        self._state = state
        self._thread_locks: dict[str, threading.Lock] = {}
        self._held: set[tuple[int, str]] = set()

    @contextmanager
    def hold(self, lock_id: str, what: str, timeout_s: float | None, warn_after_s: float) -> Iterator[None]:
        """Hold a key's lock. Raises as ``KeyLock.acquire``, and ``CacheError`` if this thread has it."""
        mine = (threading.get_ident(), lock_id)
        if mine in self._held:
            raise CacheError(f"{what}: this thread is building it already; use the slot it has")
        release = self._acquire(lock_id, what, timeout_s, warn_after_s)
        self._held.add(mine)
        try:
            yield
        finally:
            self._held.discard(mine)
            release()

    def _acquire(self, lock_id: str, what: str, timeout_s: float | None, warn_after_s: float) -> Callable[[], None]:
        lock = KeyLock(self._folder, lock_id)
        try:
            lock.acquire(what, timeout_s=timeout_s, warn_after_s=warn_after_s)
        except OSError as error:
            self._state.degrade(error)
            thread_lock = self._thread_locks.setdefault(lock_id, threading.Lock())
            if not thread_lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
                raise KeyLockedError(f"{what}: another thread still builds it after {timeout_s} s") from error
            return thread_lock.release
        return lock.release
