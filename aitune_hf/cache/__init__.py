"""The engine cache: what an engine is keyed by, how it is stored, and how it is found again."""

from aitune_hf.cache.canonical import canonical_json
from aitune_hf.cache.entry import Entry, Miss, MissKind
from aitune_hf.cache.environment import Environment
from aitune_hf.cache.key import EngineKey
from aitune_hf.cache.layout import default_cache_dir
from aitune_hf.cache.locking import KeyLockedError
from aitune_hf.cache.manifest import FileDigest, Manifest, UnknownSchemaError
from aitune_hf.cache.slot import Slot
from aitune_hf.cache.store import LocalStore
from aitune_hf.cache.upkeep import Collected, Problem

__all__ = [
    "Collected",
    "EngineKey",
    "Entry",
    "Environment",
    "FileDigest",
    "KeyLockedError",
    "LocalStore",
    "Manifest",
    "Miss",
    "MissKind",
    "Problem",
    "Slot",
    "UnknownSchemaError",
    "canonical_json",
    "default_cache_dir",
]
