"""A build request as bytes, for the child process that is to build it.

The module itself stays behind: its class may not be importable elsewhere, and its weights may be large. What travels is
the captured program and plain data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.base import BuildRequest
from aitune_hf.backends.constants import Constant
from aitune_hf.backends.export import CapturedGraph
from aitune_hf.backends.probes import values_of, with_probes, without_weights
from aitune_hf.backends.quiet import quiet_torch
from aitune_hf.errors import BuildError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.graph.structure import Node

__all__ = ["pack_request", "unpack_request"]

#: Seed of the weights that a program has in the child.
SEED = 1


def pack_request(request: BuildRequest) -> bytes:
    """All of ``request`` but the module; with its weights only where they become part of the engine.

    Raises:
        BuildError, GraphBreakException: if the graph cannot be captured or written.
    """
    graph = request.capture()
    baked = request.weights == "baked"
    fields = {
        "path": request.path,
        "graph": request.graph.to_dict(),
        "axes": request.axes,
        "workdir": str(request.workdir),
        "options": dict(request.options),
        "weights": request.weights,
        "example": _pack_sample(request.example),
        "samples": [_pack_sample(sample) for sample in request.samples] if baked else [],
        "captured": _pack_graph(graph if baked else without_weights(graph), request.path),
    }
    return pickle.dumps(fields)


def unpack_request(data: bytes) -> BuildRequest:
    """What :func:`pack_request` packed, with random weights unless they are to be baked."""
    fields: Mapping[str, Any] = pickle.loads(data)  # noqa: S301 - from the parent process, through a pipe of its own
    graph = _unpack_graph(fields["captured"])
    if fields["weights"] != "baked":
        graph = with_probes(graph, SEED)
    return BuildRequest(
        path=fields["path"],
        module=nn.Module().eval(),
        forward=_left_behind,
        graph=GraphSpec.from_dict(fields["graph"]),
        example=_unpack_sample(fields["example"]),
        axes=fields["axes"],
        workdir=Path(fields["workdir"]),
        options=fields["options"],
        weights=fields["weights"],
        samples=[_unpack_sample(item) for item in fields["samples"]],
        captured={fields["axes"]: graph},
    )


def _left_behind(*args: Any, **kwargs: Any) -> Any:
    raise BuildError("an isolated backend has the captured program only: the module stays in the parent process")


def _pack_graph(graph: CapturedGraph, path: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    try:
        with quiet_torch():
            torch.export.save(graph.program, buffer)
    except Exception as error:
        raise BuildError(
            f"{path}: the captured program cannot be written for a build in a child process: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        ) from error
    return {
        "program": buffer.getvalue(),
        "envelope": graph.envelope.to_dict(),
        "constants": [constant.to_json() for constant in graph.constants],
    }


def _unpack_graph(fields: Mapping[str, Any]) -> CapturedGraph:
    with quiet_torch():
        program = torch.export.load(io.BytesIO(fields["program"]))
    constants = tuple(Constant.from_json(item) for item in fields["constants"])
    values = values_of(program)
    return CapturedGraph(
        program=program,
        envelope=ShapeEnvelope.from_dict(fields["envelope"]),
        constants=constants,
        residuals={constant.name: values[constant.name] for constant in constants if constant.kind == "residual"},
    )


def _pack_sample(sample: Sample) -> dict[str, Any]:
    return {
        "inputs": [leaf.detach().contiguous() for leaf in sample.inputs],
        "input_node": sample.input_node.to_json(),
        "outputs": [leaf.detach().contiguous() for leaf in sample.outputs],
        "output_node": sample.output_node.to_json(),
        "context": sample.context,
    }


def _unpack_sample(fields: Mapping[str, Any]) -> Sample:
    # Classes of the user's outputs are not needed to build, and importing them may take long.
    return Sample(
        **{
            **fields,
            "input_node": Node.from_json(fields["input_node"]),
            "output_node": Node.from_json(fields["output_node"]),
        }
    )
