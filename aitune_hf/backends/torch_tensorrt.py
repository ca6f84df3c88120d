"""Torch-TensorRT: a graph as TensorRT engines where those can be had, and torch in between.

Written against the documented API of ``torch_tensorrt.dynamo``; the weights are part of the artefact. Its own engine
cache is never used: its key leaves out what tells two graphs apart, and its entries are pickles.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest, Recipe, check_format
from aitune_hf.backends.quiet import quiet_torch
from aitune_hf.backends.requirements import unmet_requirement
from aitune_hf.backends.tensorrt_sdk import driver_problem
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

__all__ = ["PACKAGE", "TorchTensorRTBackend"]

PACKAGE = "model.pt2"
_DEFAULTS: Mapping[str, Any] = {"min_block_size": 5}


class TorchTensorRTBackend:
    """Builds and loads what Torch-TensorRT compiles.

    Options:
        min_block_size: operators that a part of the graph must have to become a TensorRT engine.
    """

    name = "torch_tensorrt"
    native = True
    format = 1
    isolated = True

    def version(self) -> str:
        """The version of Torch-TensorRT, which is made for one torch and one TensorRT."""
        try:
            return importlib.metadata.version("torch-tensorrt")
        except importlib.metadata.PackageNotFoundError:
            return "none"

    def available(self) -> str | None:
        """None if engines can be built and run here."""
        try:
            _load_sdk()
        except ImportError as error:
            return f"Torch-TensorRT cannot be imported ({error}): pip install torch-tensorrt tensorrt"
        return driver_problem()

    def recipes(self, device: torch.device) -> list[Recipe]:
        """One, on CUDA: its weights are part of it."""
        return [Recipe(weights="baked", effort="max", cost=60.0)] if device.type == "cuda" else []

    def supports(self, request: BuildRequest) -> str | None:
        """None if the graph can be tried, else why not."""
        _checked_options(request.options)
        if request.weights != "baked":
            return "its engines hold their weights, and others were asked for"
        return unmet_requirement(request, ("cuda",))

    def build(self, request: BuildRequest) -> BuildResult:
        """Compile and save into ``request.workdir``."""
        options = _checked_options(request.options)
        reason = self.available()
        if reason:
            raise BuildError(f"{request.path}: torch_tensorrt cannot build this graph: {reason}")
        sdk = _load_sdk()
        graph = request.capture()
        example = tuple(leaf.detach().contiguous() for leaf in request.example.inputs)
        corners = graph.envelope.corners()
        inputs = [_input(sdk, leaf, corners[0][index], corners[-1][index]) for index, leaf in enumerate(example)]
        try:
            with quiet_torch():
                compiled = sdk.dynamo.compile(
                    graph.program,
                    arg_inputs=tuple(inputs),
                    device=request.device,
                    disable_tf32=True,
                    use_explicit_typing=True,
                    truncate_double=False,
                    min_block_size=options["min_block_size"],
                    cache_built_engines=False,
                    reuse_cached_engines=False,
                )
                sdk.save(
                    compiled,
                    str(request.workdir / PACKAGE),
                    output_format="exported_program",
                    arg_inputs=example,
                    retrace=False,
                )
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise BuildError(
                f"{request.path}: Torch-TensorRT failed: {type(error).__name__}: {lines[0][:300] if lines else ''}"
            ) from error
        return BuildResult(files=[PACKAGE], envelope=graph.envelope, engine={"format": self.format, "options": options})

    def load(self, request: LoadRequest) -> TorchTensorRTEngine:
        """Load what was saved."""
        check_format(request, self.format)
        problem = driver_problem()
        if problem is None and request.device.type != "cuda":
            problem = f"the module is on {request.device}, the engine runs on cuda"
        if problem is None:
            problem = self.available()
        if problem:
            raise EngineLoadError(f"{request.path}: a Torch-TensorRT engine cannot be loaded: {problem}")
        return TorchTensorRTEngine(request.folder / PACKAGE, request.path, request.device)


class TorchTensorRTEngine:
    """What Torch-TensorRT saved, as an engine. Calls take turns: its engines have one execution context."""

    def __init__(self, file: Path, path: str, device: torch.device) -> None:
        _load_sdk()  # Its operators must be known before a program that calls them is read.
        self._path = path
        self._device = device
        self._turn = threading.Lock()
        self._module: Any = torch.export.load(str(file)).module()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        with self._turn, torch.no_grad():
            if self._module is None:
                raise EngineLoadError(f"{self._path}: the engine is closed")
            outputs = self._module(*inputs)
        return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)

    def rebind(self) -> None:
        """It cannot follow: the weights are part of it."""
        raise EngineLoadError(f"{self._path}: the weights are part of the engine; tune again to use the new ones")

    def close(self) -> None:
        """Let go of the engine."""
        with self._turn:
            self._module = None


def _load_sdk() -> Any:
    """The package.

    Raises:
        ImportError: if it or one of its libraries is missing; it raises whatever comes then.
    """
    try:
        return importlib.import_module("torch_tensorrt")
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ImportError(lines[0] if lines else type(error).__name__) from error


def _input(sdk: Any, leaf: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> Any:
    if tuple(low) == tuple(high):
        return sdk.Input(shape=tuple(leaf.shape), dtype=leaf.dtype)
    return sdk.Input(min_shape=tuple(low), opt_shape=tuple(leaf.shape), max_shape=tuple(high), dtype=leaf.dtype)


def _checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(given.keys() - _DEFAULTS.keys())
    if unknown:
        raise ConfigError(f"torch_tensorrt has no option {', '.join(unknown)}; it has {', '.join(sorted(_DEFAULTS))}")
    return {**_DEFAULTS, **given}
