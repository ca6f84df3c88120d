"""The payloads of these tests do run when they are loaded, and honest entries are let in. Else nothing here is proven."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from attack_kit import COMMIT, SOURCE, Victim, data_key, native_key, pickle_payload

from aitune_hf.cache import LocalStore
from aitune_hf.hub.signature import PublicKey, generate_key, sign_manifest
from aitune_hf.hub.trust import Source


def test_the_library_creates_the_canary_when_it_is_loaded(library: bytes, canary: Path, tmp_path: Path) -> None:
    (tmp_path / "pounce.so").write_bytes(library)
    command = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(tmp_path / "pounce.so")]
    subprocess.run(command, check=True, timeout=60)
    assert canary.exists()


def test_the_pickle_creates_the_canary_when_it_is_read(canary: Path) -> None:
    pickle.loads(pickle_payload()).close()
    assert canary.exists()


def test_a_trusted_engine_is_let_in_after_one_trial(victim: Victim, engine: bytes) -> None:
    key = native_key()
    manifest = victim.lay_entry(key, {"model.pt2": engine}, results={"max_error": 1e-6})
    admitted = victim.admitted(key, trust=f"org/tuned@{COMMIT}")
    assert admitted.policy == "pinned"
    assert victim.trials == [key.digest]
    entry = LocalStore(victim.store.root).lookup(key)
    assert entry == admitted.entry
    assert entry.read("model.pt2") == engine
    assert entry.manifest.results == {"max_error": 1e-6}
    note = entry.manifest.provenance["admitted"]
    assert isinstance(note, dict)
    assert (note["from"], note["commit"], note["policy"]) == ("org/tuned", COMMIT, "pinned")
    assert note["manifest_sha256"] == hashlib.sha256(manifest).hexdigest()


def test_data_needs_neither_trust_nor_trial(victim: Victim) -> None:
    key = data_key()
    victim.lay_entry(key, {"map.json": b'{"a":1}'})
    assert victim.admitted(key, trust=None).policy == "data"
    assert victim.trials == []


@pytest.mark.parametrize(
    ("trust", "policy"),
    [("org/tuned", "listed"), (["other/repo", f"org/tuned@{COMMIT}"], "pinned"), (True, "explicit")],
)
def test_each_policy_is_noted(victim: Victim, engine: bytes, trust: object, policy: str) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    admitted = victim.admitted(native_key(), trust=trust)
    assert admitted.policy == policy
    assert admitted.entry.manifest.provenance["admitted"]["policy"] == policy  # type: ignore[index]


def test_a_signature_is_trusted_wherever_the_entry_lies(victim: Victim, engine: bytes) -> None:
    pair = generate_key()
    manifest = victim.lay_entry(native_key(), {"model.pt2": engine})
    signature = sign_manifest(pair.private, manifest)
    (victim.folder / "manifest.json.sig").write_bytes(signature)
    public = PublicKey.from_pem(pair.public)
    admitted = victim.admitted(native_key(), trust=public, source=Source(url="/some/folder", signature=signature))
    note = admitted.entry.manifest.provenance["admitted"]
    assert note["signer"] == public.fingerprint  # type: ignore[index]
    assert "/some" not in str(note)


def test_what_lies_in_the_store_already_is_taken_from_there(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    first = victim.admitted(native_key())
    again = victim.admitted(native_key())
    assert (again.entry, again.policy) == (first.entry, "present")
    assert len(victim.trials) == 1


def test_nothing_private_is_kept_of_source_and_publisher(victim: Victim, engine: bytes) -> None:
    provenance = {
        "aitune_hf": "0.1.0",
        "build_seconds": 1.5,
        "home": "/home/somebody",
        "windows": "C:\\Users\\x",
        "link": "https://evil.example/",
        "odd": "a\u202eb",
        "long": "x" * 1000,
        "nested": {"a": 1},
        "admitted": "by nobody",
    }
    victim.lay_entry(native_key(), {"model.pt2": engine}, provenance=provenance)
    source = Source(url="https://user:hf_secret@huggingface.co/org/tuned", commit="main")
    kept = victim.admitted(native_key(), source=source).entry.manifest.provenance
    assert set(kept) == {"aitune_hf", "build_seconds", "created", "admitted"}
    assert "hf_secret" not in str(kept)
    assert kept["admitted"]["commit"] is None  # type: ignore[index]
    assert SOURCE.name == "org/tuned"
