"""Letting an entry of somebody else's cache into the one of this machine, or not, and why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aitune_hf.cache.entry import Entry
from aitune_hf.cache.key import EngineKey
from aitune_hf.cache.manifest import Manifest
from aitune_hf.cache.store import LocalStore
from aitune_hf.hub.trust import Policy, Source, Trust

__all__ = ["Admitted", "RefusalKind", "Refused", "admit"]

RefusalKind = Literal["untrusted", "damaged", "malformed", "foreign", "crashed"]


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """An entry that lies in the local store now."""

    entry: Entry
    policy: Policy | Literal["data", "present"]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why an entry was not let in: ``kind`` to count by, ``reason`` to read; it names the file."""

    kind: RefusalKind
    reason: str


def admit(
    folder: Path,
    expected: EngineKey,
    *,
    manifest_sha256: str | None,
    source: Source,
    trust: Trust,
    store: LocalStore,
    trial: Callable[[Path, Manifest], None] | None = None,
) -> Admitted | Refused:
    """Check the entry in ``folder`` and put it into ``store``."""
    raise NotImplementedError
