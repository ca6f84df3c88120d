"""Programs whose weights are random: what an engine without weights is made from.

A compiler for data formats (OpenVINO, ONNX) writes the weights it is given into the file. To learn which of the file's
constants are which weights, it is given *probes*: random tensors, distinct per weight, never the user's, in which equal
values (norms of all ones, biases of zeros) could not be told apart.

Not every tensor a program takes is a weight. Tables that the module computes from its configuration (positions,
rotary frequencies, masks) are structure: they are *pinned*, that is kept with their values, and an engine made from
them is good only for modules that have the same.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from aitune_hf.backends.constants import Constant

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from aitune_hf.backends.export import CapturedGraph

__all__ = ["pinned_constants", "tensor_digest", "values_of", "with_probes", "without_weights"]


def pinned_constants(graph: CapturedGraph) -> frozenset[str]:
    """Names of the constants that are structure: all but parameters and saved buffers of floating point."""
    saved = {
        str(spec.target)
        for spec in graph.program.graph_signature.input_specs
        if spec.target is not None and spec.persistent is not False
    }
    values = values_of(graph.program)
    return frozenset(
        constant.name
        for constant in graph.constants
        if constant.kind not in ("parameter", "buffer")
        or constant.name not in saved
        or not values[constant.name].is_floating_point()
    )


def values_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Every tensor that a program takes from outside, by name."""
    return {**program.constants, **program.state_dict}


def without_weights(graph: CapturedGraph) -> CapturedGraph:
    """The same program with empty tensors for weights: small enough to be sent to another process.

    It cannot be run; :func:`with_probes` makes it whole again.
    """
    pinned = pinned_constants(graph)
    empty = {
        constant.name: torch.empty(0, dtype=getattr(torch, constant.dtype))
        for constant in graph.constants
        if constant.name not in pinned
    }
    return _with_values(graph, empty)


def with_probes(graph: CapturedGraph, seed: int) -> CapturedGraph:
    """The same program with probes for weights; other seeds give other probes.

    Vectors lie around one, so that what must be positive (variances, scales) is; matrices keep the size of what passes
    through them, so that the program can be run.
    """
    pinned = pinned_constants(graph)
    return _with_values(
        graph, {constant.name: _probe(constant, seed) for constant in graph.constants if constant.name not in pinned}
    )


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 over a tensor's dtype, shape and values."""
    plain = tensor.detach().cpu().contiguous()
    head = f"{plain.dtype}{tuple(plain.shape)}".encode()
    digest = hashlib.sha256(head)
    digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _probe(constant: Constant, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(f"{seed}:{constant.name}".encode()).digest()[:8], "big") >> 1
    )
    fan_in = math.prod(constant.shape[1:])
    low, high = (0.5, 1.5) if len(constant.shape) < 2 else (-math.sqrt(3 / fan_in), math.sqrt(3 / fan_in))
    drawn = torch.rand(constant.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    # Strides are part of what a program was traced with.
    probe = torch.empty_strided(constant.shape, constant.stride, dtype=getattr(torch, constant.dtype))
    return probe.copy_(drawn)


def _with_values(graph: CapturedGraph, values: Mapping[str, torch.Tensor]) -> CapturedGraph:
    old = graph.program
    program = copy.copy(old)
    # ExportedProgram has no public way to be given other tensors; a test holds that this one works.
    program._state_dict = dict(old.state_dict)
    program._constants = dict(old.constants)
    for name, value in values.items():
        if name in program.state_dict:
            is_parameter = isinstance(program.state_dict[name], nn.Parameter)
            program.state_dict[name] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        else:
            program.constants[name] = value
    return replace(graph, program=program)
