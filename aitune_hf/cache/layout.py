"""Where everything lies below a cache root.

::

    <root>/aitune/v1/…          entries and records: exactly what a Hub repo holds
    <root>/aitune/locks/        one empty lock file per key ever built; kept, since removing one is a race
    <root>/aitune/tmp/          work directories of builders at work
    <root>/aitune/quarantine/   damaged entries, each with the reason
    <root>/aitune/rejected/     one file for each foreign entry that is not to be tried again
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from aitune_hf.cache.key import LAYOUT, EngineKey
from aitune_hf.cache.manifest import MANIFEST_NAME
from aitune_hf.errors import ConfigError

__all__ = ["Layout", "default_cache_dir", "lock_id_of", "machine_id"]

_ENTRY_DEPTH = 5
_RECORD_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,127}/){0,7}[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.json")
_TEMPORARY_NAME = re.compile(r"([a-z0-9]{1,32})-([0-9a-f]{8})-([0-9a-f]{16})")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The paths of one cache root. Creates nothing."""

    root: Path

    @property
    def base(self) -> Path:
        """What this package owns below the root."""
        return self.root / "aitune"

    @property
    def shared(self) -> Path:
        """Entries and records: what is worth sharing."""
        return self.root / LAYOUT

    @property
    def locks(self) -> Path:
        """The lock files."""
        return self.base / "locks"

    @property
    def temporary(self) -> Path:
        """Work directories of builders, staged records, entries on their way out."""
        return self.base / "tmp"

    @property
    def quarantine(self) -> Path:
        """Damaged entries and records."""
        return self.base / "quarantine"

    @property
    def rejected(self) -> Path:
        """What is known of foreign entries that failed here."""
        return self.base / "rejected"

    def record(self, name: str) -> Path:
        """The file of a record. Raises ``ConfigError`` unless ``name`` is a relative path in ``.json``."""
        if not _RECORD_NAME.fullmatch(name) or name.rsplit("/", 1)[-1] == MANIFEST_NAME:
            raise ConfigError(f"record name {name!r}: expected a relative path such as 'pipelines/<hash>.json'")
        return self.shared / name

    def new_temporary(self, purpose: str) -> Path:
        """A fresh name in the temporary folder. ``purpose``: a lock id, or a word of lower-case letters."""
        return self.temporary / f"{purpose}-{machine_id()}-{secrets.token_hex(8)}"

    def temporaries(self) -> Iterator[tuple[Path, str, bool]]:
        """Everything in the temporary folder: path, purpose, whether this machine made it."""
        for path in _children(self.temporary):
            if match := _TEMPORARY_NAME.fullmatch(path.name):
                yield path, match[1], match[2] == machine_id()

    def neighbours(self, key: EngineKey) -> list[Path]:
        """The entries that share module and call form with ``key``, those of its own environment first."""
        found = list(_descend(self.root / key.graph_path, 2))
        return sorted(found, key=lambda path: (path.parent.name != key.environment.tag, path))

    def entry_paths(self) -> Iterator[PurePosixPath]:
        """Every entry on disk, damaged or not, as ``EngineKey.entry_path``."""
        for path in _descend(self.shared, _ENTRY_DEPTH):
            yield PurePosixPath(path.relative_to(self.root).as_posix())

    def record_names(self, under: str = "") -> Iterator[str]:
        """Every record on disk below ``under``: the ``.json`` files that lie outside of entries."""
        start = PurePosixPath(under)
        pending = [(self.shared / start, len(start.parts))]
        while pending:
            folder, depth = pending.pop()
            for path in _children(folder):
                if path.is_dir() and not path.is_symlink():
                    if depth + 1 < _ENTRY_DEPTH:
                        pending.append((path, depth + 1))
                elif path.suffix == ".json":
                    yield path.relative_to(self.shared).as_posix()


def default_cache_dir(env: Mapping[str, str]) -> Path:
    """``$AITUNE_HF_CACHE``, else ``$HF_HOME/aitune``, else the same below ``~/.cache/huggingface``.

    ``$XDG_CACHE_HOME`` takes the place of ``~/.cache``, as it does for ``HF_HOME``.
    """
    if own := env.get("AITUNE_HF_CACHE"):
        return Path(own).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "aitune"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "aitune"


def lock_id_of(entry_path: PurePosixPath) -> str:
    """The lock that guards an entry: 32 hex digits of its path's SHA-256."""
    return hashlib.sha256(entry_path.as_posix().encode()).hexdigest()[:32]


def machine_id() -> str:
    """8 hex digits that tell machines sharing a folder apart, without their names."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _children(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as found:
        return sorted(folder / item.name for item in found)
    return []


def _descend(folder: Path, depth: int) -> Iterator[Path]:
    for path in _children(folder):
        if path.is_symlink() or not path.is_dir():
            continue
        if depth == 1:
            yield path
        else:
            yield from _descend(path, depth - 1)
