"""The key of an engine: what the module is, how it is called, where it is valid, how it was built."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import PurePosixPath

from aitune_hf.cache.canonical import canonical_json
from aitune_hf.cache.environment import Environment
from aitune_hf.cache.fields import exact_fields, object_field, optional_text, text_field
from aitune_hf.errors import CacheError, ConfigError

__all__ = ["LAYOUT", "EngineKey"]

LAYOUT = PurePosixPath("aitune/v1")
_BACKEND = r"[a-z0-9][a-z0-9_-]{0,47}"


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineKey:
    """One engine's identity, raw factors included.

    ``hierarchy_hash`` and ``weights_digest`` are lower-case SHA-256 hex, ``graph_key`` is lower-case hex of 8
    to 64 digits, ``options`` are JSON values. ``weights_digest`` is for baked engines only. Raises
    ``ConfigError`` otherwise.
    """

    hierarchy_hash: str
    graph_key: str
    environment: Environment
    backend: str
    backend_version: str
    options: Mapping[str, object]
    weights_digest: str | None = None

    def __post_init__(self) -> None:
        for name, pattern in (
            ("hierarchy_hash", "[0-9a-f]{64}"),
            ("graph_key", "[0-9a-f]{8,64}"),
            ("backend", _BACKEND),
            ("backend_version", r"[!-~]{1,128}"),
            ("weights_digest", "[0-9a-f]{64}"),
        ):
            value = getattr(self, name)
            if name == "weights_digest" and value is None:
                continue
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise ConfigError(f"engine key: {name}={value!r} does not have the form {pattern}")
        try:
            options = json.loads(canonical_json(self.options))
        except CacheError as error:
            raise ConfigError(f"engine key: options of backend {self.backend}: {error}") from error
        object.__setattr__(self, "options", options)  # a private copy, with tuples as the lists they are read back as

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, EngineKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every factor."""
        return hashlib.sha256(canonical_json(self.to_dict())).hexdigest()

    @cached_property
    def options8(self) -> str:
        """8 hex digits of SHA-256 over what the rest of the path leaves open: how it was built, and where."""
        factors = {
            "backend_version": self.backend_version,
            "environment": self.environment.to_dict(),
            "options": self.options,
            "weights_digest": self.weights_digest,
        }
        return hashlib.sha256(canonical_json(factors)).hexdigest()[:8]

    @property
    def graph_path(self) -> PurePosixPath:
        """The folder of all engines for this module and call form, whatever their environment."""
        return LAYOUT / self.hierarchy_hash[:2] / self.hierarchy_hash / self.graph_key

    @property
    def entry_path(self) -> PurePosixPath:
        """``aitune/v1/<hh[:2]>/<hh>/<graph>/<env-tag>/<backend>-<options8>``, in a cache or a Hub repo."""
        return self.graph_path / self.environment.tag / f"{self.backend}-{self.options8}"

    def difference(self, other: EngineKey) -> str | None:
        """The first factor in which an engine with key ``other`` is not what is asked for, as a sentence."""
        if self.hierarchy_hash != other.hierarchy_hash:
            return "built for another module structure"
        if self.graph_key != other.graph_key:
            return "built for another call form"
        if reason := self.environment.difference(other.environment):
            return reason
        if self.backend != other.backend:
            return f"built by {other.backend}, asked for {self.backend}"
        if self.backend_version != other.backend_version:
            return f"built with {self.backend} {other.backend_version}, here {self.backend_version}"
        for name in sorted(set(self.options) | set(other.options)):
            here, built = self.options.get(name, "unset"), other.options.get(name, "unset")
            if canonical_json(here) != canonical_json(built):
                return f"built with option {name}={built!r}, asked for {here!r}"
        if self.weights_digest != other.weights_digest:
            return "built for other weights"
        return None

    def to_dict(self) -> dict[str, object]:
        """All factors as JSON."""
        return {
            "hierarchy_hash": self.hierarchy_hash,
            "graph_key": self.graph_key,
            "environment": self.environment.to_dict(),
            "backend": self.backend,
            "backend_version": self.backend_version,
            "options": dict(self.options),
            "weights_digest": self.weights_digest,
        }

    @classmethod
    def from_dict(cls, data: object) -> EngineKey:
        """The key ``to_dict`` wrote. Raises ``CacheError`` for anything else."""
        record = exact_fields(data, [field.name for field in fields(cls)], "engine key")
        try:
            return cls(
                hierarchy_hash=text_field(record, "hierarchy_hash"),
                graph_key=text_field(record, "graph_key"),
                environment=Environment.from_dict(record["environment"]),
                backend=text_field(record, "backend"),
                backend_version=text_field(record, "backend_version"),
                options=object_field(record, "options"),
                weights_digest=optional_text(record, "weights_digest"),
            )
        except ConfigError as error:
            raise CacheError(str(error)) from error
