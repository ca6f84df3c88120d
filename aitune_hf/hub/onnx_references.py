"""What an ONNX file refers to outside of itself, found without the ``onnx`` package and without loading anything.

The file is walked as the protobuf message it is, along those fields only that lead to a tensor or a node. A search for
the bytes of a name would be easy to evade: a message may spell the same thing in many ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from aitune_hf.hub.objection import Objection

__all__ = ["MESSAGE_FIELDS", "check_onnx"]

#: Message → its fields that lead to a tensor or a node: field number → message. From onnx.proto, IR version 12.
MESSAGE_FIELDS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {13: "external_data"},
}
_OP_TYPE = 4
#: Operators that run what lies outside of the graph: compiled blobs of a device, Python functions, torch's operators.
_OUTSIDE = frozenset({b"EPContext", b"PythonOp", b"PythonOpGrad", b"ATen"})
_MAX_DEPTH = 100  # protobuf's own bound
_PLAIN_NAME = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_onnx(data: memoryview, name: str, max_fields: int) -> None:
    """Check that an ONNX file keeps to its folder.

    Raises ``Objection`` for bytes that are no protobuf message, for more than ``max_fields`` fields, for external data
    whose location is not a plain file name, and for operators that run what lies outside of the graph.
    """
    budget = max_fields
    pending: list[tuple[str, int, int, int]] = [("ModelProto", 0, len(data), 0)]
    graphs = 0
    while pending:
        message, start, end, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise Objection("malformed", f"{name} is nested deeper than {_MAX_DEPTH} messages")
        inner = MESSAGE_FIELDS[message]
        for number, first, last in _fields(data, start, end, name):
            budget -= 1
            if budget < 0:
                raise Objection("malformed", f"{name} has more than {max_fields} fields")
            kind = inner.get(number)
            if kind == "external_data":
                _check_external(data, first, last, name)
            elif kind is not None:
                graphs += kind == "GraphProto"
                pending.append((kind, first, last, depth + 1))
            elif message == "NodeProto" and number == _OP_TYPE and bytes(data[first:last][:64]) in _OUTSIDE:
                operator = bytes(data[first:last]).decode()
                raise Objection("malformed", f"{name} has a node {operator}, which runs what lies outside of the file")
    if not graphs:
        raise Objection("malformed", f"{name} is no ONNX model: it holds no graph")


def _check_external(data: memoryview, start: int, end: int, name: str) -> None:
    entry = [(number, bytes(data[first:last])) for number, first, last in _fields(data, start, end, name)]
    if not any(number == 1 and text == b"location" for number, text in entry):
        return
    # Every value, since the last one counts for some readers and the first for others.
    for text in [text for number, text in entry if number == 2] or [b""]:
        if not _PLAIN_NAME.fullmatch(text) or b".." in text:
            where = text[:80].decode("utf-8", "replace")
            raise Objection("malformed", f"{name} takes tensors from {where!r}, which is not a file of the entry")


def _fields(data: memoryview, position: int, end: int, name: str) -> Iterator[tuple[int, int, int]]:
    """The fields of a message: number, start and end of the contents; number 0 for one that cannot be a message."""
    while position < end:
        tag, position = _varint(data, position, end, name)
        number, wire = tag >> 3, tag & 7
        start = position
        if wire == _VARINT:
            _, position = _varint(data, position, end, name)
        elif wire == _FIXED64:
            position += 8
        elif wire == _FIXED32:
            position += 4
        elif wire == _BYTES:
            size, start = _varint(data, position, end, name)
            position = start + size
        else:
            raise Objection("malformed", f"{name} is no ONNX model: a field of wire type {wire}")
        # Readers drop the bits of a tag beyond 32, so that one field could pass for another.
        if number == 0 or tag >> 32 or position > end:
            raise Objection("malformed", f"{name} is no ONNX model, or cut short")
        yield number if wire == _BYTES else 0, start, position


def _varint(data: memoryview, position: int, end: int, name: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise Objection("malformed", f"{name} is no ONNX model, or cut short")
