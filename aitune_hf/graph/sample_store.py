"""Recorded calls of one graph: few, bounded in memory, and gone after tuning."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.graph.structure import Node, unflattener

__all__ = ["Sample", "SampleStore"]

#: Which calls of one shape are kept: the first, and later ones, as values (timesteps, masks) drift over a run.
KEPT_CALLS = (1, 4, 16)


@dataclass(kw_only=True)
class Sample:
    """One recorded call, bound to its signature's parameters, and what eager answered.

    Attributes:
        inputs, outputs: tensor leaves in the order of the nodes' ``leaves()``.
        input_node, output_node: the structures they came from.
    """

    inputs: list[torch.Tensor]
    input_node: Node
    outputs: list[torch.Tensor]
    output_node: Node
    context: CallContext

    @property
    def shapes(self) -> Shapes:
        """Shapes of the inputs."""
        return tuple(tuple(leaf.shape) for leaf in self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes held by its tensors."""
        return sum(leaf.numel() * leaf.element_size() for leaf in (*self.inputs, *self.outputs))

    def bound(self) -> dict[str, Any]:
        """The call as parameter name → value."""
        rebuilt: dict[str, Any] = unflattener(self.input_node)(self.inputs)
        return rebuilt


@dataclass
class _Slot:
    """A kept sample: its tensors in memory, or in a safetensors file."""

    sample: Sample | None
    path: Path | None = None
    template: Sample | None = None

    def load(self) -> Sample:
        if self.sample is not None:
            return self.sample
        assert self.path is not None
        assert self.template is not None
        from safetensors.torch import load_file

        stored, old = load_file(self.path), self.template
        inputs = [stored[f"in{i}"].to(device) for i, device in enumerate(leaf.device for leaf in old.inputs)]
        outputs = [stored[f"out{i}"].to(device) for i, device in enumerate(leaf.device for leaf in old.outputs)]
        return Sample(
            inputs=inputs,
            input_node=old.input_node,
            outputs=outputs,
            output_node=old.output_node,
            context=old.context,
        )


@dataclass
class SampleStore:
    """Samples of one graph, a few per combination of shapes.

    Attributes:
        max_bytes: tensors beyond this many bytes are written to a temporary safetensors file.
        max_shapes: combinations of shapes for which samples are kept; further ones are counted only.
        counts: combination of shapes → number of calls seen.
    """

    max_bytes: int = 1 << 30
    max_shapes: int = 32
    counts: dict[Shapes, int] = field(default_factory=dict)
    _slots: dict[Shapes, list[_Slot]] = field(default_factory=dict)
    _in_memory: int = 0
    _folder: Path | None = None
    _cleanup: Callable[[], object] | None = None

    def wants(self, shapes: Shapes) -> bool:
        """Count one call of these shapes; True when its tensors should be kept."""
        count = self.counts.get(shapes, 0) + 1
        self.counts[shapes] = count
        return count in KEPT_CALLS and (shapes in self._slots or len(self._slots) < self.max_shapes)

    def add(self, sample: Sample) -> None:
        """Keep a sample; the store owns its tensors from now on."""
        slot = _Slot(sample)
        self._slots.setdefault(sample.shapes, []).append(slot)
        if self._in_memory + sample.nbytes > self.max_bytes:
            self._spill(slot, sample)
        else:
            self._in_memory += sample.nbytes

    def _spill(self, slot: _Slot, sample: Sample) -> None:
        from safetensors.torch import save_file

        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="aitune-samples-"))
            self._cleanup = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / f"{sum(map(len, self._slots.values()))}.safetensors"
        named = {f"in{i}": leaf for i, leaf in enumerate(sample.inputs)}
        named |= {f"out{i}": leaf for i, leaf in enumerate(sample.outputs)}
        save_file({name: leaf.detach().contiguous().clone() for name, leaf in named.items()}, path)
        empty = Sample(
            inputs=[leaf.new_empty(0) for leaf in sample.inputs],
            input_node=sample.input_node,
            outputs=[leaf.new_empty(0) for leaf in sample.outputs],
            output_node=sample.output_node,
            context=sample.context,
        )
        slot.sample, slot.path, slot.template = None, path, empty

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def __iter__(self) -> Iterator[Sample]:
        """All samples, one in memory at a time for those that were spilled."""
        for slots in self._slots.values():
            for slot in slots:
                yield slot.load()

    def shapes(self) -> Sequence[Shapes]:
        """Combinations of shapes with at least one sample, most frequent first."""
        return sorted(self._slots, key=lambda shapes: -self.counts[shapes])

    def first(self, shapes: Shapes) -> Sample:
        """The first sample of a combination of shapes."""
        return self._slots[shapes][0].load()

    def clear(self) -> None:
        """Forget everything and remove the files."""
        self._slots.clear()
        self.counts.clear()
        self._in_memory = 0
        if self._cleanup is not None:
            self._cleanup()
        self._folder = self._cleanup = None
