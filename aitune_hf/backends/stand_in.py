"""A module that has nothing but tensors where an engine looks for its constants.

For native engines that read live tensors, before their code is trusted. An engine of data runs no code of its author's
and may be good only for the tables that it was built with; on this module, whose tables are zeros, it would be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.constants import Constant, Path
from aitune_hf.graph.graph_spec import GraphSpec

__all__ = ["inputs_for", "stand_in"]


def stand_in(constants: Iterable[Mapping[str, Any]], device: torch.device) -> nn.Module:
    """A module with random tensors of the given schema (JSON of :class:`Constant`)."""
    root = nn.Module()
    for constant in map(Constant.from_json, constants):
        if constant.kind == "residual":
            continue
        tensor = _random(constant, device)
        for path in (constant.path, *constant.aliases):
            _put(root.__dict__, path, tensor)
    return root


def inputs_for(graph: GraphSpec, shapes: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Inputs of these shapes: zeros where the graph takes integers, which may be indices, else random numbers."""
    found = []
    for spec, shape in zip(graph.input_spec.tensors.values(), shapes, strict=True):
        where = device if spec.device_type == device.type else torch.device(spec.device_type)
        zeros = torch.zeros(tuple(shape), dtype=spec.dtype, device=where)
        found.append(zeros.normal_() if zeros.is_floating_point() else zeros)
    return found


def _random(constant: Constant, device: torch.device) -> torch.Tensor:
    where = device if constant.device_type == device.type else torch.device(constant.device_type)
    tensor = torch.empty_strided(constant.shape, constant.stride, dtype=getattr(torch, constant.dtype), device=where)
    return tensor.uniform_(0.5, 1.5) if tensor.is_floating_point() else tensor.zero_()


def _put(table: dict[Any, Any], path: Path, tensor: torch.Tensor) -> None:
    for step in path[:-1]:
        table = table.setdefault(step, {})
    table[path[-1]] = tensor
