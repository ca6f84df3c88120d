"""Python values as JSON: the non-tensor leaves of a call, exact and without pickle."""

from __future__ import annotations

import enum
from typing import Any

import torch

__all__ = ["ATOM_TYPES", "EnumName", "decode_value", "encode_value", "enum_label", "is_value", "same_value"]

#: Exact types whose instances are compared by value. Subclasses (other than enums) are opaque.
ATOM_TYPES: frozenset[type] = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        type(...),
    }
)
_TORCH_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def is_value(leaf: object) -> bool:
    """True when ``leaf`` is a plain value that a graph can carry by itself."""
    cls = type(leaf)
    if cls is slice:
        return is_value(leaf.start) and is_value(leaf.stop) and is_value(leaf.step)  # type: ignore[attr-defined]
    if cls is torch.Size:
        return all(type(size) is int for size in leaf)  # type: ignore[attr-defined]
    return cls in ATOM_TYPES or cls is range or isinstance(leaf, (enum.Enum, EnumName))


def enum_label(member: enum.Enum) -> str:
    """A member's name; for combined flags without one (an empty flag, unknown bits), its value."""
    name: str | None = member.name  # Typed as never None, but see above.
    return repr(member.value) if name is None else name


def encode_value(value: Any) -> dict[str, Any]:
    """Encode one value as ``{"t": type, "v": JSON}``; floats keep every bit, enums their class name.

    Raises:
        TypeError: if ``is_value(value)`` is false.
    """
    if isinstance(value, EnumName):
        return {"t": "enum", "v": [value.cls, value.member]}
    if isinstance(value, enum.Enum):
        cls = type(value)
        return {"t": "enum", "v": [f"{cls.__module__}:{cls.__qualname__}", enum_label(value)]}
    if isinstance(value, (slice, range)):
        parts = [value.start, value.stop, value.step]
        return {"t": type(value).__name__, "v": [encode_value(part) for part in parts]}
    if isinstance(value, torch.Size):
        return {"t": "size", "v": list(value)}
    kind = type(value)
    if kind not in ATOM_TYPES:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a plain value")
    if value is None or value is ...:
        return {"t": "none" if value is None else "ellipsis", "v": None}
    if isinstance(value, float):
        return {"t": "float", "v": value.hex()}
    if isinstance(value, complex):
        return {"t": "complex", "v": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes):
        return {"t": "bytes", "v": value.hex()}
    if isinstance(value, _TORCH_NAMED):
        return {"t": kind.__name__, "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"t": "device", "v": value.type}
    return {"t": kind.__name__, "v": value}


def decode_value(data: dict[str, Any]) -> Any:
    """Inverse of :func:`encode_value`, but for enums and device indices.

    An enum comes back as :class:`EnumName`, which compares equal to the member it names: no class is imported
    because a file names it. A device comes back without its index, which is never stored.

    Raises:
        ValueError: if the type is unknown, or torch has nothing of that name.
    """
    kind, raw = data["t"], data["v"]
    if kind in ("bool", "int", "str"):
        return raw
    if kind in ("none", "ellipsis"):
        return None if kind == "none" else ...
    if kind == "float":
        return float.fromhex(raw)
    if kind == "complex":
        return complex(float.fromhex(raw[0]), float.fromhex(raw[1]))
    if kind == "bytes":
        return bytes.fromhex(raw)
    if kind == "device":
        return torch.device(raw)
    if kind in ("dtype", "layout", "memory_format"):
        named = getattr(torch, raw, None)
        if not isinstance(named, _TORCH_NAMED) or type(named).__name__ != kind:
            raise ValueError(f"torch has no {kind} {raw!r}")
        return named
    if kind == "size":
        return torch.Size(raw)
    if kind in ("slice", "range"):
        start, stop, step = (decode_value(part) for part in raw)
        return slice(start, stop, step) if kind == "slice" else range(start, stop, step)
    if kind == "enum":
        return EnumName(raw[0], raw[1])
    raise ValueError(f"unknown value type {kind!r}")


class EnumName:
    """The name of an enum member read from a file; equal to the member itself."""

    __slots__ = ("cls", "member")

    def __init__(self, cls: str, member: str) -> None:
        self.cls = cls
        self.member = member

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EnumName):
            return (self.cls, self.member) == (other.cls, other.member)
        if isinstance(other, enum.Enum):
            kind = type(other)
            return (self.cls, self.member) == (f"{kind.__module__}:{kind.__qualname__}", enum_label(other))
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.cls, self.member))

    def __repr__(self) -> str:
        return f"EnumName({self.cls!r}, {self.member!r})"


def same_value(a: Any, b: Any) -> bool:
    """Equality that tells ``1`` from ``True`` and ``0.0`` from ``-0.0``, and knows ``nan`` equals itself."""
    return is_value(a) and is_value(b) and encode_value(a) == encode_value(b)
