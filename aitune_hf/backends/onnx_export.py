"""A captured program as an ONNX graph: structure here, weights beside it.

The graph is optimised while its weights are inputs, so that nothing of a weight can be folded into a new constant or
fused into another one: each is an initialiser of its own, with the program's own name and bytes, or is not there. What
is computed from shapes and numbers alone is folded, and stays in the graph.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aitune_hf.backends.build_folder import build_folder
from aitune_hf.backends.onnx_scrub import name_sizes, scrub
from aitune_hf.backends.probes import pinned_constants, values_of
from aitune_hf.backends.quiet import quiet_torch
from aitune_hf.errors import BuildError

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from aitune_hf.backends.export import CapturedGraph

__all__ = ["OnnxExport", "export_onnx", "missing_exporter"]

#: Protocol buffers, and so an ONNX file without data beside it, end here.
_LARGEST_FILE = 2**31 - 2**20
#: Bytes up to which a constant stays in the graph where weights are folded.
_SMALL = 1024
_DATA_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
#: Names of a graph's own inputs and outputs, which nothing else in it may have.
_RESERVED = re.compile(r"(in|out)\d+")


@dataclass(frozen=True, kw_only=True)
class OnnxExport:
    """An ONNX graph and its weights.

    Attributes:
        model: the graph. Initialisers that are weights have name, type and shape, and no data; all others have data.
        weights: initialiser → its values. Parameters and saved buffers of floating point that the graph uses.
        inputs, outputs: ``in0``, ``in1``, … and ``out0``, … in the program's order.
    """

    model: onnx.ModelProto
    weights: Mapping[str, torch.Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def structure(self) -> bytes:
        """The graph without its weights; the same bytes for the same program."""
        content: bytes = self.model.SerializeToString(deterministic=True)
        return content

    def constants(self) -> dict[str, np.ndarray[Any, Any] | torch.Tensor]:
        """The values of all initialisers."""
        from onnx import numpy_helper

        return {
            tensor.name: self.weights[tensor.name] if tensor.name in self.weights else numpy_helper.to_array(tensor)
            for tensor in self.model.graph.initializer
        }

    def inlined(self) -> onnx.ModelProto:
        """The graph with its weights in it.

        Raises:
            BuildError: if that is more than an ONNX file may hold; :meth:`save` has no such limit.
        """
        size = sum(weight.numel() * weight.element_size() for weight in self.weights.values())
        if size + self.model.ByteSize() > _LARGEST_FILE:
            raise BuildError(f"a graph with {size / 2**30:.1f} GB of weights does not fit into one ONNX file")
        model = _copy(self.model)
        for tensor in model.graph.initializer:
            if tensor.name in self.weights:
                tensor.raw_data = tensor_bytes(self.weights[tensor.name])
        return model

    def save(self, path: Path) -> list[Path]:
        """Write the graph to ``path`` and its weights beside it, without a limit in size.

        Returns:
            The files.
        """
        model, data = _copy(self.model), path.with_name(f"{path.name}.data")
        with data.open("wb") as file:
            for tensor in model.graph.initializer:
                if tensor.name in self.weights:
                    start = file.tell()
                    file.write(tensor_bytes(self.weights[tensor.name]))
                    declare_external(tensor, data.name, offset=start, length=file.tell() - start)
        path.write_bytes(model.SerializeToString(deterministic=True))
        return [path, data]


def missing_exporter() -> str | None:
    """None if graphs can be exported here, else what is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    return f"{' and '.join(missing)} not found: pip install aitune-hf[onnx]" if missing else None


def export_onnx(graph: CapturedGraph, *, opset: int, path: str = "model", fold_weights: bool = False) -> OnnxExport:
    """Write a captured program as an ONNX graph.

    Args:
        graph: the program, with whatever weights it has.
        opset: version of the ONNX operators, 18 or later.
        path: the module's path, for messages.
        fold_weights: compute beforehand what depends on weights alone. The result is good for these weights only, its
            ``weights`` have names of their own, and small ones are in the graph.

    Raises:
        BuildError: if it cannot be written, naming the operator that ONNX has no words for.
    """
    pinned = pinned_constants(graph)
    weights = {name: value for name, value in values_of(graph.program).items() if name not in pinned}
    with quiet_torch(), build_folder(torch.device("cpu")), torch.no_grad():
        try:
            model = torch.onnx.export(graph.program, dynamo=True, opset_version=opset, optimize=False, verbose=False)
            assert model is not None
            used = _folded(model.model) if fold_weights else _optimised(model.model, weights)
        except Exception as error:
            raise BuildError(f"{path}: the graph cannot be written as ONNX: {_reason(error)}") from error
        proto = _to_proto(model.model, used)
    name_sizes(proto.graph, graph.envelope)
    inputs, outputs = (tuple(value.name for value in values) for values in (proto.graph.input, proto.graph.output))
    return OnnxExport(model=proto, weights=used, inputs=inputs, outputs=outputs)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's values as ONNX wants them: row by row, little-endian."""
    plain = tensor.detach().cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes()


