"""One engine on its way from a remote into the local cache: trusted or not, once per machine, tried where it may die."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aitune_hf.backends.isolation import IsolatedBuilder
from aitune_hf.cache import Entry, Manifest
from aitune_hf.cache.manifest import MANIFEST_NAME
from aitune_hf.errors import BuildError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.hub.admission import Admitted, Refused, admit, is_native
from aitune_hf.hub.objection import Objection
from aitune_hf.hub.record import SharedEngine
from aitune_hf.hub.remote import Remote
from aitune_hf.hub.signature import SIGNATURE_NAME
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
        with store.exclusive(f"pulls/{key.digest}.json"):
            found = store.lookup(key)
            if isinstance(found, Entry):
                return Admitted(entry=found, policy="present")
            files = {name: one for name, one in engine.files.items() if name not in (MANIFEST_NAME, SIGNATURE_NAME)}
            if (earlier := store.rejection(Manifest(key=key, files=files))) is not None:
                return Refused(kind="crashed", reason=f"it failed on this machine earlier: {earlier}")
            with tempfile.TemporaryDirectory(prefix="aitune-pull-") as name:
                folder = Path(name)
                try:
                    source = self._source(engine, folder)
                except Objection as objection:
                    return Refused(kind=objection.kind, reason=objection.reason)
                missing = [name for name in engine.files if not (folder / name).exists()]
                self.remote.fetch(engine.paths(missing), commit=self.commit, folder=folder, local_only=self.local_only)
                return admit(
                    folder,
                    key,
                    manifest_sha256=engine.files[MANIFEST_NAME].sha256,
                    source=source,
                    trust=self.trust,
                    store=store,
                    trial=lambda where, manifest: self._try(where, manifest, graph, path),
                )

    def _source(self, engine: SharedEngine, folder: Path) -> Source:
        """Where the engine comes from. Refuses one that is not trusted before its files are fetched."""
        source = Source(url=self.remote.url, commit=self.commit or None)
        if not is_native(engine.key):
            return source
        manifest = b""
        if self.trust.keys and SIGNATURE_NAME in engine.files:
            first = engine.paths([MANIFEST_NAME, SIGNATURE_NAME])
            self.remote.fetch(first, commit=self.commit, folder=folder, local_only=self.local_only)
            manifest = (folder / MANIFEST_NAME).read_bytes()
            signature = (folder / SIGNATURE_NAME).read_bytes()
            source = Source(url=source.url, commit=source.commit, signature=signature)
        decision = self.trust.decide(source, manifest)
        if not decision.trusted:
            raise Objection("untrusted", decision.reason)
        return source

    def _try(self, folder: Path, manifest: Manifest, graph: GraphSpec, path: str) -> None:
        backend = next(one for one in self.target.tuner.backends if one.name == manifest.key.backend)
        module = self.target.module(path)
        assert module is not None
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
