"""Entries as a repo may hold them, honest and hostile, with payloads that betray themselves when they run.

A payload that is executed creates the file named by ``AITUNE_CANARY``. ``Victim.admit`` calls ``admit`` and then sees
that there is no such file, and that nothing outside of the store was written, changed or removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aitune_hf.backends.inductor import InductorBackend
from aitune_hf.cache import EngineKey, Environment, FileDigest, LocalStore, Manifest
from aitune_hf.cache.sealed import seal
from aitune_hf.hub.admission import Admitted, Refused, admit
from aitune_hf.hub.trust import Source, Trust

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = Source(url="org/tuned", commit=COMMIT)
#: Dynamic loaders run the constructor of a library before they return.
LIBRARY_SOURCE = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void pounce(void) {
    const char *path = getenv("AITUNE_CANARY");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) fclose(file);
}
"""


class DataBackend(InductorBackend):
    """A backend whose artefacts are data, as third parties may register one."""

    name = "plaindata"
    native = False


class Pounce:
    """Its pickle creates the canary when it is read."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (os.environ["AITUNE_CANARY"], "w")


def pickle_payload() -> bytes:
    return pickle.dumps(Pounce(), protocol=2)


def package(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return buffer.getvalue()


def environment(**changes: Any) -> Environment:
    facts: dict[str, Any] = {
        "device_type": "cpu",
        "arch": "x86_64",
        "os": "linux",
        "torch": "2.13.0",
        "cpu_isa": "avx512",
        "cpu_features": ("avx2", "avx512f"),
        "libc": "glibc2.36",
    }
    return Environment(**{**facts, **changes})


def native_key(number: int = 0, **changes: Any) -> EngineKey:
    factors: dict[str, Any] = {
        "hierarchy_hash": f"{number:064x}",
        "graph_key": "ab" * 8,
        "environment": environment(),
        "backend": "inductor",
        "backend_version": "2.13.0",
        "options": {"level": 2},
    }
    return EngineKey(**{**factors, **changes})


def data_key(number: int = 0, **changes: Any) -> EngineKey:
    return native_key(number, **{"backend": "plaindata", "environment": environment().for_data(), **changes})


def digests(files: Mapping[str, bytes]) -> dict[str, FileDigest]:
    return {name: FileDigest(sha256=hashlib.sha256(data).hexdigest(), size=len(data)) for name, data in files.items()}


def manifest_bytes(key: EngineKey, files: Mapping[str, FileDigest], **parts: Any) -> bytes:
    provenance = {"aitune_hf": "0.1.0", "created": "2026-01-02", "path": "unet"}
    return Manifest(key=key, files=files, **{"engine": {"x": 1}, "provenance": provenance, **parts}).to_bytes()


def sealed_manifest(key: EngineKey, files: Mapping[str, Any], **fields: Any) -> bytes:
    """The bytes of a manifest whose fields this package would never write."""
    body = json.loads(json.dumps(Manifest(key=key, files={}).to_dict()))
    return seal("manifest", {**body, "files": files, **fields})


def tree(root: Path, without: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below ``root`` but for what is below ``without``: kind, size, links, times."""
    found: dict[str, tuple[Any, ...]] = {}
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if Path(parent, name) != without]
        for name in (*folders, *names):
            path = Path(parent, name)
            status = path.lstat()
            found[str(path)] = (status.st_mode, status.st_size, status.st_nlink, status.st_mtime_ns, status.st_ino)
    return found


@dataclass
class Victim:
    """A machine with a cache, and a folder where a download lies."""

    root: Path
    canary: Path
    trials: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = LocalStore(self.root / "cache")
        self.folder = self.root / "download" / "entry"
        self.folder.mkdir(parents=True)

    def lay(self, files: Mapping[str, bytes], manifest: bytes | None = None) -> Path:
        """Put files and a manifest into the download folder."""
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        if manifest is not None:
            (self.folder / "manifest.json").write_bytes(manifest)
        return self.folder

    def lay_entry(self, key: EngineKey, files: Mapping[str, bytes], **parts: Any) -> bytes:
        """An honest entry; returns its manifest."""
        data = manifest_bytes(key, digests(files), **parts)
        self.lay(files, data)
        return data

    def admit(
        self,
        key: EngineKey,
        *,
        trust: object = True,
        source: Source = SOURCE,
        meddles: Callable[[], None] | None = None,
        changes: Iterable[Path] = (),
        **options: Any,
    ) -> Admitted | Refused:
        """Admit the download, and see that nothing ran and nothing was written elsewhere.

        ``meddles`` runs in the trial, as somebody else may at that moment; ``changes``: what the test itself changes.
        """

        def trial(folder: Path, manifest: Manifest) -> None:
            self.trials.append(manifest.key.digest)
            if meddles is not None:
                meddles()

        before = tree(self.root, self.store.root)
        result = admit(
            self.folder,
            key,
            source=source,
            trust=Trust.parse(trust),
            store=self.store,
            **{"manifest_sha256": None, "trial": trial, **options},
        )
        assert not self.canary.exists(), "a payload was executed"
        after = tree(self.root, self.store.root)
        mine = tuple(str(path) for path in changes)
        for name in before.keys() | after.keys():
            assert name.startswith(mine) or before.get(name) == after.get(name), f"{name} was written"
        if isinstance(result, Refused):
            assert self.store.entries() == []
            assert not list((self.store.root / "aitune" / "tmp").glob("*"))
        return result

    def refused(self, key: EngineKey, kind: str, names: str, **options: Any) -> Refused:
        """Admit the download, which must be refused for this kind of reason, naming this file or fact."""
        result = self.admit(key, **options)
        assert isinstance(result, Refused), result
        assert (result.kind, names in result.reason) == (kind, True), result
        return result

    def admitted(self, key: EngineKey, **options: Any) -> Admitted:
        """Admit the download, which must be taken."""
        result = self.admit(key, **options)
        assert isinstance(result, Admitted), result
        return result
