"""A graph captured as one ``torch.export.ExportedProgram`` in flat form: tensors in, tensors out.

Every backend that starts from a program starts from this one. Plain values of the call are frozen into it, the
tensors of the module stay outside as named constants.
"""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from aitune_hf.backends.base import BuildRequest
from aitune_hf.backends.constants import Constant, live_tensors, memory_key
from aitune_hf.backends.constants import Path as TensorPath
from aitune_hf.backends.extents import envelope_of
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
    program = _export(FlatCall(request, seen), request)
    assert seen.node is not None
    _check_output(seen.node, request)
    _check_mutation(program, request)
    constants, residuals = _name_constants(program, request.module)
    return CapturedGraph(
        program=program, envelope=envelope_of(program, request), constants=constants, residuals=residuals
    )


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


def _export(call: FlatCall, request: BuildRequest) -> ExportedProgram:
    device = request.device
    forked = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.random.fork_rng(devices=forked),
        _module_restored(request) as assigned,
        quiet_torch(),
    ):
        # A clone is a normal tensor even where the recorded one was made in inference mode.
        leaves = tuple(leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in request.example.inputs)
        try:
            program = torch.export.export(call, leaves, dynamic_shapes=(_dynamic_shapes(request),), strict=False)
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


def _dynamic_shapes(request: BuildRequest) -> tuple[dict[int, Any], ...]:
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
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    changed += getattr(signature, "parameters_to_mutate", {}).values()
    if changed:
        names = ", ".join(name.removeprefix(_PREFIX) for name in changed)
        raise GraphBreakException(f"{request.path}: the forward writes to tensors it does not own ({names})")


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


@contextlib.contextmanager
def _module_restored(request: BuildRequest) -> Iterator[list[str]]:
    """Put every attribute of the module tree back afterwards.

    Yields:
        A list that is filled at the end with the attributes that had got hold of a tracing tensor.
    """
    before = [(name, part, _snapshot(part)) for name, part in request.module.named_modules()]
    assigned: list[str] = []
    try:
        yield assigned
    finally:
        for name, part, (attributes, tables) in before:
            for key, value in vars(part).items():
                if attributes.get(key, part) is not value and _holds_fake(value):
                    assigned.append(f"{name}.{key}" if name else key)
            part.__dict__.clear()
            part.__dict__.update(attributes)
            for key, table in tables.items():
                live = part.__dict__[key]
                if live.keys() != table.keys() or any(live[k] is not table[k] for k in table):
                    live.clear()
                    live.update(table)


def _snapshot(part: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    attributes = dict(vars(part))
    return attributes, {key: dict(attributes[key]) for key in ("_parameters", "_buffers", "_modules")}


def _holds_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, (list, tuple)):
        return any(map(_holds_fake, value))
    if isinstance(value, Mapping):
        return any(map(_holds_fake, value.values()))
    return isinstance(value, FakeTensor)


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
