"""What happens to a cache that cannot be written: engines still work, for this process alone."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

from aitune_hf.errors import CacheError

__all__ = ["WritableState"]

logger = logging.getLogger(__name__)
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


class WritableState:
    """Whether a cache root takes writes, the one warning when not, and the private place used instead."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._private_root: tuple[int, Path] | None = None
        self._guard = threading.Lock()
        self.reason: str | None = None

    def degrade(self, error: OSError) -> None:
        """Note that a write failed. Warns the first time; later writes are tried all the same."""
        with self._guard:
            first, self.reason = self.reason is None, error.strerror or str(error)
        if first:
            advice = "free some room there (LocalStore.gc)" if error.errno in _FULL else "make that directory writable"
            logger.warning(
                "The engine cache %s cannot be written: %s. Engines built from now on live in a temporary "
                "directory until this process ends, and the next process builds them again. To keep them, %s "
                "or point AITUNE_HF_CACHE elsewhere.",
                self._root,
                self.reason,
                advice,
            )

    def private_directory(self) -> Path:
        """A new folder that goes when this process ends. Raises ``CacheError`` when there is no room."""
        try:
            with self._guard:
                if self._private_root is None or self._private_root[0] != os.getpid():
                    self._private_root = os.getpid(), Path(tempfile.mkdtemp(prefix="aitune-hf-"))
                    atexit.register(_remove_at_exit, *self._private_root)
                return Path(tempfile.mkdtemp(dir=self._private_root[1]))
        except OSError as error:
            raise CacheError(
                f"neither the engine cache {self._root} nor the temporary directory "
                f"{tempfile.gettempdir()} can be written: {error.strerror or error}. Point AITUNE_HF_CACHE "
                "or TMPDIR to a writable directory."
            ) from error


def _remove_at_exit(pid: int, path: Path) -> None:
    if os.getpid() == pid:  # a forked child leaves its parent's engines alone
        shutil.rmtree(path, ignore_errors=True)
