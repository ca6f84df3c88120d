"""What a graph must be like for any compiler of this package to take it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from aitune_hf.backends.base import BuildRequest

__all__ = ["elsewhere", "unmet_requirement"]


def unmet_requirement(request: BuildRequest, devices: Collection[str] = ("cpu", "cuda")) -> str | None:
    """None if the graph meets them all, else the first that it does not.

    Args:
        request: whose graph.
        devices: types of device that engines are made for.
    """
    graph, device = request.graph, request.device
    if not graph.input_spec.tensors or not graph.output_spec.tensors:
        return "a graph needs at least one tensor input and one tensor output"
    if device.type not in devices:
        return f"it runs on {device.type}; engines are made for {' and '.join(devices)}"
    opaque = graph.input_spec.opaque | graph.output_spec.opaque
    if opaque:
        place, kind = next(iter(opaque.items()))
        return f"{place} is a {kind}, neither a tensor nor a plain value"
    if graph.context.needs_grad:
        return "its result needs gradients"
    if graph.context.training or any(part.training for part in request.module.modules()):
        return "it is, or a part of it is, in training mode"
    return _unfit_tensor(request, device)


def elsewhere(request: BuildRequest, device: str, constants: bool) -> str | None:
    """None if what a graph reads lies on devices of one type, else what does not.

    For engines that read memory by its address: an address of the host is none of the GPU's.

    Args:
        request: whose graph.
        device: the type.
        constants: look at what the graph takes from the module too: parameters, buffers, and what a capture has found.
    """
    module = request.module
    places = zip(request.graph.input_spec.tensors, request.example.inputs, strict=True)
    found = [(f"input {place}", tensor.device.type) for place, tensor in places]
    if constants:
        owned = [*module.named_parameters(), *module.named_buffers()]
        found += [(name, tensor.device.type) for name, tensor in owned]
        found += [(one.name, one.device_type) for graph in request.captured.values() for one in graph.constants]
    return next((f"{name} is on {where}, and has to be on {device}" for name, where in found if where != device), None)


def _unfit_tensor(request: BuildRequest, device: torch.device) -> str | None:
    module = request.module
    owned = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in (*((f"input {i}", t) for i, t in enumerate(request.example.inputs)), *owned):
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return f"{name} is a {type(tensor).__name__}, not a plain tensor"
        if tensor.is_meta:
            return f"{name} is on the meta device (offloaded?)"
        if tensor.is_complex() or tensor.is_quantized or tensor.layout is not torch.strided:
            return f"{name} is {tensor.dtype} of layout {tensor.layout}"
    for name, tensor in owned:
        # A buffer of one number is used from the host.
        if tensor.device != device and tensor.numel() > 1:
            return f"{name} is on {tensor.device}, the inputs are on {device} (offloaded, or spread over devices?)"
    return None
