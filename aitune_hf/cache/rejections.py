"""Remembering which foreign entries failed on this machine, so that none is tried a second time."""

from __future__ import annotations

import json
import time

from aitune_hf.cache.atomic import write_whole
from aitune_hf.cache.digests import open_regular
from aitune_hf.cache.layout import Layout
from aitune_hf.cache.writable import WritableState
from aitune_hf.errors import CacheError

__all__ = ["Rejections"]

_LIMIT = 16 * 1024


class Rejections:
    """Reasons by the digest of what failed. They stay when quarantined remains are collected."""

    def __init__(self, layout: Layout, state: WritableState) -> None:
        self._layout = layout
        self._state = state
        self._unwritten: dict[str, str] = {}

    def reason(self, digest: str) -> str | None:
        """Why the entry with this content digest was rejected; None if it was not."""
        if digest in self._unwritten:
            return self._unwritten[digest]
        try:
            with open_regular(self._layout.rejected / f"{digest}.json") as file:
                return str(json.loads(file.read(_LIMIT))["reason"])
        except OSError:
            return None
        except (CacheError, ValueError, KeyError, TypeError):  # the note is damaged, its name still says enough
            return "the reason can no longer be read"

    def remember(self, digest: str, reason: str) -> None:
        """Note a failure; where the cache cannot be written, for this process alone."""
        note = json.dumps({"reason": reason[: _LIMIT // 8], "time": int(time.time())})
        path = self._layout.rejected / f"{digest}.json"
        try:
            write_whole(path, note.encode(), staging=self._layout.new_temporary("record"))
        except OSError as error:
            self._state.degrade(error)
            self._unwritten[digest] = reason
