"""A graph captured as one ``torch.export.ExportedProgram`` in flat form: tensors in, tensors out.

Every backend that starts from a program starts from this one. Plain values of the call are frozen into it, the
tensors of the module stay outside as named constants.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from aitune_hf.backends.base import BuildRequest
from aitune_hf.backends.build_folder import build_folder
from aitune_hf.backends.constants import Constant, live_tensors, memory_key
from aitune_hf.backends.constants import Path as TensorPath
from aitune_hf.backends.extents import envelope_of, input_names
from aitune_hf.backends.module_state import module_restored
from aitune_hf.backends.mutation import written_placeholders
from aitune_hf.backends.quiet import quiet_torch
from aitune_hf.errors import AITuneError, BuildError, GraphBreakException, UntunableError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.graph.structure import Node, flatten, unflattener

__all__ = ["CapturedGraph", "FlatCall", "capture", "capture_problem"]

_PREFIX = "module."
_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "residual",
}


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A graph as a program.

    Attributes:
        program: takes the tensor leaves of the call, returns those of the output. Names in its signature, its
            ``state_dict`` and its ``constants`` are the module's own.
        envelope: the shapes it takes.
        constants: the tensors it takes from outside, those it does not use included.
        residuals: the values of those that do not live on the module, by name.
    """

    program: ExportedProgram
    envelope: ShapeEnvelope
    constants: tuple[Constant, ...]
    residuals: Mapping[str, torch.Tensor]


class Seen:
    """What a trace saw of the output."""

    node: Node | None = None