def declare_external(tensor: onnx.TensorProto, location: str, **place: int) -> None:
    """Say in an initialiser that its data lie elsewhere, and drop those it has.

    Args:
        location: a file beside the graph's, or a name that a runtime is told of.
        place: ``offset`` and ``length`` in the file.
    """
    from onnx import TensorProto

    for name in _DATA_FIELDS:
        tensor.ClearField(name)
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in {"location": location, **place}.items():
        tensor.external_data.add(key=key, value=str(value))


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def _optimised(model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fold and simplify what does not depend on weights; they come out as inputs, behind the graph's own.

    Returns:
        The weights that are used, by the names of these inputs.
    """
    graph = model.graph
    own = list(graph.inputs)
    moved = {name: _moved_to_inputs(graph, name) for name in list(graph.initializers) if name in weights}
    _optimise(model)
    _rename(graph, own)
    for value in moved.values():
        if not value.uses():
            graph.inputs.remove(value)
    return {value.name: weights[name] for name, value in moved.items() if value.uses()}


def _folded(model: Any) -> dict[str, torch.Tensor]:
    """Fold and simplify all that can be; constants that are not small come out as inputs, behind the graph's own.

    Returns:
        Their values, by the names of these inputs.
    """
    graph = model.graph
    own = list(graph.inputs)
    _optimise(model, limit=2**62)
    _rename(graph, own)
    values = {name: value.const_value for name, value in graph.initializers.items()}
    large = {name: _to_torch(value) for name, value in values.items() if value.nbytes > _SMALL}
    for name in large:
        _moved_to_inputs(graph, name)
    return large


def _optimise(model: Any, limit: int = 8192) -> None:
    """Run the optimiser of the exporter; constants of up to ``limit`` bytes are folded."""
    from onnxscript import optimizer
    from onnxscript.rewriter import onnx_fusions

    optimizer.optimize(model, input_size_limit=limit, output_size_limit=max(limit, 512 * 512))
    onnx_fusions.fuse(model)


def _moved_to_inputs(graph: Any, name: str) -> Any:
    value = graph.initializers.pop(name)
    value.const_value = None
    graph.inputs.append(value)
    return value


def _to_torch(value: Any) -> torch.Tensor:
    from onnx_ir.tensor_adapters import to_torch_dtype

    flat = torch.frombuffer(bytearray(value.tobytes()), dtype=to_torch_dtype(value.dtype))
    return flat.reshape(tuple(value.shape))


def _rename(graph: Any, own: Iterable[Any]) -> None:
    """Give the graph's inputs and outputs names that do not depend on the model."""
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    taken = {value.name for value in values}
    for value in values:
        if value.name and _RESERVED.fullmatch(value.name):
            value.name = next(name for name in _longer(value.name) if name not in taken)
            taken.add(value.name)
    for index, value in enumerate(own):
        value.name = f"in{index}"
    for index, value in enumerate(graph.outputs):
        if value.is_initializer():
            value = graph.outputs[index] = _identity(graph, value)
        value.name = f"out{index}"


def _identity(graph: Any, value: Any) -> Any:
    import onnx_ir

    node = onnx_ir.node("Identity", [value])
    graph.append(node)
    (output,) = node.outputs
    output.shape, output.type = value.shape, value.type
    return output


def _longer(name: str) -> Iterator[str]:
    while True:
        name += "_"
        yield name


def _to_proto(model: Any, weights: Collection[str]) -> onnx.ModelProto:
    """The model as a message, without whatever tells of the code and the machine it came from."""
    import onnx_ir
    from onnx import TensorProto

    proto: onnx.ModelProto = onnx_ir.to_proto(model)
    scrub(proto)
    inputs = list(proto.graph.input)
    del proto.graph.input[:]
    for value in inputs:
        if value.name in weights:
            kind = value.type.tensor_type
            dims = [size.dim_value for size in kind.shape.dim]
            proto.graph.initializer.append(TensorProto(name=value.name, data_type=kind.elem_type, dims=dims))
        else:
            proto.graph.input.append(value)
    return proto


def _reason(error: BaseException) -> str:
    """The innermost reason of the exporter's error, and the operator where it names one."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        found = found.__cause__
    text = " ".join(str(part) for part in chain)
    lines = str(chain[-1]).strip().splitlines()
    line = f"{type(chain[-1]).__name__}: {lines[0][:300] if lines else ''}"
    operator = re.search(r"OpOverload\(op='([^']+)'", text)
    if operator is None or operator[1] in line:
        return line
    return f"{operator[1]}: {line}"
