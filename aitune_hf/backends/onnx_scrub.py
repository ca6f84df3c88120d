"""What is in an ONNX graph beside the computation: notes, and the names of sizes that vary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope

if TYPE_CHECKING:
    import onnx

__all__ = ["name_sizes", "scrub"]


def scrub(model: onnx.ModelProto) -> None:
    """Take out whatever tells of the code and the machine that a graph came from."""
    for name in ("producer_name", "producer_version", "doc_string", "metadata_props", "domain", "model_version"):
        model.ClearField(name)
    _scrub(model.graph)


def _scrub(graph: onnx.GraphProto) -> None:
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    for inner in _inner_graphs(graph):
        _scrub(inner)


def _inner_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def name_sizes(proto: onnx.GraphProto, envelope: ShapeEnvelope) -> None:
    """Name sizes that vary as the envelope does: how torch counts its symbols changes from run to run."""
    names: dict[str, str] = {}
    for value, extents in zip(proto.input, envelope.inputs, strict=True):
        for size, extent in zip(value.type.tensor_type.shape.dim, extents, strict=True):
            if extent.symbol is not None:
                names.setdefault(size.dim_param, _expression(extent))
                size.dim_param = _expression(extent)
    for value in proto.output:
        _rename_sizes(value, names)
    _rename_inner_sizes(proto, names)


def _rename_inner_sizes(proto: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in proto.value_info:
        _rename_sizes(value, names)
    for inner in _inner_graphs(proto):
        for value in (*inner.input, *inner.output):
            _rename_sizes(value, names)
        _rename_inner_sizes(inner, names)


def _rename_sizes(value: onnx.ValueInfoProto, names: Mapping[str, str]) -> None:
    for size in value.type.tensor_type.shape.dim:
        if size.HasField("dim_param"):
            name = names.get(size.dim_param)
            if name is None:
                size.Clear()  # It varies; whoever reads the graph works out how.
            else:
                size.dim_param = name


def _expression(extent: Extent) -> str:
    scaled = f"{extent.scale}*{extent.symbol}" if extent.scale != 1 else str(extent.symbol)
    return f"{scaled}+{extent.offset}" if extent.offset else scaled