class FlatCall(nn.Module):
    """A module's call of one graph, with its tensor leaves as positional arguments and a tuple of them as result.

    Args:
        request: whose graph.
        seen: gets the output's structure when it is called. Not an attribute of this module that export would reset.
    """

    def __init__(self, request: BuildRequest, seen: Seen | None = None) -> None:
        super().__init__()
        self.module = request.module
        self.training = request.module.training
        self._seen = seen or Seen()
        self._forward = request.forward
        self._rebuild = unflattener(request.example.input_node)
        self._signature = request.graph.forward_signature
        self._context = request.graph.context
        self._device_type = request.device.type

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the call."""
        args, kwargs = self._signature.unbind(self._rebuild(leaves))
        with self._context.enter(self._device_type):
            output = self._forward(*args, **kwargs)
        node, tensors = flatten(output)
        self._seen.node = node
        return tuple(tensors)


def capture(request: BuildRequest) -> CapturedGraph:
    """Capture the graph of ``request``. Module, RNG and modes are left as found.

    Raises:
        GraphBreakException: if the forward cannot be captured, with the line of the user's code where known.
        BuildError: if it can, but not for the shapes asked for.
    """
    seen = Seen()
    program = _export(FlatCall(request, seen), request, _free_shapes(request))
    assert seen.node is not None
    _check_output(seen.node, request)
    _check_mutation(program, request)
    envelope = envelope_of(program, request)
    if any(extent.scale > 1 for extents in envelope.inputs for extent in extents):
        program = _restated(program, envelope, request)
    constants, residuals = _name_constants(program, request.module)
    return CapturedGraph(program=program, envelope=envelope, constants=constants, residuals=residuals)


def _restated(program: ExportedProgram, envelope: ShapeEnvelope, request: BuildRequest) -> ExportedProgram:
    """The same program with sizes stated as multiples of their symbols, if that works out.

    Where an axis is ``8*s`` rather than an ``s`` that 8 divides, sizes inside simplify, and compiling takes a third less.
    """
    dims = {symbol: Dim(f"d{i}", min=low, max=high) for i, (symbol, (low, high)) in enumerate(envelope.ranges.items())}
    shapes = tuple(
        {
            axis: extent.scale * dims[extent.symbol] + extent.offset
            if (extent.scale, extent.offset) != (1, 0)
            else dims[extent.symbol]
            for axis, extent in enumerate(extents)
            if extent.symbol is not None
        }
        for extents in envelope.inputs
    )
    try:
        restated = _export(FlatCall(request), request, shapes)
        return restated if envelope_of(restated, request) == envelope else program
    except (BuildError, GraphBreakException):
        return program


def capture_problem(
    path: str, module: nn.Module, forward: Callable[..., Any], graph: GraphSpec, sample: Sample
) -> str | None:
    """None if a graph can be captured for the shapes of ``sample``, else why not."""
    request = BuildRequest(
        path=path,
        module=module,
        forward=forward,
        graph=graph,
        example=sample,
        axes=tuple((None,) * leaf.dim() for leaf in sample.inputs),
        workdir=Path(),
    )
    try:
        capture(request)
    except (BuildError, UntunableError) as error:
        return str(error).removeprefix(f"{path}: ")
    return None


def _export(call: FlatCall, request: BuildRequest, shapes: tuple[dict[int, Any], ...]) -> ExportedProgram:
    device = request.device
    forked = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.random.fork_rng(devices=forked),
        module_restored(request.module) as assigned,
        quiet_torch(),
        build_folder(device),
    ):
        # A clone is a normal tensor even where the recorded one was made in inference mode.
        leaves = tuple(leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in request.example.inputs)
        try:
            program = torch.export.export(call, leaves, dynamic_shapes=(shapes,), strict=False)
        except AITuneError:
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise BuildError(f"{request.path}: out of memory while the forward was captured") from error
        except Exception as error:
            raise GraphBreakException(
                f"{request.path}: the forward cannot be captured as one graph: {_reason(error)}"
            ) from error
    if assigned:
        raise GraphBreakException(
            f"{request.path}: the forward keeps tensors of a call on the module ({', '.join(assigned)}). "
            "Tune the blocks inside it."
        )
    return program


def _free_shapes(request: BuildRequest) -> tuple[dict[int, Any], ...]:
    # AUTO lets export find how axes relate; a named Dim would have to state every relation beforehand.
    return tuple(
        {
            axis: Dim.AUTO(min=wanted.min, max=wanted.max)
            for axis, wanted in enumerate(ranges)
            if wanted is not None and wanted.min < wanted.max
        }
        for ranges in request.axes
    )


def _check_output(node: Node, request: BuildRequest) -> None:
    got, want = node.to_json(), request.graph.output_spec.node.to_json()
    if got != want:
        raise GraphBreakException(
            f"{request.path}: while it is captured the forward returns {_outline(node)}, but "
            f"{_outline(request.graph.output_spec.node)} was recorded"
        )


def _outline(node: Node) -> str:
    leaves = [f"{place}={leaf.value!r}" if leaf.kind == "value" else f"{place}" for place, leaf in node.leaves()]
    return f"{node.type_name or node.kind}({', '.join(leaves)[:120]})"


def _check_mutation(program: ExportedProgram, request: BuildRequest) -> None:
    places = dict(zip(map(str, program.graph_signature.user_inputs), input_names(request), strict=True))
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target}
    written = dict.fromkeys(name for part in program.graph_module.modules() for name in written_placeholders(part))
    if written:
        names = ", ".join(places.get(name) or str(targets.get(name, name)).removeprefix(_PREFIX) for name in written)
        raise GraphBreakException(
            f"{request.path}: the forward writes to tensors that outlive the call ({names}). Tune the blocks inside it."
        )


def _name_constants(
    program: ExportedProgram, module: nn.Module
) -> tuple[tuple[Constant, ...], dict[str, torch.Tensor]]:
    """Give the program's constants the module's own names, and tell which of them live on the module."""
    for table in (program.state_dict, program.constants):
        for name in [name for name in table if name.startswith(_PREFIX)]:
            table[name.removeprefix(_PREFIX)] = table.pop(name)
    attributes: dict[Any, list[TensorPath]] = {}
    for at, tensor in live_tensors(module):
        attributes.setdefault(memory_key(tensor), []).append(at)
    found: list[tuple[str, str, TensorPath, torch.Tensor]] = []
    path: TensorPath
    for spec in program.graph_signature.input_specs:
        kind = _KINDS.get(spec.kind)
        if kind is None:
            continue
        assert spec.target is not None
        name = spec.target = spec.target.removeprefix(_PREFIX)
        tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
        path = tuple(name.split("."))
        if kind == "residual":
            # From here on it is an ordinary constant with a name: compilers rename what is not a buffer.
            spec.kind, spec.persistent = InputKind.BUFFER, False
            path = next(iter(attributes.get(memory_key(tensor), [()])))
            kind = "attribute" if path else "residual"
        found.append((name, kind, path, tensor))
    shared: dict[Any, list[TensorPath]] = {}
    for _, kind, at, tensor in found:
        if kind != "residual":
            shared.setdefault(memory_key(tensor), []).append(at)
    constants = tuple(
        Constant.of(
            name,
            kind,  # type: ignore[arg-type]
            at,
            tensor,
            [other for other in shared.get(memory_key(tensor), []) if other != at],
        )
        for name, kind, at, tensor in found
    )
    return constants, {name: tensor.detach() for name, kind, _, tensor in found if kind == "residual"}


def _reason(error: BaseException) -> str:
    """The first line of an error, and the line of the model's code it came from."""
    lines = str(error).strip().splitlines()
    text = (lines[0] if lines else type(error).__name__)[:200].rstrip(". ")
    outside = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((str(_TORCH), str(_HERE))) and Path(frame.filename).is_file()
    ]
    if not outside:
        return text
    frame = outside[-1]
    code = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{text}, at {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {code[:100]}"


_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__).parent
