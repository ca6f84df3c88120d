"""One engine on its way from a remote into the local cache: trusted or not, once per machine, tried where it may die."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aitune_hf.backends.isolation import IsolatedBuilder
from aitune_hf.cache import Entry, FileDigest, LocalStore, Manifest, UnknownSchemaError
from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.cache.key import LAYOUT
from aitune_hf.cache.layout import Layout, lock_id_of
from aitune_hf.cache.manifest import MANIFEST_NAME
from aitune_hf.errors import BuildError, CacheError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.hub.admission import Admitted, Refused, admit, is_native
from aitune_hf.hub.objection import Limits, Objection
from aitune_hf.hub.record import SharedEngine
from aitune_hf.hub.remote import Remote
from aitune_hf.hub.signature import SIGNATURE_NAME, SIGNATURE_SIZE
from aitune_hf.hub.target import Target
from aitune_hf.hub.trust import Source, Trust

__all__ = ["Fetcher"]


@dataclass(frozen=True, kw_only=True)
class Fetcher:
    """Fetches engines of one state of a remote.

    Attributes:
        commit: that state.
        local_only: take them from copies on this machine alone.
        tester: the child process in which native engines are loaded first.
    """

    target: Target
    remote: Remote
    commit: str
    trust: Trust
    local_only: bool
    tester: IsolatedBuilder

    def fetch(self, engine: SharedEngine, graph: GraphSpec, path: str) -> Admitted | Refused:
        """Bring an engine into the local cache, if it is not there and may be.

        Of many processes that want the same one, one fetches it. A native engine that is not trusted is not fetched.

        Raises:
            RemoteError: if the remote fails.
        """
        store, key = self.target.store, engine.key
        lock = f"pulls/{key.digest}.json"
        with store.exclusive(lock):
            found = store.lookup(key)
            if isinstance(found, Entry):
                return Admitted(entry=found, policy="present")
            files = _own_files(engine)
            if (earlier := store.rejection(Manifest(key=key, files=files))) is not None:
                return Refused(kind="crashed", reason=f"it failed on this machine earlier: {earlier}")
            try:
                _check_sizes(engine, Limits())
                with _staging(store, lock) as folder:
                    source = self._source(engine, folder)
                    self._fetch(engine, list(files), folder)
                    return admit(
                        folder,
                        key,
                        manifest_sha256=engine.files[MANIFEST_NAME].sha256,
                        source=source,
                        trust=self.trust,
                        store=store,
                        trial=lambda where, manifest: self._try(where, manifest, graph, path),
                    )
            except Objection as objection:
                return Refused(kind=objection.kind, reason=objection.reason)

    def _source(self, engine: SharedEngine, folder: Path) -> Source:
        """Where the engine comes from, once its manifest is there and right; it is all that is fetched until then.

        Raises ``Objection`` for one that is not trusted: before anything is fetched, unless a signature may tell.
        """
        source = Source(url=self.remote.url, commit=self.commit or None)
        is_code = is_native(engine.key)
        is_signed = is_code and bool(self.trust.keys) and SIGNATURE_NAME in engine.files
        if is_code and not is_signed:
            self._require_trust(source, b"")
        self._fetch(engine, [MANIFEST_NAME, SIGNATURE_NAME] if is_signed else [MANIFEST_NAME], folder)
        data = (folder / MANIFEST_NAME).read_bytes()
        _check_manifest(engine, data)
        if is_signed:
            source = replace(source, signature=(folder / SIGNATURE_NAME).read_bytes())
            self._require_trust(source, data)
        return source

    def _require_trust(self, source: Source, manifest: bytes) -> None:
        decision = self.trust.decide(source, manifest)
        if not decision.trusted:
            raise Objection("untrusted", decision.reason)

    def _fetch(self, engine: SharedEngine, names: Sequence[str], folder: Path) -> None:
        self.remote.fetch(engine.paths(names), commit=self.commit, folder=folder, local_only=self.local_only)

    def _try(self, folder: Path, manifest: Manifest, graph: GraphSpec, path: str) -> None:
        backend = next((one for one in self.target.tuner.backends if one.name == manifest.key.backend), None)
        module = self.target.module(path)
        if backend is None or module is None:
            raise Objection("foreign", f"{MANIFEST_NAME} is of a backend or module that is not in use here")
        tensors = (*module.parameters(), *module.buffers())
        engine: Any = manifest.engine
        try:
            self.tester.try_engine(
                backend,
                path or self.target.name,
                folder,
                engine["backend"],
                graph,
                ShapeEnvelope.from_dict(engine["envelope"]),
                next((tensor.device for tensor in tensors), torch.device("cpu")),
            )
        except BuildError as error:  # The backend cannot be sent to a child, which says nothing about the engine.
            raise Objection("untrusted", f"it cannot be tried out first: {error}") from error


def _own_files(engine: SharedEngine) -> dict[str, FileDigest]:
    return {name: one for name, one in engine.files.items() if name not in (MANIFEST_NAME, SIGNATURE_NAME)}


def _check_sizes(engine: SharedEngine, limits: Limits) -> None:
    """Raise ``Objection`` for files beyond all bounds, by what the record says of them."""
    bounds = {MANIFEST_NAME: MAX_JSON_BYTES, SIGNATURE_NAME: SIGNATURE_SIZE}
    for name, one in engine.files.items():
        most = bounds.get(name, limits.file_bytes)
        if one.size > most:
            raise Objection("malformed", f"{name} has {one.size} bytes; at most {most} are taken")
    signature = engine.files.get(SIGNATURE_NAME)
    if signature is not None and signature.size != SIGNATURE_SIZE:
        raise Objection("malformed", f"{SIGNATURE_NAME} is no signature: those have {SIGNATURE_SIZE} bytes")
    total = sum(one.size for one in _own_files(engine).values())
    if total > limits.total_bytes:
        raise Objection("malformed", f"its files have {total} bytes; at most {limits.total_bytes} are taken")


def _check_manifest(engine: SharedEngine, data: bytes) -> None:
    """Raise ``Objection`` unless a manifest says what the record says of the engine."""
    try:
        manifest = Manifest.from_bytes(data)
    except UnknownSchemaError as error:
        raise Objection("foreign", f"{MANIFEST_NAME}: {error}") from error
    except CacheError as error:
        raise Objection("malformed", f"{MANIFEST_NAME}: {error}") from error
    if manifest.key != engine.key:
        raise Objection("foreign", f"{MANIFEST_NAME} is of another engine: {engine.key.difference(manifest.key)}")
    if manifest.files != _own_files(engine):
        raise Objection("malformed", f"{MANIFEST_NAME} lists other files than the record of the pipeline")


@contextmanager
def _staging(store: LocalStore, lock: str) -> Iterator[Path]:
    """A folder on the disk of the cache, which has room for engines; elsewhere where that takes no files.

    It bears the name of the lock that is held meanwhile: what a killed process leaves is swept away.
    """
    folder = Layout(root=store.root).new_temporary(lock_id_of(LAYOUT / lock))
    try:
        folder.mkdir(parents=True)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="aitune-pull-") as name:
            yield Path(name)
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
