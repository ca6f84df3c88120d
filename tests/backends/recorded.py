"""What the tests of backends are made of: requests from a module and a few of its calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.base import AxisRange, BuildRequest, BuildResult, LoadRequest
from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.sample_metadata import SampleMetadata
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.structure import flatten, unflattener

Call = Mapping[str, Any]


def request_for(
    module: nn.Module,
    calls: Sequence[Call],
    workdir: Path,
    ranges: Mapping[tuple[str, int], AxisRange] | None = None,
    context: CallContext | None = None,
    **options: Any,
) -> BuildRequest:
    """A request for the graph of ``calls`` (keyword arguments); the first one is the example.

    ``ranges`` tells which axes vary: (input, axis) → range.
    """
    signature = ForwardSignature.from_callable(module.forward)
    graph: GraphSpec | None = None
    example: Sample | None = None
    context = context or CallContext()
    for call in calls:
        bound = signature.bind((), call)
        with torch.no_grad(), context.enter("cpu"):
            output = module(**call)
        inputs, outputs = SampleMetadata.of(bound), SampleMetadata.of(output)
        if graph is None or example is None:
            graph = GraphSpec("graph0", inputs, outputs, signature, context=context)
            node, leaves = flatten(bound)
            out_node, out_leaves = flatten(output)
            example = Sample(inputs=leaves, input_node=node, outputs=out_leaves, output_node=out_node, context=context)
        else:
            graph.update_shapes_seen(inputs, outputs)
    assert graph is not None
    assert example is not None
    wanted = ranges or {}
    axes = tuple(
        tuple(wanted.get((str(place), axis)) for axis in range(spec.rank))
        for place, spec in graph.input_spec.tensors.items()
    )
    workdir.mkdir(parents=True, exist_ok=True)
    return BuildRequest(
        path="model",
        module=module,
        forward=module.forward,
        graph=graph,
        example=example,
        axes=axes,
        workdir=workdir,
        options=options,
    )


def load_request(request: BuildRequest, result: BuildResult, module: nn.Module, threads: int = 1) -> LoadRequest:
    """The request to load what was built, for ``module``."""
    return LoadRequest(
        path="model",
        module=module,
        folder=request.workdir,
        engine=result.engine,
        device=torch.device("cpu"),
        threads=threads,
    )


def run(engine: Any, request: BuildRequest, call: Call) -> Any:
    """What an engine answers to a call, in the structure of the recorded output."""
    _, leaves = flatten(request.graph.forward_signature.bind((), call))
    outputs = engine([leaf.contiguous() for leaf in leaves])
    return unflattener(request.graph.output_spec.node)(outputs)


def eager(module: nn.Module, call: Call) -> list[torch.Tensor]:
    """The tensor leaves of eager's answer."""
    with torch.no_grad():
        leaves: list[torch.Tensor] = flatten(module(**call))[1]
    return leaves


def randomized(module: nn.Module, seed: int) -> nn.Module:
    """A deep copy with other weights, all of them random: none is left at one, zero or tied by accident."""
    twin = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.empty_like(tensor).uniform_(-0.5, 0.5, generator=generator)
    return twin
