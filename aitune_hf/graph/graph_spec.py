"""One call form of a module: what identifies it, and the shapes it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from aitune_hf.errors import ConfigError, UntunableError
from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.dynamic_shapes import BatchDim, DynamicShapes, ShapeDefinition
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.locator import Locator
from aitune_hf.graph.sample_metadata import SampleMetadata
from aitune_hf.graph.structure import flatten, unflattener
from aitune_hf.graph.tensor_spec import TensorSpec

__all__ = ["GraphSpec", "graph_identity"]


def graph_identity(inputs: SampleMetadata, context: CallContext) -> str:
    """SHA-256 (hex) of what decides which graph a call belongs to.

    Structure, plain values, and rank, dtype and device type of each tensor, together with the call's context. Sizes,
    device indices, the order in which a forward's parameters are given and spelled-out defaults do not take part. The
    order of a dict's own keys does, ``**kwargs`` included: a forward can walk over it, and would compute another thing.
    """
    identity = {"inputs": inputs.identity(), "context": context.to_dict()}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class GraphSpec:
    """A computational graph of a module: each unique form of its inputs is one, and is tuned by itself.

    Attributes:
        name: readable and unique within its module, such as ``graph0``.
        input_spec: the inputs, bound to the signature's parameters.
        output_spec: the outputs.
        forward_signature: the signature that calls are bound to.
        dynamic_shapes: sizes that the user says an input may have; they win over those seen.
        context: mode, grad and autocast.
    """

    name: str
    input_spec: SampleMetadata
    output_spec: SampleMetadata
    forward_signature: ForwardSignature
    dynamic_shapes: DynamicShapes = field(default_factory=DynamicShapes)
    context: CallContext = field(default_factory=CallContext)

    @property
    def key(self) -> str:
        """The graph's identity, 64 hex digits (:func:`graph_identity`)."""
        return graph_identity(self.input_spec, self.context)

    @property
    def device_type(self) -> str:
        """Device type of the inputs (``"cpu"`` if there is no tensor at all)."""
        return next((spec.device_type for spec in self.input_spec.tensors.values()), "cpu")

    def __str__(self) -> str:
        inputs = ", ".join(f"{place}: {spec.shape}" for place, spec in self.input_spec.tensors.items())
        return f"{self.name}({inputs})"

    def __repr__(self) -> str:
        return f"GraphSpec({self}, key={self.key[:12]}, context={self.context})"

    def update_shapes_seen(self, inputs_metadata: SampleMetadata, outputs_metadata: SampleMetadata) -> None:
        """Widen the bounds of inputs and outputs by one more call.

        Raises:
            UntunableError: if the outputs do not have the structure seen before.
        """
        seen, new = self.output_spec, outputs_metadata
        if seen.identity() != new.identity():
            raise UntunableError("the structure, values or dtypes of the outputs change between equal calls")
        self.input_spec.update(inputs_metadata)
        self.output_spec.update(outputs_metadata)

    def get_shape_definition(self, locator: Locator) -> ShapeDefinition | None:
        """The user's definition for the input at ``locator``, if there is one; axes counted from the front.

        Raises:
            ConfigError: if it names an axis that the input does not have, or one axis twice.
        """
        definition = self.dynamic_shapes.definition(locator)
        if definition is None:
            return None
        rank = self.input_spec.tensors[locator].rank
        resolved = {axis + rank if axis < 0 else axis: dim for axis, dim in definition.items()}
        if any(not 0 <= axis < rank for axis in resolved):
            raise ConfigError(f"dynamic_shapes[{str(locator)!r}] names axes {list(definition)}, its rank is {rank}")
        if len(resolved) != len(definition):
            raise ConfigError(f"dynamic_shapes[{str(locator)!r}] names one axis twice: {list(definition)}, rank {rank}")
        return resolved

    def get_effective_input_shapes(
        self, locator: Locator, tensor_spec: TensorSpec
    ) -> tuple[list[int], list[int], list[int]]:
        """Minimum, optimal and maximum shape to compile the input at ``locator`` for.

        The user's definition wins; elsewhere the bounds seen, with the largest as the optimum.
        """
        low, opt, high = list(tensor_spec.min_shape), list(tensor_spec.max_shape), list(tensor_spec.max_shape)
        for axis, dim in (self.get_shape_definition(locator) or {}).items():
            low[axis], opt[axis], high[axis] = dim.min, dim.optimum, dim.max
        return low, opt, high

    def batch_axes(self) -> dict[Locator, tuple[int, int]]:
        """Inputs that carry a batch: locator → (axis, rows per batch item).

        From the user's :class:`BatchDim`, else from axes seen to grow together, else by the usual convention: the
        leading axis of the first input that has one, and of every input whose leading axis has the same size.
        """
        found: dict[Locator, tuple[int, int]] = {}
        for place in self.input_spec.tensors:
            for axis, dim in (self.get_shape_definition(place) or {}).items():
                if isinstance(dim, BatchDim):
                    found[place] = (axis, dim.multiple_of)
        if found:
            return found
        for place, spec in self.input_spec.tensors.items():
            if spec.batch_axis is not None:
                found[place] = (spec.batch_axis, spec.batch_multiplier)
        if found or self.input_spec.has_dynamic_axis:
            return found
        ranked = {place: spec for place, spec in self.input_spec.tensors.items() if spec.rank}
        leading = next((spec.max_shape[0] for spec in ranked.values()), None)
        return {place: (0, 1) for place, spec in ranked.items() if spec.max_shape[0] == leading}

    def _iter_batch_size_ranges(self, normalized: bool = False) -> Iterator[tuple[int, int]]:
        """The (min, max) size of each batch axis; in batch items when ``normalized``, else in rows."""
        for place, (axis, multiplier) in self.batch_axes().items():
            low, _, high = self.get_effective_input_shapes(place, self.input_spec.tensors[place])
            unit = multiplier if normalized else 1
            yield low[axis] // unit, high[axis] // unit

    def get_min_batch_size(self) -> int | None:
        """Smallest batch in batch items, or None when no input carries one."""
        return min((low for low, _ in self._iter_batch_size_ranges(normalized=True)), default=None)

    def get_max_batch_size(self, normalized: bool = False) -> int:
        """Largest batch: in batch items when ``normalized``, else rows of the largest input. 1 when there is none."""
        return max((high for _, high in self._iter_batch_size_ranges(normalized)), default=1)

    def make_batch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call, in its bound form, with every batch axis resized to ``batch_size`` items.

        Rows are repeated, or left out from the end; values are never invented.

        Raises:
            ConfigError: if ``batch_size`` < 1 or no input carries a batch.
        """
        axes = self.batch_axes()
        if batch_size < 1 or not axes:
            raise ConfigError(f"cannot make a batch of {batch_size}: batch axes are {[str(p) for p in axes]}")
        node, leaves = flatten(self.forward_signature.bind(args, kwargs))
        places = [place for place, leaf in node.leaves() if leaf.kind == "tensor"]
        resized = [
            resize_axis(leaf, axes[place][0], batch_size * axes[place][1]) if place in axes else leaf
            for place, leaf in zip(places, leaves, strict=True)
        ]
        return self.forward_signature.unbind(unflattener(node)(resized))

    def update_max_batch_size(self, sample: tuple[tuple[Any, ...], dict[str, Any]], max_batch_size: int) -> None:
        """Widen the input bounds as if ``sample`` had been seen with ``max_batch_size`` items."""
        args, kwargs = self.make_batch(sample[0], sample[1], max_batch_size)
        self.input_spec.update(SampleMetadata.of(self.forward_signature.bind(args, kwargs)))

    def to_dict(self) -> dict[str, Any]:
        """JSON form; nothing in it needs pickle."""
        return {
            "name": self.name,
            "input_spec": self.input_spec.to_dict(),
            "output_spec": self.output_spec.to_dict(),
            "forward_signature": self.forward_signature.to_dict(),
            "dynamic_shapes": self.dynamic_shapes.to_dict(),
            "context": self.context.to_dict(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> GraphSpec:
        """Inverse of :meth:`to_dict`."""
        return GraphSpec(
            data["name"],
            SampleMetadata.from_dict(data["input_spec"]),
            SampleMetadata.from_dict(data["output_spec"]),
            ForwardSignature.from_dict(data["forward_signature"]),
            DynamicShapes.from_dict(data["dynamic_shapes"]),
            CallContext.from_dict(data["context"]),
        )


def resize_axis(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """``tensor`` with ``axis`` of ``size`` rows: its own rows, repeated from the start or cut at the end.

    Raises:
        ConfigError: if there is no row to repeat.
    """
    if tensor.shape[axis] == size:
        return tensor
    if not tensor.shape[axis]:
        raise ConfigError(f"axis {axis} of a tensor of shape {list(tensor.shape)} has no rows that could be repeated")
    rows = torch.arange(size, device=tensor.device) % tensor.shape[axis]
    return tensor.index_select(axis, rows)
