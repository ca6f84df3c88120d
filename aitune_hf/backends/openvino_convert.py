"""From a captured program to an OpenVINO model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from aitune_hf.backends.openvino_sdk import load_openvino
from aitune_hf.backends.quiet import quiet_torch
from aitune_hf.errors import BuildError
from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from aitune_hf.backends.export import CapturedGraph

__all__ = ["constant_nodes", "constant_value", "convert", "decompose"]

_OPERATOR = re.compile(r"(?:aten|prims?|torchvision|quantized)[.:]+[\w.]+|No translator found for \W*([\w.:]+)")
_BF16 = "bf16"


def decompose(graph: CapturedGraph, where: str) -> CapturedGraph:
    """The same program in the operators that OpenVINO knows.

    Raises:
        BuildError: if torch cannot decompose it.
    """
    load_openvino()
    from openvino.frontend.pytorch.torchdynamo.export_decompositions import ops_to_not_decompose

    table = torch.export.default_decompositions()
    for operator in ops_to_not_decompose():
        if operator in table:
            del table[operator]
    try:
        with quiet_torch(), torch.no_grad():
            program = graph.program.run_decompositions(table)
    except Exception as error:
        raise BuildError(f"{where}: the program cannot be brought to basic operators: {_first_line(error)}") from error
    _round_down(program)
    _tell_outputs_apart(program)
    return replace(graph, program=program)


def convert(graph: CapturedGraph, where: str) -> Any:
    """An ``openvino.Model`` of a decomposed program, for the shapes of its envelope.

    Raises:
        BuildError: naming the operators that OpenVINO does not have.
    """
    ov = load_openvino()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    # Not `convert_model`: it does the same, and folds constants together that are better kept apart.
    frontend = FrontEndManager().load_by_framework("pytorch")
    try:
        with quiet_torch():
            decoder = TorchFXPythonDecoder(graph.program.module(check_guards=False), dynamic_shapes=False)
            model = frontend.convert(frontend.load(decoder))
        _set_shapes(model, graph.envelope, where)
    except BuildError:
        raise
    except Exception as error:
        raise BuildError(f"{where}: OpenVINO cannot convert this graph: {_why(error)}") from error
    _name_by_place(ov, model)
    return model


def constant_nodes(model: Any) -> dict[str, Any]:
    """The constants of a model, by names that depend on nothing but its structure."""
    nodes = (node for node in model.get_ordered_ops() if node.get_type_name() == "Constant")
    return {f"c{number}": node for number, node in enumerate(nodes)}


def constant_value(node: Any) -> np.ndarray[Any, Any] | torch.Tensor:
    """What a constant holds; not a copy."""
    data: np.ndarray[Any, Any] = node.data
    if node.get_element_type().get_type_name() == _BF16:
        return torch.from_numpy(data.view(np.uint16).copy()).view(torch.bfloat16)
    return data


def _round_down(program: ExportedProgram) -> None:
    """Divide integers so that the result is rounded down: the converter's own way rounds them towards zero."""
    aten, graph = torch.ops.aten, program.graph
    for node in list(graph.nodes):
        is_floor = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
        held = node.meta.get("val")
        if not is_floor or not isinstance(held, torch.Tensor) or held.is_floating_point():
            continue
        dividend, divisor = node.args
        is_tensor = isinstance(divisor, fx.Node) and isinstance(divisor.meta.get("val"), torch.Tensor)
        remainder = aten.remainder.Tensor if is_tensor else aten.remainder.Scalar
        with graph.inserting_before(node):
            rest = graph.call_function(remainder, (dividend, divisor))
            whole = graph.call_function(aten.sub.Tensor, (dividend, rest))
            result = graph.call_function(aten.div.Tensor_mode, (whole, divisor), {"rounding_mode": "trunc"})
        for new in (rest, whole, result):
            new.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    program.graph_module.recompile()


def _tell_outputs_apart(program: ExportedProgram) -> None:
    """Give each output a node of its own: the converter fails where one is given twice."""
    graph = program.graph
    output = next(iter(reversed(graph.nodes)))
    seen: set[fx.Node] = set()
    own: list[Any] = []
    with graph.inserting_before(output):
        for node in output.args[0]:
            copy = node
            if node in seen:
                # Not a clone, which the converter passes over.
                wrapped = graph.call_function(torch.ops.aten.unsqueeze.default, (node, 0))
                wrapped.meta = {**node.meta, "val": node.meta["val"].unsqueeze(0)}
                copy = graph.call_function(torch.ops.aten.squeeze.dim, (wrapped, 0))
                copy.meta = dict(node.meta)
            seen.add(node)
            own.append(copy)
    output.args = (tuple(own),)
    program.graph_module.recompile()


def _set_shapes(model: Any, envelope: ShapeEnvelope, where: str) -> None:
    """Give the inputs the sizes of the envelope: a program's own are wider, or not said at all."""
    ov = load_openvino()
    if len(model.inputs) != len(envelope.inputs):
        raise BuildError(
            f"{where}: the converted model takes {len(model.inputs)} inputs, the graph has {len(envelope.inputs)}"
        )
    shapes = {
        port: ov.PartialShape([ov.Dimension(*_bounds(extent, envelope)) for extent in extents])
        for port, extents in zip(model.inputs, envelope.inputs, strict=True)
    }
    model.reshape(shapes)


def _bounds(extent: Extent, envelope: ShapeEnvelope) -> tuple[int, int]:
    low, high = (0, 0) if extent.symbol is None else envelope.ranges[extent.symbol]
    return extent.scale * low + extent.offset, extent.scale * high + extent.offset


def _name_by_place(ov: Any, model: Any) -> None:
    """Name everything by its place: names given by counters of the process would differ from build to build."""
    model.set_friendly_name("model")
    for number, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"{node.get_type_name()}_{number}")
        for output in node.outputs():
            output.get_tensor().set_names(set())


def _why(error: Exception) -> str:
    operators = sorted(set(_operators(str(error))))
    if operators:
        return f"it has no {', '.join(operators)}"
    return _first_line(error)


def _operators(text: str) -> Iterator[str]:
    for found in _OPERATOR.finditer(text):
        yield (found.group(1) or found.group(0)).rstrip(".:")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
