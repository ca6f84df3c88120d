"""Pickles, which run code when they are read, under the names of formats that do not."""

from __future__ import annotations

import json
import struct

import pytest
from attack_kit import Victim, data_key, package, pickle_payload

from aitune_hf.hub.objection import Limits


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize("name", ["weights.safetensors", "map.json", "model.onnx", "model.xml"])
def test_a_pickle_is_refused_under_every_name(victim: Victim, canary: object, name: str) -> None:
    victim.lay_entry(data_key(), {name: pickle_payload()})
    victim.refused(data_key(), "malformed", name)


@pytest.mark.parametrize("name", ["model.pkl", "model.pt", "model.bin", "pytorch_model.bin", "model.ckpt", "x.data"])
def test_a_pickle_has_no_name_to_come_in_by(victim: Victim, canary: object, name: str) -> None:
    victim.lay_entry(data_key(), {name: pickle_payload()})
    victim.refused(data_key(), "malformed", name)


def test_an_archive_of_pickles_is_refused(victim: Victim, canary: object) -> None:
    archive = package({"archive/data.pkl": pickle_payload()})
    victim.lay_entry(data_key(), {"model.xml": b"<net/>", "model.bin": archive})
    victim.refused(data_key(), "malformed", "model.bin")


@pytest.mark.parametrize(
    "attack",
    [
        b"",
        b"\x01\x00\x00",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        safetensors(b"[]"),
        safetensors(b'{"a":1}'),
        safetensors(b'{"a":{},"a":{}}'),
        safetensors(b"[" * 10_000),
        safetensors({"a": {**ENTRY, "data_offsets": [0, 5]}}, b"1234"),
        safetensors({"a": {**ENTRY, "data_offsets": [-4, 0]}}, b"1234"),
        safetensors({"a": {**ENTRY, "data_offsets": [4, 0]}}, b"1234"),
        safetensors({"a": {**ENTRY, "data_offsets": [True, 4]}}, b"1234"),
        safetensors({"a": {**ENTRY, "more": 1}}, b"1234"),
    ],
)
def test_hostile_safetensors_are_refused(victim: Victim, attack: bytes) -> None:
    victim.lay_entry(data_key(), {"weights.safetensors": attack})
    victim.refused(data_key(), "malformed", "weights.safetensors")


def test_a_header_beyond_its_bound_is_refused(victim: Victim) -> None:
    victim.lay_entry(data_key(), {"weights.safetensors": safetensors(b'{"a":' + b" " * 5000 + b"1}")})
    victim.refused(data_key(), "malformed", "weights.safetensors", limits=Limits(document_bytes=4096))


def test_real_safetensors_are_taken(victim: Victim) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save

    tensors = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(0), "half": torch.ones(3).half()}
    victim.lay_entry(data_key(), {"weights.safetensors": save(tensors, metadata={"format": "pt"})})
    victim.admitted(data_key(), trust=None)
