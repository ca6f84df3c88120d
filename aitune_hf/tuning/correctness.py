"""Does an engine give eager's answers, at every recorded sample and at both ends of its shapes?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from aitune_hf.errors import CorrectnessError
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.sample_store import Sample, SampleStore
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.graph.structure import flatten
from aitune_hf.jit.comparison import compare_outputs
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.tuning.axes import resized

__all__ = ["EagerReference", "check_engine"]


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
        """The same sample with eager's outputs."""
        node, leaves = flatten(self.call(sample))
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
        except Exception:  # noqa: BLE001 - any refusal by the user's forward means no.
            return False
        return answer.output_node == sample.output_node


def check_engine(
    installed: InstalledEngine,
    samples: SampleStore,
    reference: EagerReference,
    *,
    corners: bool = True,
    on_check: Callable[[], object] = lambda: None,
) -> float:
    """Check one engine at every recorded sample, and at the smallest and the largest of its shapes.

    Returns:
        The largest absolute difference from eager.

    Raises:
        CorrectnessError: if it is not right, naming the shapes.
    """
    worst = 0.0
    base: Sample | None = None
    envelope = installed.envelope
    for sample in _within(samples, envelope):
        base = base or sample
        worst = max(worst, _check(installed, sample))
        on_check()
    if base is None:
        raise CorrectnessError("no recorded sample lies within the engine's shapes")
    if corners and not envelope.is_static:
        for shapes in envelope.corners():
            worst = max(worst, _check(installed, reference.answered(resized(base, shapes))))
            on_check()
    return worst


def _within(samples: SampleStore, envelope: ShapeEnvelope) -> Iterable[Sample]:
    return (sample for sample in samples if envelope.mismatch(sample.shapes) is None)


def _check(installed: InstalledEngine, sample: Sample) -> float:
    with torch.no_grad():
        outputs = list(installed.engine([leaf.contiguous() for leaf in sample.inputs]))
    worst, problem = compare_outputs(outputs, sample.outputs, installed.tolerance)
    if problem:
        raise CorrectnessError(f"at input shapes {[list(shape) for shape in sample.shapes]}: {problem}")
    return worst
