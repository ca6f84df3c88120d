"""An ONNX graph in float32 as one that computes in a shorter type. Its own inputs and outputs stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from aitune_hf.backends.onnx_export import tensor_bytes

if TYPE_CHECKING:
    import onnx

__all__ = ["SHORT_TYPES", "shortened"]

#: Type by its name: ONNX's number for it.
SHORT_TYPES = {"float16": 10, "bfloat16": 16}
_FLOAT = 1
#: Inputs that must be float32 by the operator's definition.
_ALWAYS_FLOAT = {"Resize": (1, 2)}


def shortened(model: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    """The graph with every float32 value inside of it as ``dtype``, one of :data:`SHORT_TYPES`.

    Initialisers without data (weights) change their type only: whoever supplies them casts them. Numbers beyond the
    range of the type become its largest ones; infinities stay.
    """
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    kept = _kept(graph)
    for tensor in graph.initializer:
        if tensor.name not in kept:
            _shorten(tensor, dtype)
    _shorten_nodes(graph, dtype, kept)
    del graph.value_info[:]
    _keep_interface(graph, dtype)
    return copy


def _kept(graph: onnx.GraphProto) -> set[str]:
    """Names of values that operators want as float32 whatever the type of the rest."""
    return {
        node.input[place]
        for inner in _graphs(graph)
        for node in inner.node
        for place in _ALWAYS_FLOAT.get(node.op_type, ())
        if place < len(node.input) and node.input[place]
    }


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else list(attribute.graphs):
                yield from _graphs(inner)


def _shorten_nodes(graph: onnx.GraphProto, dtype: str, kept: set[str]) -> None:
    for inner in _graphs(graph):
        for node in inner.node:
            if kept.intersection(node.output):
                continue
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype") and attribute.i == _FLOAT:
                    attribute.i = SHORT_TYPES[dtype]
                elif attribute.HasField("t"):
                    _shorten(attribute.t, dtype)
                elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                    _shorten_numbers(attribute, dtype)


def _shorten(tensor: onnx.TensorProto, dtype: str) -> None:
    from onnx import numpy_helper

    if tensor.data_type != _FLOAT:
        return
    has_data = bool(tensor.raw_data or tensor.float_data)
    values = torch.from_numpy(numpy_helper.to_array(tensor).copy()) if has_data else None
    tensor.data_type = SHORT_TYPES[dtype]
    if values is not None:
        tensor.ClearField("float_data")
        tensor.raw_data = tensor_bytes(_cast(values, dtype))


def _shorten_numbers(attribute: onnx.AttributeProto, dtype: str) -> None:
    from onnx import AttributeProto, TensorProto

    many = attribute.name == "value_floats"
    values = torch.tensor(list(attribute.floats) if many else attribute.f, dtype=torch.float32)
    tensor = TensorProto(
        data_type=SHORT_TYPES[dtype], dims=list(values.shape), raw_data=tensor_bytes(_cast(values, dtype))
    )
    attribute.Clear()
    attribute.name, attribute.type = "value", AttributeProto.TENSOR
    attribute.t.CopyFrom(tensor)


def _cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    wanted: torch.dtype = getattr(torch, dtype)
    largest = torch.finfo(wanted).max
    return torch.where(values.isinf(), values, values.clamp(-largest, largest)).to(wanted)


def _keep_interface(graph: onnx.GraphProto, dtype: str) -> None:
    """Cast the graph's float32 inputs and outputs where they come in and go out, and what must stay float32 inside."""
    from onnx import helper

    short: dict[str, str] = {}
    before, after = [], []
    for value in graph.input:
        if value.type.tensor_type.elem_type == _FLOAT:
            short[value.name] = f"{value.name}_short"
            before.append(helper.make_node("Cast", [value.name], [short[value.name]], to=SHORT_TYPES[dtype]))
    for value in graph.output:
        if value.type.tensor_type.elem_type == _FLOAT:
            short[value.name] = f"{value.name}_short"
            after.append(helper.make_node("Cast", [short[value.name]], [value.name], to=_FLOAT))
    for inner in _graphs(graph):
        for node in inner.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    names[index] = short.get(name, name)
    nodes = [*before, *_with_casts(graph), *after]
    copies = [type(node)() for node in nodes]
    for copy, node in zip(copies, nodes, strict=True):
        copy.CopyFrom(node)
    del graph.node[:]
    graph.node.extend(copies)


def _with_casts(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The graph's nodes, with a cast before each input that must be float32 and is computed."""
    from onnx import helper

    constant = {tensor.name for tensor in graph.initializer}
    constant |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    for node in graph.node:
        for place in _ALWAYS_FLOAT.get(node.op_type, ()):
            if place < len(node.input) and node.input[place] and node.input[place] not in constant:
                name = f"{node.input[place]}_float"
                yield helper.make_node("Cast", [node.input[place]], [name], to=_FLOAT)
                node.input[place] = name
        yield node
