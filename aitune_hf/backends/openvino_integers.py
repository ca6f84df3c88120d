"""Numbers that OpenVINO cannot hold: where a program has some, it is declined rather than computed wrong.

On the CPU OpenVINO computes most integer operators in float32, which holds integers of up to 24 bits, and float64 as
float32, and says so nowhere. So the range of every integer of a program is worked out here, from the sizes of its
envelope, the tables of the module and what its inputs may hold; a program in which one may leave 24 bits is declined.
What the inputs may hold is part of the engine, which refuses calls with anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.integer_range import Call, IntegerRange, hull, size_ranges
from aitune_hf.backends.integer_rules import range_of_call
from aitune_hf.backends.openvino_engine import OpenVINOEngine
from aitune_hf.backends.probes import values_of
from aitune_hf.errors import BuildError, EngineLoadError, UnfitInputError

if TYPE_CHECKING:
    from aitune_hf.backends.export import CapturedGraph

__all__ = ["LimitedEngine", "check_numbers"]

#: Integers up to this one are exact in float32.
LARGEST = 1 << 24
#: What an input of integers may hold: more than any vocabulary has, and room for sums of a few.
_INPUT = IntegerRange(-(1 << 22), 1 << 22)
#: What an input may hold whose example has nothing but these, where the program is right for no wider range.
_FLAG = IntegerRange(0, 1)
_WIDE = (torch.int32, torch.int64)


class LimitedEngine(OpenVINOEngine):
    """An engine that refuses integers for which it was not found to be right."""

    def __init__(self, request: LoadRequest) -> None:
        try:
            self._limits = [
                None if limit is None else IntegerRange(*map(int, limit)) for limit in request.engine["integers"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineLoadError(f"{request.path}: the engine's description cannot be read: {error!r}") from error
        super().__init__(request)

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`.

        Raises:
            UnfitInputError: if an input holds an integer out of its limits.
        """
        for tensor, limit in zip(inputs, self._limits, strict=True):
            if limit is not None and tensor.numel():
                low, high = torch.aminmax(tensor)
                if int(low) < limit.low or int(high) > limit.high:
                    # Without the numbers: calls are counted by what is said here.
                    raise UnfitInputError(
                        "an input holds an integer too large; OpenVINO computes right with those from "
                        f"{limit.low} to {limit.high}"
                    )
        return super().__call__(inputs)


def check_numbers(graph: CapturedGraph, example: Sequence[torch.Tensor], where: str) -> list[tuple[int, int] | None]:
    """Make sure that OpenVINO can hold each number that a decomposed program computes.

    Args:
        graph: the program.
        example: the inputs it was recorded with.
        where: the module's path, for messages.

    Returns:
        Per input the smallest and the largest integer that it may hold; None where it holds no integers.

    Raises:
        BuildError: naming the first operator with a number that OpenVINO cannot hold.
    """
    node = _float64(graph)
    if node is not None:
        raise BuildError(
            f"{where}: {_named(node)} computes in float64, which OpenVINO computes as float32 on the CPU; "
            "use another backend (inductor, onnxruntime), or compute in float32"
        )
    wide = [tensor.dtype in _WIDE for tensor in example]
    plain = [_INPUT if is_wide else None for is_wide in wide]
    flags = [
        _FLAG if is_wide and _has_flags(tensor) else own
        for is_wide, tensor, own in zip(wide, example, plain, strict=True)
    ]
    problem = None
    for limits in (plain, flags):
        too_large = _first_too_large(graph, limits)
        if too_large is None:
            return [None if limit is None else (limit.low, limit.high) for limit in limits]
        problem = problem or too_large
    assert problem is not None
    culprit, reached = problem
    raise BuildError(
        f"{where}: integers of {_named(culprit)} may lie between {reached.low} and {reached.high}, and OpenVINO computes "
        "with no more than 24 bits of an integer on the CPU; use another backend (inductor, onnxruntime)"
    )


def _first_too_large(
    graph: CapturedGraph, limits: Sequence[IntegerRange | None]
) -> tuple[fx.Node, IntegerRange] | None:
    """The first node whose integers may not be exact, and what they may be."""
    sizes = size_ranges(graph.program, graph.envelope)
    ranges: dict[fx.Node, Any] = _given(graph, limits)
    for node in graph.program.graph.nodes:
        if node.op != "call_function":
            continue
        found = range_of_call(Call(node=node, ranges=ranges, sizes=sizes, unknown=_INPUT))
        ranges[node] = found
        reached = hull(found)
        if reached is not None and not -LARGEST <= reached.low <= reached.high <= LARGEST:
            return node, reached
    return None


def _given(graph: CapturedGraph, limits: Sequence[IntegerRange | None]) -> dict[fx.Node, Any]:
    """What inputs and constants may hold."""
    signature, values = graph.program.graph_signature, values_of(graph.program)
    inputs = dict(zip(signature.user_inputs, limits, strict=True))
    targets = {spec.arg.name: str(spec.target) for spec in signature.input_specs if spec.target is not None}
    found: dict[fx.Node, Any] = {}
    for node in graph.program.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in inputs:
            found[node] = inputs[node.name]
        elif node.name in targets:
            found[node] = _held(values[targets[node.name]])
    return found


def _held(tensor: torch.Tensor) -> IntegerRange | None:
    if tensor.dtype not in _WIDE:
        return None
    return IntegerRange(*(int(end) for end in torch.aminmax(tensor))) if tensor.numel() else IntegerRange(0, 0)


def _has_flags(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _float64(graph: CapturedGraph) -> fx.Node | None:
    """The first node that computes tensors in float64. Single numbers lose nothing that their users would keep."""
    given = set(graph.program.graph_signature.user_inputs)
    live: set[fx.Node] = set()
    node: fx.Node
    for node in graph.program.graph.nodes:
        if node.name in given or any(source in live for source in node.all_input_nodes):
            live.add(node)
        if node.op != "call_function" or not any(_tensors(source) for source in node.all_input_nodes):
            continue
        if any(tensor.dtype is torch.float64 and (node in live or tensor.dim()) for tensor in _tensors(node)):
            return node
    return None


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def _named(node: fx.Node) -> str:
    trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
    line = f" ({trace[-1].strip()})" if trace else ""
    return f"{node.target}{line}"
