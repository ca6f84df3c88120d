"""The seam between a graph and whatever can run it faster.

A backend turns a :class:`BuildRequest` into files and loads such files into an :class:`Engine`. Building and loading
are separate, and what passes between them is plain data: files in a folder, and a JSON object that the backend owns.
A backend declines with a reason; it never decides whether its engine is right or fast. The tuner does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from aitune_hf.errors import EngineLoadError
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.sample_store import Sample
from aitune_hf.graph.shape_envelope import ShapeEnvelope

if TYPE_CHECKING:
    from aitune_hf.backends.export import CapturedGraph

__all__ = [
    "AxisRange",
    "Backend",
    "BuildRequest",
    "BuildResult",
    "Effort",
    "Engine",
    "LoadRequest",
    "Recipe",
    "WeightsPolicy",
    "check_format",
    "full_version",
    "unread_format",
]

#: How an engine gets its weights: it reads the module's live tensors, is filled from them at load, or holds its own.
WeightsPolicy = Literal["bound", "filled", "baked"]

#: How much time a tuning may take to find something faster.
Effort = Literal["fast", "balanced", "max"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way in which a backend can build a graph.

    Attributes:
        options: the backend's own options, JSON values; part of the cache key.
        weights: how such an engine gets its weights.
        lossy: True if results differ from eager's by more than rounding.
        effort: the least effort at which it is tried.
        cost: seconds that building such an engine takes, very roughly; the cheapest is tried first.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    weights: WeightsPolicy = "bound"
    lossy: bool = False
    effort: Effort = "balanced"
    cost: float = 10.0


@dataclass(frozen=True, kw_only=True)
class AxisRange:
    """An axis that an engine should take in every size from ``min`` to ``max``, in steps of ``multiple_of``.

    What it does take is said by the envelope of the result; recorded calls always lie within it.

    Axes of the same ``name`` always have the same size; an axis without a name varies by itself.
    """

    min: int
    max: int
    multiple_of: int = 1
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One graph of one module, to be built into an engine.

    Attributes:
        path: the module's path, for messages.
        module: the module; no patch of ours is left on it or its descendants while a backend sees it.
        forward: the function to capture, bound to ``module``. Not always ``module.forward``: hooks of other
            libraries that wrap it stay outside an engine.
        graph: the graph.
        example: a recorded call to trace with, resized so that no axis that varies has size 1.
        axes: per tensor input, in the order of ``graph.input_spec.tensors``, per axis: its range, or None if fixed.
        options: the backend's own options, JSON values.
        workdir: an empty folder for the engine's files.
        weights: how the engine is to get its weights, see :class:`Recipe`.
        samples: recorded calls with outputs, for a backend that calibrates or chooses by measurement.
        captured: the graph as a program, by axes: shared by all requests for one graph, so that it is traced once.
    """

    path: str
    module: nn.Module
    forward: Callable[..., Any]
    graph: GraphSpec
    example: Sample
    axes: tuple[tuple[AxisRange | None, ...], ...]
    workdir: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: WeightsPolicy = "bound"
    samples: Iterable[Sample] = ()
    captured: MutableMapping[Any, CapturedGraph] = field(default_factory=dict)

    def capture(self) -> CapturedGraph:
        """The graph as a program.

        Raises:
            GraphBreakException: if the forward cannot be captured, with the line of the user's code where known.
            BuildError: if it can, but not for the shapes asked for.
        """
        if self.axes not in self.captured:
            from aitune_hf.backends.export import capture  # Not needed to load an engine, and slow to import.

            self.captured[self.axes] = capture(self)
        return self.captured[self.axes]

    @property
    def device(self) -> torch.device:
        """Where the graph runs."""
        return next((leaf.device for leaf in self.example.inputs), torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What a build leaves.

    Attributes:
        files: names of the files in the request's ``workdir``.
        envelope: shapes that the engine takes.
        engine: JSON object that :meth:`Backend.load` gets back.
    """

    files: Sequence[str]
    envelope: ShapeEnvelope
    engine: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Files of an engine, to be loaded for one module.

    Attributes:
        path: the module's path, for messages.
        module: the module whose weights the engine uses.
        folder: holds the engine's files, digests already checked.
        engine: the JSON object of :class:`BuildResult`.
        device: where to run; its index may be None.
        threads: how many threads may run the engine at once without waiting for each other.
    """

    path: str
    module: nn.Module
    folder: Path
    engine: Mapping[str, Any]
    device: torch.device
    threads: int = 1


@runtime_checkable
class Engine(Protocol):
    """A loaded engine. May be called by several threads at once."""

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run on contiguous tensors in the order of the graph's inputs; shapes were checked by the caller.

        Returns:
            The tensor leaves of the output, in the order of the graph's outputs. ``inputs`` may be emptied.

        Raises:
            UnfitInputError: if it does not take these values: eager answers this call, and the engine the next ones.
                Any other error takes it out of use.
        """

    def rebind(self) -> None:
        """Take up the module's weights again, after their storage has changed. Calls may wait, and see no mixture.

        What does not fit is not held on to: the weights from before are let go of. An interrupt may end it at any point;
        then it is called again.

        Raises:
            EngineLoadError: if they no longer have the names, shapes, dtypes, strides or device the engine needs.
        """

    def close(self) -> None:
        """Let go of native resources and temporary files. Calling it twice is fine."""


@runtime_checkable
class Backend(Protocol):
    """Builds and loads engines of one kind.

    Attributes:
        name: short name, also in cache paths.
        native: True if the artefact is executable code, so that loading one runs its author's code and that it is
            valid in one environment only. Else it is data, which every machine with this backend can read.
        isolated: True if building may hang or crash in native code. It is then done in a child process, where the
            module is not: :meth:`build` must get all it needs from :meth:`BuildRequest.capture`, whose weights are
            random there, and from the request's other fields.

    A backend that changes the form of its artefacts says so with an integer attribute ``format``, which is 1 where there is
    none: engines of another form are not found any more, and built anew.
    """

    name: str
    native: bool
    isolated: bool

    def version(self) -> str:
        """Version of what generates the artefact; part of the cache key, as :func:`full_version` gives it."""

    def available(self) -> str | None:
        """None if it can build here, else why not and what would help. Loading may need less."""

    def recipes(self, device: torch.device) -> Sequence[Recipe]:
        """The ways in which it can build for ``device``, the plain one first; empty if it serves no such device."""

    def supports(self, request: BuildRequest) -> str | None:
        """None if it can try this graph with the request's options, else why not."""

    def build(self, request: BuildRequest) -> BuildResult:
        """Build an engine into ``request.workdir``.

        Raises:
            BuildError: if it cannot.
            GraphBreakException: if the forward cannot be captured as one graph.
        """

    def load(self, request: LoadRequest) -> Engine:
        """Load an engine.

        Raises:
            EngineLoadError: if it cannot be loaded or the module's weights do not fit.
        """


def full_version(backend: Backend) -> str:
    """The backend's version and, from the second form of its artefacts on, that form: ``"2026.4.1+format3"``."""
    number = getattr(backend, "format", 1)
    return backend.version() if number == 1 else f"{backend.version()}+format{number}"


def unread_format(backend: Backend, version: str) -> str | None:
    """Why artefacts of a :func:`full_version` are not read here, as far as their form tells; None if they are."""
    found, here = re.search(r"\+format(\d{1,9})$", version), getattr(backend, "format", 1)
    number = int(found.group(1)) if found else 1
    return None if number == here else f"in {backend.name}'s format {number}, here {here} is read"


def check_format(request: LoadRequest, number: int) -> None:
    """Raise ``EngineLoadError`` unless the engine's description is of this format."""
    found = request.engine.get("format")
    if found != number:
        raise EngineLoadError(f"{request.path}: the engine's format is unknown: {found}")
