"""Native code that passes itself off as data, which would need no trust."""

from __future__ import annotations

import pytest
from attack_kit import Victim, data_key, environment, native_key

DATA = environment().for_data()


def test_the_key_of_a_native_backend_cannot_say_that_it_is_data(victim: Victim, engine: bytes) -> None:
    key = native_key(environment=DATA)
    victim.lay_entry(key, {"model.json": b"{}"})
    victim.refused(key, "malformed", "engines of inductor are native", trust=None)


def test_a_backend_that_is_not_known_here_is_not_taken_at_its_word(victim: Victim) -> None:
    key = native_key(environment=DATA, backend="somebodys")
    victim.lay_entry(key, {"model.json": b"{}"})
    victim.refused(key, "foreign", "manifest.json", trust=None)


@pytest.mark.parametrize("backend", ["plaindata", "somebodys"])
def test_a_key_of_a_machine_is_native_whatever_its_backend(victim: Victim, engine: bytes, backend: str) -> None:
    key = native_key(backend=backend)
    victim.lay_entry(key, {"model.json": b"{}"})
    victim.refused(key, "untrusted", "manifest.json", trust=None)


@pytest.mark.parametrize("claim", [{"native": False}, {"backend": {"native": False}}, {"is_data": True}])
def test_what_the_manifest_says_of_itself_does_not_count(
    victim: Victim, engine: bytes, claim: dict[str, object]
) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine}, engine=claim, provenance=claim, factors=claim)
    victim.refused(native_key(), "untrusted", "native engine", trust=None)


@pytest.mark.parametrize(
    "name", ["model.so", "model.pt2", "model.engine", "model.py", "model", "model.json.so", "x.PT2"]
)
def test_data_has_no_files_that_could_be_code(victim: Victim, name: str) -> None:
    victim.lay_entry(data_key(), {name: b"whatever it holds"})
    victim.refused(data_key(), "malformed", name, trust=None)


@pytest.mark.parametrize(
    "name", ["model.onnx", "model.xml", "map.json", "weights.safetensors", "model.bin", "model.data"]
)
def test_a_library_under_the_name_of_data_is_refused(victim: Victim, library: bytes, name: str) -> None:
    files = {"model.bin": "model.xml", "model.data": "model.onnx"}
    victim.lay_entry(data_key(), {name: library, **({files[name]: b"<net/>"} if name in files else {})})
    victim.refused(data_key(), "malformed", name, trust=None)


def test_an_untrusted_engine_is_refused_before_its_files_are_touched(victim: Victim) -> None:
    victim.lay_entry(native_key(), {"model.pt2": b"anything"})
    victim.lay({"model.pt2": b"anything else"})
    victim.refused(native_key(), "untrusted", "nobody but this machine is trusted", trust="local")
    assert not victim.store.root.exists()
