"""Small JSON records beside the entries: what was tuned for a pipeline, which candidate won a graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from aitune_hf.cache.atomic import write_whole
from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.cache.digests import open_regular
from aitune_hf.cache.layout import Layout
from aitune_hf.cache.quarantine import quarantine
from aitune_hf.cache.sealed import seal, unseal
from aitune_hf.cache.writable import WritableState
from aitune_hf.errors import CacheError, ConfigError

__all__ = ["Records"]

logger = logging.getLogger(__name__)


class Records:
    """The records of one store. The last writer wins; a damaged record is set aside and counts as missing."""

    def __init__(self, layout: Layout, state: WritableState) -> None:
        self._layout = layout
        self._state = state
        self._unwritten: dict[str, bytes] = {}

    def read(self, name: str) -> dict[str, object] | None:
        """The record of this name, or None. Raises ``ConfigError`` for a name that is not a relative path."""
        path = self._layout.record(name)
        data = self._unwritten.get(name)
        try:
            if data is None:
                with open_regular(path) as file:
                    data = file.read(MAX_JSON_BYTES + 1)
            return unseal(name, data)
        except OSError:
            return None
        except CacheError as error:
            logger.warning("Record %s is damaged and is ignored: %s", path, error)
            with suppress(OSError):
                quarantine(self._layout, path, str(error))
            return None

    def write(self, name: str, body: Mapping[str, object]) -> None:
        """Write a record whole. Where the cache cannot be written it is kept for this process.

        Raises ``ConfigError`` for a bad name or a body without JSON form.
        """
        path = self._layout.record(name)
        try:
            data = seal(name, body)
        except CacheError as error:
            raise ConfigError(f"record {name}: {error}") from error
        try:
            write_whole(path, data, staging=self._layout.new_temporary("record"))
            self._unwritten.pop(name, None)
        except OSError as error:
            self._state.degrade(error)
            self._unwritten[name] = data

    def problem(self, name: str) -> str | None:
        """What is wrong with a record on disk, if anything."""
        try:
            with open_regular(self._layout.record(name)) as file:
                unseal(name, file.read(MAX_JSON_BYTES + 1))
        except FileNotFoundError:
            return None
        except (OSError, CacheError, ConfigError) as error:
            return str(error)
        return None
