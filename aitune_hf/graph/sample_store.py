"""Recorded calls of one graph: few, bounded in memory, and gone after tuning."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.graph.structure import Node, unflattener

__all__ = ["Sample", "SampleStore"]

logger = logging.getLogger(__name__)

#: Which calls of one shape are kept: the first, and later ones, as values (timesteps, masks) drift over a run.
KEPT_CALLS = (1, 4, 16)


@dataclass(kw_only=True, eq=False)
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


@dataclass(frozen=True)
class _Stored:
    """What a file of raw bytes does not say of a tensor."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self, raw: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.copy_(raw.view(self.dtype).reshape(self.shape))


def _raw(leaf: torch.Tensor) -> tuple[torch.Tensor, _Stored]:
    """The tensor's bytes, which any dtype has, and all else about it."""
    dense = leaf.detach().clone()
    stored = _Stored(dense.dtype, dense.device, tuple(dense.shape), dense.stride())
    # A copy, as `contiguous` leaves a lazy conjugate, and the stride of a single element, as they are.
    plain = torch.empty(dense.shape, dtype=dense.dtype, device="cpu").copy_(dense)
    return plain.reshape(-1).view(torch.uint8), stored


@dataclass(eq=False)
class _Slot:
    """A kept sample: its tensors in memory, or in a safetensors file."""

    sample: Sample | None
    path: Path | None = None
    template: Sample | None = None
    stored: dict[str, _Stored] = field(default_factory=dict)

    def load(self) -> Sample:
        if self.sample is not None:
            return self.sample
        assert self.path is not None
        assert self.template is not None
        from safetensors.torch import load_file

        raw, old = load_file(self.path), self.template
        tensors = {name: stored.restore(raw.pop(name)) for name, stored in self.stored.items()}
        return Sample(
            inputs=[tensor for name, tensor in tensors.items() if name.startswith("in")],
            input_node=old.input_node,
            outputs=[tensor for name, tensor in tensors.items() if name.startswith("out")],
            output_node=old.output_node,
            context=old.context,
        )

    def spill(self, path: Path) -> None:
        """Move the tensors to a file.

        Raises:
            OSError: if it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        sample = self.sample
        assert sample is not None
        named = {f"in{i}": leaf for i, leaf in enumerate(sample.inputs)}
        named |= {f"out{i}": leaf for i, leaf in enumerate(sample.outputs)}
        raw = {name: _raw(leaf) for name, leaf in named.items()}
        try:
            save_file({name: data for name, (data, _) in raw.items()}, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise OSError(f"{path}: {error}") from error
        self.stored = {name: stored for name, (_, stored) in raw.items()}
        self.template = replace(sample, inputs=[], outputs=[])
        self.path, self.sample = path, None


def _remove(folder: Path, owner: int) -> None:
    """Remove the files; a forked child, which inherits the finalizer, leaves them to its parent."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class SampleStore:
    """Samples of one graph, a few per combination of shapes. Several threads may add to it.

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
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def wants(self, shapes: Shapes) -> bool:
        """Count one call of these shapes; True when its tensors should be kept."""
        with self._lock:
            count = self.counts.get(shapes, 0) + 1
            self.counts[shapes] = count
            return count in KEPT_CALLS and (shapes in self._slots or len(self._slots) < self.max_shapes)

    def add(self, sample: Sample) -> None:
        """Keep a sample; the store owns its tensors from now on.

        A sample that fits neither into memory nor on the disk is dropped with a warning.
        """
        slot, size = _Slot(sample), sample.nbytes
        with self._lock:
            fits = self._in_memory + size <= self.max_bytes
            if fits:
                self._in_memory += size
        if not fits:
            try:
                slot.spill(self._next_path())
            except OSError as error:
                logger.warning("a recorded sample of %d bytes is dropped, it cannot be written: %s", size, error)
                return
        with self._lock:
            self._slots.setdefault(sample.shapes, []).append(slot)

    def _next_path(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="aitune-samples-"))
                self._cleanup = weakref.finalize(self, _remove, self._folder, os.getpid())
            return self._folder / f"{next(self._numbers)}.safetensors"

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def __iter__(self) -> Iterator[Sample]:
        """All samples, one in memory at a time for those that were spilled."""
        for slot in [slot for slots in self._slots.values() for slot in slots]:
            yield slot.load()

    def shapes(self) -> Sequence[Shapes]:
        """Combinations of shapes with at least one sample, most frequent first."""
        return sorted(self._slots, key=lambda shapes: -self.counts.get(shapes, 0))

    def first(self, shapes: Shapes) -> Sample:
        """The first sample of a combination of shapes."""
        return self._slots[shapes][0].load()

    def clear(self) -> None:
        """Forget everything and remove the files."""
        with self._lock:
            self._slots.clear()
            self.counts.clear()
            self._in_memory = 0
            if self._cleanup is not None:
                self._cleanup()
            self._folder = self._cleanup = None
