"""The exact key of a call: everything about it that may change which engine may answer.

It is computed on every call of a tuned module, so it is written for speed: well under 1 µs per tensor. Two calls of
equal key are interchangeable for an engine: same spelling, same nesting, same plain values, tensors of the same shape,
dtype, device, strides and flags, and the same object in the same places. Different keys may still belong to one graph;
that is looked up once per key.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from aitune_hf.graph.call_context import autocast_dtypes
from aitune_hf.graph.structure import container_kind
from aitune_hf.graph.torch_state import any_autocast_enabled
from aitune_hf.graph.values import ATOM_TYPES, enum_label

__all__ = ["call_key"]

_is_grad_enabled = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_strided = torch.strided
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
        return None  # RuntimeError: a nested tensor has no shape, a structure contains itself.
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        # f(x, x) must not share a key with f(x, y): what is worked out for one may read x twice.
        first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
        parts.append(tuple([first[id(tensor)] for tensor in tensors]))
    autocast = tuple(autocast_dtypes().items()) if any_autocast_enabled() else None
    return (len(args), training, _is_grad_enabled(), _is_inference(), autocast, tuple(parts))


def _part(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    cls = type(value)
    if cls is _Tensor or cls is _Parameter:
        if value.layout is not _strided:
            raise _Unkeyable
        tensors.append(value)
        # Strides follow from the shape where they are the usual ones, and to ask for that takes half the time.
        stride = None if value.is_contiguous() else value.stride()
        dtype = value.dtype
        lazy = (value.is_neg(), value.is_conj()) if dtype.is_complex else value.is_neg()
        if value.is_cpu:
            return (value.shape, dtype, stride, value.requires_grad, lazy)
        device = value.device
        aligned = value.data_ptr() % 16 if value.is_cuda else 0
        return (value.shape, dtype, stride, value.requires_grad, lazy, device, aligned)
    if cls in _PLAIN_ATOMS:
        return (cls, value)
    if cls is tuple or cls is list:
        return (cls, *[_part(child, tensors) for child in value])
    if cls is dict:
        return _mapping_part(value, cls, tensors)
    return _rare_part(value, cls, tensors)


def _mapping_part(value: Mapping[Any, Any], cls: type, tensors: list[torch.Tensor]) -> Hashable:
    parts: list[Any] = [cls]
    for name, child in value.items():
        kind = type(name)
        if kind is not str and kind is not int:
            raise _Unkeyable
        parts.append(name)
        parts.append(_part(child, tensors))
    return tuple(parts)


def _rare_part(value: Any, cls: type, tensors: list[torch.Tensor]) -> Hashable:
    if cls is float:
        return (cls, value.hex())
    if cls is complex:
        return (cls, value.real.hex(), value.imag.hex())
    if isinstance(value, enum.Enum):
        return (cls, enum_label(value))
    if cls is torch.Size:
        return (cls, *[_part(size, tensors) for size in value])
    if cls is slice or cls is range:
        found = len(tensors)
        part = (cls, *[_part(child, tensors) for child in (value.start, value.stop, value.step)])
        if len(tensors) > found:
            raise _Unkeyable
        return part
    kind = container_kind(value, cls)
    if kind == "namedtuple":
        return (cls, *[_part(child, tensors) for child in value])
    if kind is not None:
        return _mapping_part(value, cls, tensors)
    raise _Unkeyable
