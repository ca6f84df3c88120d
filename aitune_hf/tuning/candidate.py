"""One candidate engine from build to verdict: build or load, check, time."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aitune_hf.backends.base import (
    Backend,
    BuildRequest,
    BuildResult,
    LoadRequest,
    Recipe,
    WeightsPolicy,
    full_version,
)
from aitune_hf.cache import EngineKey, Entry, Environment, LocalStore, Miss
from aitune_hf.errors import BuildError, CandidateError, EngineLoadError, GraphBreakException
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.sample_metadata import Shapes
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.jit.statistics import ModuleStats
from aitune_hf.tuning.axes import Axes, axes_to_json, example_for
from aitune_hf.tuning.baked import BakedEngine, WeightsDigest
from aitune_hf.version import __version__

if TYPE_CHECKING:
    from aitune_hf.backends.export import CapturedGraph

logger = logging.getLogger("aitune_hf")

__all__ = ["Subject", "build_candidate", "build_here", "build_request", "engine_key", "load_engine"]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module under tuning: itself, its name for messages, its structure, and where it runs."""

    path: str
    module: nn.Module
    forward: Any
    hierarchy_hash: str
    environment: Environment
    device: torch.device
    stats: ModuleStats
    weights: WeightsDigest


def engine_key(
    subject: Subject, graph: GraphSpec, shapes: Shapes, backend: Backend, axes: Axes, recipe: Recipe
) -> EngineKey:
    """The cache key of one candidate. Sizes take part as far as the engine is bound to them.

    Raises:
        EngineLoadError: if the engine is to hold the weights, and they cannot be read.
    """
    environment = subject.environment if backend.native else subject.environment.for_data()
    is_static = not any(axis for row in axes for axis in row)
    fixed = [
        [size if axis is None else None for size, axis in zip(shape, row, strict=True)]
        for shape, row in zip(shapes, axes, strict=True)
    ]
    return EngineKey(
        hierarchy_hash=subject.hierarchy_hash,
        graph_key=graph.key[:32],
        environment=environment,
        backend=backend.name,
        backend_version=full_version(backend),
        options={**recipe.options, "axes": None if is_static else axes_to_json(axes), "shapes": fixed},
        weights_digest=subject.weights.digest() if recipe.weights == "baked" else None,
    )


def build_request(
    subject: Subject,
    graph: GraphSpec,
    sample: Sample,
    axes: Axes,
    folder: Path,
    *,
    options: Mapping[str, Any] | None = None,
    weights: WeightsPolicy = "bound",
    samples: Iterable[Sample] = (),
    captured: MutableMapping[Any, CapturedGraph] | None = None,
) -> BuildRequest:
    """What a backend is asked to build."""
    return BuildRequest(
        path=subject.path,
        module=subject.module,
        forward=subject.forward,
        graph=graph,
        example=example_for(sample, axes),
        axes=axes,
        workdir=folder,
        options=dict(options or {}),
        weights=weights,
        samples=samples,
        captured={} if captured is None else captured,
    )


def build_here(backend: Backend, request: BuildRequest) -> BuildResult:
    """Run a build in this process; whatever a backend raises comes out as a :class:`BuildError`.

    Nothing can end it before it ends by itself.
    """
    try:
        return backend.build(request)
    except (CandidateError, GraphBreakException):
        raise
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BuildError(f"{backend.name} failed on {request.path}: {type(error).__name__}: {line}") from error


def build_candidate(
    subject: Subject,
    graph: GraphSpec,
    sample: Sample,
    backend: Backend,
    recipe: Recipe,
    axes: Axes,
    store: LocalStore,
    *,
    samples: Iterable[Sample] = (),
    captured: MutableMapping[Any, CapturedGraph] | None = None,
    build: Callable[[Backend, BuildRequest], BuildResult] = build_here,
) -> tuple[Entry, float, bool]:
    """Find the engine in the store or build it there.

    Args:
        build: runs the backend's build, here or in a child process.

    Returns:
        The entry, the seconds it took, and whether it was built.

    Raises:
        CandidateError, GraphBreakException: if it cannot be built.
    """
    key = engine_key(subject, graph, sample.shapes, backend, axes, recipe)
    start = time.perf_counter()
    with store.reserve(key) as slot:
        if slot.entry is not None:
            subject.stats.hits += 1
            return slot.entry, time.perf_counter() - start, False
        if slot.miss is not None:
            subject.stats.misses[slot.miss.reason] += 1
        with tempfile.TemporaryDirectory(prefix="aitune-build-") as folder:
            request = build_request(
                subject,
                graph,
                sample,
                axes,
                Path(folder),
                options=recipe.options,
                weights=recipe.weights,
                samples=samples,
                captured=captured,
            )
            declined = backend.supports(request)
            if declined:
                raise BuildError(f"{backend.name} declines {subject.path}: {declined}")
            result = build(backend, request)
            for name in result.files:
                slot.add(name, Path(folder) / name)
        seconds = time.perf_counter() - start
        subject.stats.builds += 1
        subject.stats.add_seconds("build", seconds)
        entry = slot.commit(
            engine={
                "backend": dict(result.engine),
                "envelope": result.envelope.to_dict(),
                "weights": recipe.weights,
                "lossy": recipe.lossy,
            },
            provenance={"aitune_hf": __version__, "build_seconds": round(seconds, 3), "path": subject.path},
        )
    return entry, seconds, True


def load_engine(
    subject: Subject,
    graph: GraphSpec,
    backend: Backend,
    key: EngineKey,
    store: LocalStore,
) -> tuple[InstalledEngine, float, int]:
    """Load an engine from the store, from a private copy of its files.

    Returns:
        The engine, not yet trusted; the seconds it took; the bytes of its files.

    Raises:
        EngineLoadError: if it is not there any more or does not load.
    """
    start = time.perf_counter()
    if key.weights_digest is not None and key.weights_digest != subject.weights.digest():
        raise EngineLoadError(f"the {key.backend} engine of {subject.path} holds other weights than the module has now")
    with tempfile.TemporaryDirectory(prefix="aitune-load-") as folder:
        entry = store.checkout(key, Path(folder) / "entry")
        if isinstance(entry, Miss):
            subject.stats.misses[entry.reason] += 1
            raise EngineLoadError(f"the {key.backend} engine of {subject.path} is not in the cache: {entry.reason}")
        engine_data: Any = entry.manifest.engine
        request = LoadRequest(
            path=subject.path,
            module=subject.module,
            folder=entry.path,
            engine=engine_data["backend"],
            device=subject.device,
        )
        try:
            engine = backend.load(request)
            if key.weights_digest is not None:
                engine = BakedEngine(engine, subject.weights, key.weights_digest)
        except CandidateError:
            raise
        except Exception as error:
            raise EngineLoadError(
                f"the {backend.name} engine of {subject.path} does not load: {type(error).__name__}: {error}"
            ) from error
    installed = InstalledEngine(
        graph=graph,
        envelope=ShapeEnvelope.from_dict(engine_data["envelope"]),
        engine=engine,
        backend=backend.name,
        weights=engine_data["weights"],
        lossy=bool(engine_data.get("lossy")),
        on_wrong=lambda reason: _evict(store, entry, reason),
    )
    seconds = time.perf_counter() - start
    subject.stats.add_seconds("load", seconds)
    size = sum(file.size for file in entry.manifest.files.values())
    return installed, seconds, size


def _evict(store: LocalStore, entry: Entry, reason: str) -> None:
    logger.warning("%s is taken out of the cache: %s", entry.manifest.key.entry_path, reason)
    store.evict(entry, f"wrong in use: {reason}")
