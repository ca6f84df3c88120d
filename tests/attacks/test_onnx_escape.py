"""ONNX graphs that take tensors, or code, from outside of their entry."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from attack_kit import Victim, data_key

from aitune_hf.hub.objection import Limits, Objection
from aitune_hf.hub.onnx_references import MESSAGE_FIELDS, check_onnx

ESCAPES = [
    "../../../etc/passwd",
    "/etc/passwd",
    "sub/weights.data",
    "..",
    ".hidden",
    "C:\\secret",
    "*/_ORT_MEM_ADDR_/*",  # ONNX Runtime's own: an address in memory
    "weights\x00.data",
    "",
    "w\u200beights.data",
]


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def part(number: int, contents: bytes) -> bytes:
    """A field that holds bytes or a message."""
    return varint(number << 3 | 2) + varint(len(contents)) + contents


def external(location: str, *, key: bytes = b"location") -> bytes:
    """A tensor whose data lies in a file: data_location = EXTERNAL, and where."""
    return part(8, b"w") + part(13, part(1, key) + part(2, location.encode())) + b"\x70\x01"


def model(graph: bytes, **more: bytes) -> bytes:
    return b"\x08\x0a" + part(7, graph) + b"".join(more.values())


# Every way from the model to a tensor.
PLACES: Mapping[str, Callable[[bytes], bytes]] = {
    "initializer": lambda tensor: model(part(5, tensor)),
    "sparse values": lambda tensor: model(part(15, part(1, tensor))),
    "sparse indices": lambda tensor: model(part(15, part(2, tensor))),
    "constant": lambda tensor: model(part(1, part(4, b"Constant") + part(5, part(5, tensor)))),
    "list of tensors": lambda tensor: model(part(1, part(5, part(10, tensor)))),
    "sparse constant": lambda tensor: model(part(1, part(5, part(22, part(1, tensor))))),
    "list of sparse": lambda tensor: model(part(1, part(5, part(23, part(2, tensor))))),
    "branch": lambda tensor: model(part(1, part(5, part(6, part(5, tensor))))),
    "branches": lambda tensor: model(part(1, part(5, part(11, part(1, part(5, part(5, tensor))))))),
    "function": lambda tensor: model(b"") + part(25, part(7, part(5, part(5, tensor)))),
    "function attribute": lambda tensor: model(b"") + part(25, part(11, part(5, tensor))),
    "training": lambda tensor: model(b"") + part(20, part(1, part(5, tensor))),
    "second graph": lambda tensor: model(b"") + part(7, part(5, tensor)),
}


@pytest.mark.parametrize("place", PLACES)
def test_tensors_from_outside_are_found_wherever_they_stand(victim: Victim, place: str) -> None:
    victim.lay_entry(data_key(), {"model.onnx": PLACES[place](external("../secret"))})
    victim.refused(data_key(), "malformed", "model.onnx takes tensors from '../secret'", trust=None)


@pytest.mark.parametrize("location", ESCAPES)
def test_every_place_but_a_plain_name_is_refused(victim: Victim, location: str) -> None:
    victim.lay_entry(data_key(), {"model.onnx": PLACES["initializer"](external(location))})
    victim.refused(data_key(), "malformed", "model.onnx takes tensors from", trust=None)


@pytest.mark.parametrize(
    "entry",
    [
        part(2, b"../secret") + part(1, b"location"),  # the value first
        part(1, b"x") + part(1, b"location") + part(2, b"../secret"),  # the key twice
        part(1, b"location") + part(2, b"../secret") + part(2, b"plain"),  # the value twice
        b"\x8a\x80\x00" + b"\x88\x80\x00" + b"location" + part(2, b"../secret"),  # long spellings of numbers
        part(1, b"location"),  # no value at all
        part(1, b"location") + part(99, b"x") + part(2, b"../secret"),  # an unknown field between
    ],
)
def test_other_spellings_of_the_same_are_found(victim: Victim, entry: bytes) -> None:
    victim.lay_entry(data_key(), {"model.onnx": model(part(5, part(13, entry)))})
    victim.refused(data_key(), "malformed", "model.onnx", trust=None)


@pytest.mark.parametrize(
    "attack",
    [
        b"",
        b"not a model",
        model(b"")[:-1],
        b"\x08\x0a",  # no graph
        model(b"") + b"\x0b",  # a group
        model(b"") + b"\xff" * 11,
        part(7, b"") + b"\x02\x00",  # field number 0
        model(varint((1 << 32 | 13) << 3 | 2) + b"\x00"),  # readers drop the high bits
        b"\x3a\xff\xff\xff\xff\x7f",
    ],
)
def test_what_is_no_model_is_refused(victim: Victim, attack: bytes) -> None:
    victim.lay_entry(data_key(), {"model.onnx": attack})
    victim.refused(data_key(), "malformed", "model.onnx", trust=None)


def test_nesting_and_number_of_fields_are_bounded(victim: Victim) -> None:
    graph = b""
    for _ in range(60):
        graph = part(1, part(5, part(6, graph)))
    victim.lay_entry(data_key(), {"model.onnx": model(graph)})
    victim.refused(data_key(), "malformed", "model.onnx is nested deeper", trust=None)
    victim.lay_entry(data_key(), {"model.onnx": model(part(5, b"\x08\x01" * 1000))})
    victim.refused(data_key(), "malformed", "more than 1000 fields", trust=None, limits=Limits(fields=1000))


@pytest.mark.parametrize("operator", [b"EPContext", b"PythonOp", b"PythonOpGrad", b"ATen"])
def test_operators_that_run_other_code_are_refused(victim: Victim, operator: bytes) -> None:
    branch = part(1, part(5, part(6, part(1, part(4, operator) + part(7, b"com.microsoft")))))
    victim.lay_entry(data_key(), {"model.onnx": model(branch)})
    victim.refused(data_key(), "malformed", f"a node {operator.decode()}", trust=None)


def test_tensors_of_the_entry_itself_are_taken(victim: Victim) -> None:
    files = {"model.onnx": PLACES["initializer"](external("model.onnx.data")), "model.onnx.data": bytes(16)}
    victim.lay_entry(data_key(), files)
    victim.admitted(data_key(), trust=None)


def test_models_of_the_onnx_package_are_read_alike(victim: Victim) -> None:
    onnx: Any = pytest.importorskip("onnx")
    helper = onnx.helper
    tensor = helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    value = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    node = helper.make_node("Identity", ["w"], ["y"])
    made = helper.make_model(helper.make_graph([node], "g", [], [value], [tensor]))
    victim.lay_entry(data_key(), {"model.onnx": made.SerializeToString()})
    victim.admitted(data_key(), trust=None)

    found = made.graph.initializer[0]
    found.data_location = onnx.TensorProto.EXTERNAL
    found.external_data.add(key="offset", value="/0")
    found.external_data.add(key="location", value="/etc/passwd")
    victim.store.clear()
    victim.lay_entry(data_key(), {"model.onnx": made.SerializeToString()})
    victim.refused(data_key(), "malformed", "'/etc/passwd'", trust=None)


def test_the_fields_that_are_followed_are_all_that_lead_to_a_tensor_or_a_node() -> None:
    pytest.importorskip("onnx")
    from onnx import onnx_ml_pb2

    messages = onnx_ml_pb2.DESCRIPTOR.message_types_by_name
    wanted = {"TensorProto", "NodeProto"}
    while True:
        more = {
            name
            for name, message in messages.items()
            if any(field.message_type and field.message_type.name in wanted for field in message.fields)
        }
        if more <= wanted:
            break
        wanted |= more
    expected = {
        name: {
            field.number: field.message_type.name
            for field in messages[name].fields
            if field.message_type and field.message_type.name in wanted
        }
        for name in wanted
    }
    expected["TensorProto"] = {13: "external_data"}
    assert messages["TensorProto"].fields_by_name["external_data"].number == 13
    assert messages["NodeProto"].fields_by_name["op_type"].number == 4
    assert {name: dict(inner) for name, inner in MESSAGE_FIELDS.items()} == expected


def test_whatever_the_onnx_package_reads_is_seen_here_too() -> None:
    onnx: Any = pytest.importorskip("onnx")
    chance = random.Random(0)
    seeds = [place(external(location)) for place in PLACES.values() for location in ("../secret", "plain")]
    harmful = 0
    for _ in range(20_000):
        data = _mutated(chance, chance.choice(seeds), seeds)
        try:
            read = onnx.ModelProto.FromString(data)
        except Exception:  # noqa: BLE001 - no message any more
            continue
        if any(_leads_out(tensor) for tensor in _tensors(read)):
            harmful += 1
            with pytest.raises(Objection):
                check_onnx(memoryview(data), "model.onnx", 10_000)
    assert harmful > 500


def _mutated(chance: random.Random, seed: bytes, seeds: list[bytes]) -> bytes:
    data = bytearray(seed)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        edit = chance.random()
        if edit < 0.4:
            data[at] = chance.randrange(256)
        elif edit < 0.6:
            data[at] ^= 1 << chance.randrange(8)
        elif edit < 0.75:
            data[at:at] = bytes([chance.choice(b"\x00\x01\x02\x0d\x6a\x80\xff\x3a\x08\x2a")])
        elif edit < 0.85 and len(data) > 1:
            del data[at]
        else:
            data += chance.choice(seeds)
    return bytes(data)


def _tensors(message: Any) -> Iterator[Any]:
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in value if descriptor.is_repeated else [value]:
                if inner.DESCRIPTOR.name == "TensorProto":
                    yield inner
                yield from _tensors(inner)


def _leads_out(tensor: Any) -> bool:
    places = [entry.value for entry in tensor.external_data if entry.key == "location"]
    # Text that is not UTF-8 comes as bytes.
    return any(
        not isinstance(place, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", place) for place in places
    )
