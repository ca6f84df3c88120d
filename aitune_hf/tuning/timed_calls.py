"""Calls to time a graph with: of the shapes that matter, with inputs that are not all in the processor's cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.graph.sample_store import Sample, SampleStore
from aitune_hf.tuning.timing import Run

__all__ = ["RunCall", "rotated_samples", "rotating", "timed_shapes"]

RunCall = Callable[[tuple[Any, ...], dict[str, Any]], object]

#: Shapes of one graph that are timed.
MAX_TIMED_SHAPES = 3
#: Inputs of one shape that take turns, and the bytes that they may take together.
MAX_ROTATED = 4
MAX_ROTATED_BYTES = 64 << 20


def timed_shapes(store: SampleStore, fits: Callable[[Shapes], bool]) -> list[Shapes]:
    """The most frequent combinations of shapes that fit, and the largest, which takes the longest."""
    fitting = [shapes for shapes in store.shapes() if fits(shapes)]
    largest = max(fitting, key=lambda shapes: sum(map(prod, shapes)), default=None)
    chosen = fitting[:MAX_TIMED_SHAPES]
    return chosen if largest is None or largest in chosen else [*chosen[:-1], largest]


def rotated_samples(store: SampleStore, shapes: Shapes) -> list[Sample]:
    """Samples of one combination of shapes that take turns, within a bound on their bytes.

    What was recorded, where that is several; else the one sample and copies of it, which hold equal values in other places.
    """
    found: list[Sample] = []
    left = MAX_ROTATED_BYTES
    for sample in store:
        if sample.shapes == shapes and (not found or _input_bytes(sample) <= left) and len(found) < MAX_ROTATED:
            found.append(sample)
            left -= _input_bytes(sample)
    if len(found) == 1:
        copies = min(MAX_ROTATED - 1, left // max(1, _input_bytes(found[0])))
        found += [replace(found[0], inputs=[leaf.clone() for leaf in found[0].inputs]) for _ in range(copies)]
    return found


def _input_bytes(sample: Sample) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in sample.inputs)


def rotating(samples: Sequence[Sample], signature: ForwardSignature, call: RunCall) -> Run:
    """A run that makes the next one of several calls each time, in the mode in which it was recorded."""
    device_type = samples[0].inputs[0].device.type
    context = samples[0].context
    calls = itertools.cycle([signature.unbind(sample.bound()) for sample in samples])

    def run() -> object:
        args, kwargs = next(calls)
        with torch.no_grad(), context.enter(device_type):
            return call(args, kwargs)

    return run
