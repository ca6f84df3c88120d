"""Which weight of a module each constant of an artefact is, so that the artefact itself need not hold any.

Compilers for data formats write constants into their file under names of their own. Which of them are weights is found
by building twice, from programs with different probes for weights (:mod:`aitune_hf.backends.probes`): a constant that
is the same weight in both builds is filled from the live module when the artefact is loaded; one that is equal in both
does not depend on weights and stays in the artefact; anything else was computed from weights, and such an artefact is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from aitune_hf.backends.constant_match import Origin, TensorIndex, apply_origin, same_bits
from aitune_hf.backends.constants import Constant, resolve
from aitune_hf.backends.probes import pinned_constants, tensor_digest, values_of
from aitune_hf.errors import BuildError, EngineLoadError

if TYPE_CHECKING:
    from aitune_hf.backends.export import CapturedGraph

__all__ = ["ConstantMap", "ProbedBuild", "Slot", "find_constant_map", "plain_array"]

#: A table of at least this many bytes is taken from the module too, rather than kept in the artefact.
_LARGE_TABLE = 1024
_NO_NUMPY = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


@dataclass(frozen=True, kw_only=True)
class ProbedBuild:
    """What came out of one build.

    Attributes:
        graph: the program it was made from, by :func:`aitune_hf.backends.probes.with_probes`.
        slots: the artefact's constants by name.
    """

    graph: CapturedGraph
    slots: Mapping[str, np.ndarray[Any, Any] | torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A constant of the artefact that is filled from the module.

    Attributes:
        origin: which tensor it is, in which order.
        shape, dtype: of the constant.
    """

    origin: Origin
    shape: tuple[int, ...]
    dtype: str

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its value where its weight is ``tensor``: the same memory wherever order and type allow."""
        ordered = apply_origin(self.origin, tensor.detach())
        return ordered.to(device="cpu", dtype=getattr(torch, self.dtype)).reshape(self.shape).contiguous()

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        data: dict[str, Any] = {"weight": self.origin.weight, "shape": list(self.shape), "dtype": self.dtype}
        if self.origin.axes:
            data |= {"split": list(self.origin.split), "axes": list(self.origin.axes)}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Slot:
        """Inverse of :meth:`to_json`."""
        origin = Origin(weight=data["weight"], split=tuple(data.get("split", ())), axes=tuple(data.get("axes", ())))
        return cls(origin=origin, shape=tuple(data["shape"]), dtype=data["dtype"])


@dataclass(frozen=True, kw_only=True)
class ConstantMap:
    """From the constants of an artefact to the tensors of a module.

    Attributes:
        slots: the constants that are filled, by name; all others are in the artefact.
        constants: the tensors that the module must have.
        pinned: digests of those among them whose values are part of the artefact: tables and integer buffers, or all.
    """

    slots: Mapping[str, Slot]
    constants: tuple[Constant, ...]
    pinned: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def baked(cls, graph: CapturedGraph) -> ConstantMap:
        """For an artefact that holds all weights of ``graph``: none to fill, and all of them have to stay as they are."""
        values, read = values_of(graph.program), _read_placeholders(graph)
        constants = tuple(c for c in graph.constants if c.name in read and c.kind != "residual")
        return cls(slots={}, constants=constants, pinned={c.name: tensor_digest(values[c.name]) for c in constants})

    def resolve(self, module: nn.Module, where: str, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """The live tensor of each constant, checked.

        Args:
            module: whose.
            where: its path, for messages.
            device: where the engine runs.

        Raises:
            EngineLoadError: naming the first one that is missing, has another form, or not the values in the artefact.
        """
        live = resolve(self.constants, module, {}, where, device)
        for name, digest in self.pinned.items():
            if tensor_digest(live[name]) != digest:
                raise EngineLoadError(
                    f"{where}: {name} has other values than when the engine was built, which are part of the engine; "
                    "tune again for this module"
                )
        return live

    def fill(self, live: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
        """The values of the constants to fill, by name; in the memory of the live tensors wherever possible.

        Types that numpy does not have come as unsigned integers of the same bits; :attr:`Slot.dtype` tells the type.
        """
        return {name: plain_array(slot.value(live[slot.origin.weight])) for name, slot in self.slots.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON form, the same for the same map. It holds no values."""
        return {
            "slots": {name: slot.to_json() for name, slot in sorted(self.slots.items())},
            "constants": [constant.to_json() for constant in self.constants],
            "pinned": dict(sorted(self.pinned.items())),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ConstantMap:
        """Inverse of :meth:`to_json`."""
        return cls(
            slots={name: Slot.from_json(item) for name, item in data["slots"].items()},
            constants=tuple(Constant.from_json(item) for item in data["constants"]),
            pinned=dict(data["pinned"]),
        )


def find_constant_map(
    builds: Sequence[ProbedBuild], where: str
) -> tuple[ConstantMap, dict[str, np.ndarray[Any, Any] | torch.Tensor]]:
    """Find which tensor each constant is.

    Args:
        builds: two or more, of one graph, each with probes of its own.
        where: the module's path, for messages.

    Returns:
        The map, and the constants that have to stay in the artefact, by name, as they came.

    Raises:
        BuildError: naming a constant that was computed from weights, or that could be either of two weights.
    """
    if len(builds) < 2:
        raise ValueError("one build cannot tell what depends on weights")
    graph = builds[0].graph
    read = [{name: _tensor(value) for name, value in build.slots.items()} for build in builds]
    _check_same_slots(read, where)
    sources = [_Sources.of(build.graph) for build in builds]
    slots: dict[str, Slot] = {}
    for name, first in sorted(read[0].items()):
        values = [constants[name] for constants in read]
        origin = _origin(name, values, sources, where)
        if origin is not None:
            slots[name] = Slot(origin=origin, shape=tuple(first.shape), dtype=str(first.dtype).removeprefix("torch."))
        elif not all(same_bits(first, other) for other in values[1:]):
            raise BuildError(
                f"{where}: the compiler folds weights together: its constant {name!r} ({_form(first)}) depends on weights "
                "and is none of them, so the engine would only be right for one set of weights"
            )
    used = {slot.origin.weight for slot in slots.values()}
    pinned = {name: tensor_digest(value) for name, value in sources[0].tables.items()}
    constants = tuple(c for c in graph.constants if c.name in used or c.name in pinned)
    residuals = {name: value for name, value in builds[0].slots.items() if name not in slots}
    return ConstantMap(slots=slots, constants=constants, pinned=pinned), residuals


def plain_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as an array over the same memory; see :meth:`ConstantMap.fill` for types that numpy does not have."""
    bits = _NO_NUMPY.get(tensor.dtype)
    array: np.ndarray[Any, Any] = (tensor if bits is None else tensor.view(bits)).numpy()
    return array


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """The tensors that a constant of one build can be.

    Attributes:
        weights: all that are not pinned.
        large: the tables that are worth taking from the module.
        tables: all pinned tensors that live on the module.
    """

    weights: TensorIndex
    large: TensorIndex
    tables: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, graph: CapturedGraph) -> _Sources:
        values = values_of(graph.program)
        pinned = pinned_constants(graph)
        kept = pinned & _read_placeholders(graph)
        tables = {c.name: values[c.name] for c in graph.constants if c.name in kept and c.kind != "residual"}
        return cls(
            weights=TensorIndex({c.name: values[c.name] for c in graph.constants if c.name not in pinned}),
            large=TensorIndex({k: v for k, v in tables.items() if v.numel() * v.element_size() >= _LARGE_TABLE}),
            tables=tables,
        )


def _read_placeholders(graph: CapturedGraph) -> set[str]:
    """Names of the constants that the program makes use of."""
    read = {node.name for node in graph.program.graph.nodes if node.op == "placeholder" and node.users}
    specs = graph.program.graph_signature.input_specs
    return {str(spec.target) for spec in specs if spec.target is not None and spec.arg.name in read}


def _origin(name: str, values: Sequence[torch.Tensor], sources: Sequence[_Sources], where: str) -> Origin | None:
    """What the constant is in all builds, if it is anything."""
    found = [source.weights.origins(value) for source, value in zip(sources, values, strict=True)]
    common = sorted(set.intersection(*found))
    if not common:
        if any(not same_bits(values[0], other) for other in values[1:]):
            return None
        # Tables with equal values are as good as each other: their values are checked when the artefact is loaded.
        return min(sources[0].large.origins(values[0]), default=None)
    for other in common[1:]:
        if not _same_order(common[0], other, values[0].numel()):
            raise BuildError(
                f"{where}: the engine's constant {name!r} ({_form(values[0])}) can be {_told(common[0])} as well as "
                f"{_told(other)}: the values tried cannot tell them apart"
            )
    return common[0]


def _same_order(first: Origin, second: Origin, count: int) -> bool:
    """True if two origins are one, told in two ways."""
    numbers = torch.arange(count)
    return first.weight == second.weight and same_bits(apply_origin(first, numbers), apply_origin(second, numbers))


def _check_same_slots(builds: Sequence[Mapping[str, torch.Tensor]], where: str) -> None:
    first = builds[0]
    for other in builds[1:]:
        odd = sorted(first.keys() ^ other.keys())
        odd = odd or [name for name, value in first.items() if _form(value) != _form(other[name])]
        if odd:
            raise BuildError(
                f"{where}: two builds that differ in nothing but values have different constants ({', '.join(odd[:5])})"
            )


def _tensor(value: np.ndarray[Any, Any] | torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    array = np.ascontiguousarray(value).reshape(value.shape)
    if not array.flags.writeable:
        array = array.copy()  # Torch has no tensors that cannot be written to, and warns.
    # Types that numpy itself does not have, under the names that torch has for them too.
    dtype = getattr(torch, array.dtype.name, torch.float32)
    bits = _NO_NUMPY.get(dtype)
    if bits is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(str(bits).removeprefix("torch."))).view(dtype)


def _form(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _told(origin: Origin) -> str:
    return f"{origin.weight} with its axes in the order {list(origin.axes)}" if origin.axes else origin.weight
