"""The tensors a captured graph takes from its module: where each one lives, what it must look like, who shares it.

An engine whose weights are *bound* reads the module's live tensors through raw pointers. Nothing below Python checks
them, so everything that could be wrong with one is checked here first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from aitune_hf.errors import EngineLoadError

__all__ = ["MODULE_TABLES", "Constant", "Path", "live_tensors", "lookup", "memory_key", "resolve"]

#: Steps from a module to one of its tensors: attribute names, dict keys and list positions.
Path = tuple[str | int, ...]

#: ``residual`` constants do not live on the module: the forward makes them, from numbers in its code.
Kind = Literal["parameter", "buffer", "attribute", "residual"]

#: Where a module keeps what is registered with it.
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
#: How far into lists, dicts and helper objects tensors are looked for, and how many objects are looked at.
_MAX_DEPTH = 4
_MAX_OBJECTS = 20_000


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One tensor that an engine takes from outside, other than its inputs.

    Attributes:
        name: its name in the engine; the module's own dotted name where it has one.
        kind: what it is in the module.
        path: steps from the module to it; empty for a residual.
        shape, dtype, stride, device_type: what a tensor must have to take its place.
        aliases: further places where the very same memory was found. The engine may read all of them through this
            one, so they must be one memory wherever it is loaded.
    """

    name: str
    kind: Kind
    path: Path
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    device_type: str
    aliases: tuple[Path, ...] = ()

    @classmethod
    def of(cls, name: str, kind: Kind, path: Path, tensor: torch.Tensor, aliases: Sequence[Path] = ()) -> Constant:
        """The constant that ``tensor`` is an example of."""
        return cls(
            name=name,
            kind=kind,
            path=path,
            shape=tuple(tensor.shape),
            dtype=_dtype_name(tensor.dtype),
            stride=tuple(tensor.stride()),
            device_type=tensor.device.type,
            aliases=tuple(aliases),
        )

    def mismatch(self, tensor: torch.Tensor, device: torch.device | None = None) -> str | None:
        """None if ``tensor`` can take this constant's place, else what is different.

        Args:
            tensor: a candidate.
            device: where the engine runs; its index counts where it has one.
        """
        if tensor.is_meta:
            return "it is on the meta device, so it has no data (is it offloaded?)"
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            return f"it is a {type(tensor).__name__} of layout {tensor.layout}, not a plain tensor"
        for what, need, has in (
            ("shape", self.shape, tuple(tensor.shape)),
            ("dtype", self.dtype, _dtype_name(tensor.dtype)),
            ("stride", self.stride, tuple(tensor.stride())),
            ("device", self.device_type, tensor.device.type),
        ):
            if need != has and not (what == "stride" and tensor.numel() == 0):
                return f"its {what} is {has}, the engine needs {need}"
        here = device is None or device.index is None or tensor.device.type != device.type
        if not here and device is not None and tensor.device.type != "cpu" and tensor.device != device:
            return f"it is on {tensor.device}, the engine runs on {device}"
        return None

    def to_json(self) -> dict[str, Any]:
        """JSON form; the path is left out where the name says it."""
        data: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "stride": list(self.stride),
            "device": self.device_type,
        }
        if self.path != tuple(self.name.split(".")):
            data["path"] = list(self.path)
        if self.aliases:
            data["aliases"] = [list(path) for path in self.aliases]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Constant:
        """Inverse of :meth:`to_json`."""
        return cls(
            name=data["name"],
            kind=data["kind"],
            path=tuple(data.get("path", data["name"].split("."))),
            shape=tuple(data["shape"]),
            dtype=data["dtype"],
            stride=tuple(data["stride"]),
            device_type=data["device"],
            aliases=tuple(tuple(path) for path in data.get("aliases", ())),
        )


def resolve(
    constants: Sequence[Constant],
    module: nn.Module,
    residuals: Mapping[str, torch.Tensor],
    where: str,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """The live tensor of each constant, checked.

    Args:
        constants: what the engine needs.
        module: whose tensors to use.
        residuals: the tensors of residual constants, by name, on the right device already.
        where: the module's path, for messages.
        device: where the engine runs.

    Raises:
        EngineLoadError: naming the first constant that is missing or different, and how.
    """
    found: dict[str, torch.Tensor] = {}
    for constant in constants:
        if constant.kind == "residual":
            tensor = residuals.get(constant.name)
        else:
            tensor = lookup(module, constant.path)
        label = f"{where}: the engine's constant {constant.name!r}"
        if tensor is None:
            raise EngineLoadError(f"{label} ({constant.kind}) is not there: the module is not the one it was built for")
        problem = constant.mismatch(tensor, device)
        if problem:
            raise EngineLoadError(f"{label} ({constant.kind}) does not fit: {problem}")
        for path in constant.aliases:
            other = lookup(module, path)
            if other is None or memory_key(other) != memory_key(tensor):
                raise EngineLoadError(
                    f"{label} was tied to {_dotted(path)} when the engine was built, and is not any more"
                )
        found[constant.name] = tensor
    return found


def lookup(module: nn.Module, path: Path) -> torch.Tensor | None:
    """The tensor at ``path``, or None if there is none."""
    found: Any = module
    for step in path:
        try:
            found = _step(found, step)
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    return found if isinstance(found, torch.Tensor) else None


def _step(parent: Any, step: str | int) -> Any:
    if isinstance(parent, nn.Module):
        name = str(step)
        for table in MODULE_TABLES:
            if name in parent.__dict__[table]:
                return parent.__dict__[table][name]
        return getattr(parent, name)
    if isinstance(parent, (Mapping, list, tuple)):
        return parent[step]  # type: ignore[index]
    return getattr(parent, str(step))


def live_tensors(module: nn.Module) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor that hangs on a module tree outside its parameters and buffers.

    Plain attributes come first, then those inside lists, dicts and helper objects of the modules, up to a depth.
    """
    nested: list[tuple[Path, Any, int]] = []
    for name, submodule in module.named_modules():
        at: Path = tuple(name.split(".")) if name else ()
        for key, value in vars(submodule).items():
            if key in MODULE_TABLES or key.endswith("_hooks"):
                continue
            if isinstance(value, torch.Tensor):
                yield (*at, key), value
            else:
                nested.append(((*at, key), value, 1))
    seen: set[int] = set()
    while nested and len(seen) < _MAX_OBJECTS:
        path, value, depth = nested.pop()
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        for step, child in _children(value):
            if isinstance(child, torch.Tensor):
                yield (*path, step), child
            else:
                nested.append(((*path, step), child, depth + 1))


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        yield from ((key, child) for key, child in value.items() if type(key) in (str, int))
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif not isinstance(value, (nn.Module, type)) and not callable(value) and hasattr(value, "__dict__"):
        yield from vars(value).items()


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common when they are one memory, seen in the same way."""
    address = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else 0
    return (address, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(path: Path) -> str:
    return ".".join(str(step) for step in path)
