"""At which batch sizes is an engine faster than eager?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aitune_hf.errors import CandidateError, UntunableError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.tuning.axes import resized
from aitune_hf.tuning.correctness import check_sample
from aitune_hf.tuning.results import BatchTiming
from aitune_hf.tuning.stopwatch import EagerAnsweredError, Stopwatch
from aitune_hf.tuning.trial import Contender, Work

__all__ = ["BatchSweep", "sweep_batch_sizes"]


@dataclass(frozen=True, kw_only=True)
class BatchSweep:
    """What a sweep found.

    Attributes:
        timings: one per batch size that the engine takes, the smallest first.
        eager_at: ``(input, axis, size)`` of those at which eager is faster by more than noise.
        wrong: the first size at which the engine is not right or does not answer, and how; it must not be used then.
    """

    timings: Sequence[BatchTiming] = ()
    eager_at: Sequence[tuple[int, int, int]] = ()
    wrong: str | None = None


def sweep_batch_sizes(
    patched: PatchedModule, work: Work, contender: Contender, sizes: Sequence[int], stopwatch: Stopwatch
) -> BatchSweep:
    """Check and time a winner against eager at each of several batch sizes.

    Sizes outside of the shapes the engine takes are left out, and so is a graph whose batch does not vary. Inputs are
    the rows of a recorded sample, repeated or cut.
    """
    engine, graph = contender.engine, work.recorded.spec
    axes = _batch_axes(graph, engine.envelope)
    if not axes:
        return BatchSweep()
    base = next(one for one in work.recorded.samples if engine.envelope.mismatch(one.shapes) is None)
    timings: list[BatchTiming] = []
    eager_at: list[tuple[int, int, int]] = []
    for size in sorted(set(sizes)):
        shapes = _shapes_at(base, axes, size)
        if engine.envelope.mismatch(shapes) is not None:
            continue
        try:
            sample = work.reference.answered(resized(base, shapes))
        except UntunableError:
            continue  # Eager does not run at this size.
        try:
            check_sample(engine, sample)
            timing = stopwatch.at(patched, work, engine, sample, f"batch {size}")
        except EagerAnsweredError as error:
            return BatchSweep(wrong=f"at batch {size}, {error}")
        except CandidateError as error:
            return BatchSweep(wrong=str(error))
        # The other way round, by the same margin that an engine needs against eager.
        loses = timing.at_most <= 1.0 and timing.speedup * stopwatch.config.min_speedup <= 1.0
        answers = "eager" if loses and stopwatch.config.chosen_strategy.beats_eager else "engine"
        timings.append(BatchTiming(batch_size=size, timing=timing, answers=answers))
        if answers == "eager":
            eager_at += [(index, axis, size * rows) for index, (axis, rows) in axes.items()]
    return BatchSweep(timings=timings, eager_at=eager_at)


def _batch_axes(graph: GraphSpec, envelope: ShapeEnvelope) -> dict[int, tuple[int, int]]:
    """Inputs whose batch varies in an engine: index → (axis, rows per batch item)."""
    places = list(graph.input_spec.tensors)
    found = {places.index(place): where for place, where in graph.batch_axes().items()}
    return {
        index: (axis, rows) for index, (axis, rows) in found.items() if envelope.inputs[index][axis].symbol is not None
    }


def _shapes_at(base: Sample, axes: dict[int, tuple[int, int]], size: int) -> list[tuple[int, ...]]:
    shapes = [list(leaf.shape) for leaf in base.inputs]
    for index, (axis, rows) in axes.items():
        shapes[index][axis] = size * rows
    return [tuple(shape) for shape in shapes]
