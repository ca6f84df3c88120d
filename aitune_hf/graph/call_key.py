"""The exact key of a call: everything about it that may change which engine may answer.

It is computed on every call of a tuned module, so it is written for speed: about 1 µs per tensor. Two calls of equal
key are interchangeable for an engine: same spelling, same nesting, same plain values, and tensors of the same shape,
dtype, device, strides and flags. Different keys may still belong to one graph; that is looked up once per key.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from aitune_hf.graph.values import ATOM_TYPES

__all__ = ["call_key"]

_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_is_inference = torch.is_inference_mode_enabled
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
# Values that are equal to a value of another kind, or to another value of their own kind, are keyed by more.
_PLAIN_ATOMS = ATOM_TYPES - {float, complex}


class _Unkeyable(Exception):
    """The call holds something no engine can take."""


def call_key(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, tensors: list[torch.Tensor]
) -> Hashable | None:
    """The key of a call, or None when it holds an object that no engine can take.

    Args:
        args: positional arguments.
        kwargs: keyword arguments, as given.
        training: the module's mode.
        tensors: an empty list; the call's tensors are appended to it in the order in which the key meets them.
    """
    try:
        parts: list[Any] = [_part(value, tensors) for value in args]
        for name, value in kwargs.items():
            parts.append(name)
            parts.append(_part(value, tensors))
    except (_Unkeyable, RuntimeError):
        return None  # RuntimeError: a sparse or nested tensor has no strides.
    device_type = tensors[0].device.type if tensors else "cpu"
    autocast = torch.get_autocast_dtype(device_type) if _is_autocast_enabled(device_type) else None
    return (len(args), training, _is_grad_enabled(), _is_inference(), autocast, tuple(parts))


def _part(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    cls = type(value)
    if cls is _Tensor or cls is _Parameter:
        tensors.append(value)
        device = value.device
        aligned = value.data_ptr() % 16 if device.type == "cuda" else 0
        stride, flags = value.stride(), (value.requires_grad, value.is_neg(), value.is_conj(), aligned)
        return (value.shape, value.dtype, device, stride, flags)
    if cls in _PLAIN_ATOMS:
        return (cls, value)
    if cls is tuple or cls is list:
        return (cls, *[_part(child, tensors) for child in value])
    if isinstance(value, Mapping):
        parts: list[Any] = [cls]
        for name, child in value.items():
            parts.append((type(name), name))
            parts.append(_part(child, tensors))
        return tuple(parts)
    return _rare_part(value, cls, tensors)


def _rare_part(value: Any, cls: type, tensors: list[torch.Tensor]) -> Hashable:
    if cls is float:
        return (cls, value.hex())
    if cls is complex:
        return (cls, value.real.hex(), value.imag.hex())
    if isinstance(value, enum.Enum):
        return (cls, value.name)
    if isinstance(value, tuple) and (hasattr(cls, "_fields") or cls is torch.Size):
        return (cls, *[_part(child, tensors) for child in value])
    if cls is slice or cls is range:
        return (cls, *[_part(child, tensors) for child in (value.start, value.stop, value.step)])
    raise _Unkeyable
