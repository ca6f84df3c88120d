"""Does an engine give eager's answers, at every recorded sample and at both ends of its shapes?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from aitune_hf.errors import CorrectnessError, UntunableError
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.sample_store import Sample, SampleStore
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.graph.structure import flatten
from aitune_hf.jit.comparison import compare_loosely, compare_outputs
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.tuning.axes import resized

__all__ = ["Deviation", "EagerReference", "check_engine", "check_sample"]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far an engine is from eager.

    Attributes:
        max_error: the largest absolute difference.
        similarity: the smallest cosine similarity of an output, of a lossy engine.
    """

    max_error: float = 0.0
    similarity: float | None = None

    def joined(self, other: Deviation) -> Deviation:
        """The worse of both."""
        found = [one.similarity for one in (self, other) if one.similarity is not None]
        return Deviation(max_error=max(self.max_error, other.max_error), similarity=min(found) if found else None)


class EagerReference:
    """The original forward, run the way a sample was recorded."""

    def __init__(self, forward: Callable[..., Any], signature: ForwardSignature) -> None:
        self.forward = forward
        self.signature = signature

    def call(self, sample: Sample) -> Any:
        """The eager output for a sample."""
        args, kwargs = self.signature.unbind(sample.bound())
        device_type = sample.inputs[0].device.type if sample.inputs else "cpu"
        with torch.no_grad(), sample.context.enter(device_type):
            return self.forward(*args, **kwargs)

    def answered(self, sample: Sample) -> Sample:
        """The same sample with eager's outputs.

        Raises:
            UntunableError: if eager fails on it.
        """
        try:
            output = self.call(sample)
        except Exception as error:  # The user's own forward may raise anything.
            shapes = [list(shape) for shape in sample.shapes]
            raise UntunableError(f"eager itself fails at input shapes {shapes}: {error!r}") from error
        node, leaves = flatten(output)
        return Sample(
            inputs=sample.inputs,
            input_node=sample.input_node,
            outputs=leaves,
            output_node=node,
            context=sample.context,
        )

    def runs_at(self, sample: Sample, shapes: list[tuple[int, ...]]) -> bool:
        """True if eager accepts inputs of these shapes and gives outputs of the structure it gave before."""
        try:
            answer = self.answered(resized(sample, shapes))
        except UntunableError:
            return False
        return answer.output_node == sample.output_node


def check_engine(
    installed: InstalledEngine,
    samples: SampleStore,
    reference: EagerReference,
    *,
    corners: bool = True,
    on_check: Callable[[], object] = lambda: None,
) -> Deviation:
    """Check one engine at every recorded sample, and at the smallest and the largest of its shapes.

    A lossy engine is only checked for being sane: what its error does is seen on the pipeline's outputs.

    Returns:
        How far it is from eager.

    Raises:
        CorrectnessError: if it is not right, naming the shapes.
        UntunableError: if eager itself fails at the ends.
    """
    worst = Deviation()
    base: Sample | None = None
    envelope = installed.envelope
    for sample in _within(samples, envelope):
        base = base or sample
        worst = worst.joined(check_sample(installed, sample))
        on_check()
    if base is None:
        raise CorrectnessError("no recorded sample lies within the engine's shapes")
    if corners and not envelope.is_static:
        for shapes in envelope.corners():
            worst = worst.joined(check_sample(installed, reference.answered(resized(base, shapes))))
            on_check()
    return worst


def _within(samples: SampleStore, envelope: ShapeEnvelope) -> Iterable[Sample]:
    return (sample for sample in samples if envelope.mismatch(sample.shapes) is None)


def check_sample(installed: InstalledEngine, sample: Sample) -> Deviation:
    """Check one engine at one sample that holds eager's outputs.

    Raises:
        CorrectnessError: if it is not right, naming the shapes.
    """
    try:
        with torch.no_grad():
            outputs = list(installed.engine([leaf.contiguous() for leaf in sample.inputs]))
    except Exception as error:  # Native code, or a third party's, may raise anything.
        raise CorrectnessError(f"it raised {type(error).__name__}: {error}") from error
    if installed.lossy:
        worst, cosine, problem = compare_loosely(outputs, sample.outputs)
        deviation = Deviation(max_error=worst, similarity=cosine)
    else:
        worst, problem = compare_outputs(outputs, sample.outputs, installed.tolerance)
        deviation = Deviation(max_error=worst)
    if problem:
        raise CorrectnessError(f"at input shapes {[list(shape) for shape in sample.shapes]}: {problem}")
    return deviation
