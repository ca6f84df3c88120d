"""What an entry of the cache says about itself, and the strict reading of it.

A manifest may come from anywhere: parsing one never executes, imports or opens what it names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aitune_hf.cache.canonical import canonical_json
from aitune_hf.cache.fields import exact_fields, object_field, text_field, whole_number
from aitune_hf.cache.key import EngineKey
from aitune_hf.cache.sealed import seal, unseal
from aitune_hf.errors import CorruptEntryError

__all__ = ["MANIFEST_NAME", "SCHEMA", "FileDigest", "Manifest", "UnknownSchemaError", "check_file_names"]

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
_MAX_FILES = 256
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}[A-Za-z0-9_-]|[A-Za-z0-9]")
#: Names that mean a device on some systems, whatever follows the first dot.
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))})
_FIELDS = ("schema", "key", "files", "engine", "results", "provenance", "factors")


class UnknownSchemaError(CorruptEntryError):
    """A manifest is intact but written for another version of the cache's format."""


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """SHA-256 (lower-case hex) and size in bytes of one file."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``.

    ``files``: every file of the entry but the manifest itself. ``engine``: owned by the backend (constants
    schema, verified envelope, output structure). ``results``: correctness and timing. ``provenance``: who
    built it, without host names or paths. ``factors``: raw hierarchy and graph factors, from which a miss can
    be explained.
    """

    key: EngineKey
    files: Mapping[str, FileDigest]
    engine: Mapping[str, object] = field(default_factory=dict)
    results: Mapping[str, object] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)
    factors: Mapping[str, object] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def size(self) -> int:
        """Bytes of the entry's files, without the manifest."""
        return sum(digest.size for digest in self.files.values())

    @property
    def content_digest(self) -> str:
        """SHA-256 over what is loaded and for what: key and files, whatever else the manifest says."""
        content = {"key": self.key.to_dict(), "files": self.to_dict()["files"]}
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """The manifest as JSON."""
        return {
            "schema": self.schema,
            "key": self.key.to_dict(),
            "files": {name: {"sha256": each.sha256, "size": each.size} for name, each in self.files.items()},
            "engine": dict(self.engine),
            "results": dict(self.results),
            "provenance": dict(self.provenance),
            "factors": dict(self.factors),
        }

    @classmethod
    def from_dict(cls, data: object) -> Manifest:
        """The manifest ``to_dict`` wrote.

        Raises ``UnknownSchemaError`` for another version of the format, ``CacheError`` for anything
        malformed.
        """
        if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
            raise UnknownSchemaError(
                f"manifest of schema {str(data['schema'])[:20]}, this version reads schema {SCHEMA}: "
                "use the aitune_hf version that wrote it, or tune again"
            )
        record = exact_fields(data, _FIELDS, "manifest")
        return cls(
            schema=whole_number(record, "schema"),
            key=EngineKey.from_dict(record["key"]),
            files=_parse_files(object_field(record, "files")),
            engine=object_field(record, "engine"),
            results=object_field(record, "results"),
            provenance=object_field(record, "provenance"),
            factors=object_field(record, "factors"),
        )

    def to_bytes(self) -> bytes:
        """The bytes of ``manifest.json``."""
        return seal("manifest", self.to_dict())

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The manifest in these bytes. Raises as ``from_dict`` does, and for a wrong digest."""
        return cls.from_dict(unseal("manifest", data))


def check_file_names(names: Iterable[str]) -> None:
    """Raise ``CorruptEntryError`` unless these are plain names that stay apart on every file system."""
    seen: set[str] = {MANIFEST_NAME}
    for count, name in enumerate(names, start=1):
        if not _FILE_NAME.fullmatch(name):
            raise CorruptEntryError(f"file name {name[:80]!r}: names of letters, digits and . _ - only")
        if name.lower() in seen or name.lower().partition(".")[0] in _DEVICES:
            raise CorruptEntryError(f"file name {name!r} is reserved, or differs from another by case alone")
        if count > _MAX_FILES:
            raise CorruptEntryError(f"more than {_MAX_FILES} files in one entry")
        seen.add(name.lower())


def _parse_files(data: Mapping[str, object]) -> dict[str, FileDigest]:
    check_file_names(data)
    files: dict[str, FileDigest] = {}
    for name, value in data.items():
        try:
            record = exact_fields(value, ("sha256", "size"), name)
            files[name] = FileDigest(
                sha256=text_field(record, "sha256", "[0-9a-f]{64}"), size=whole_number(record, "size")
            )
        except CorruptEntryError as error:
            raise CorruptEntryError(f"manifest, file {name}: {error}") from error
    return files
