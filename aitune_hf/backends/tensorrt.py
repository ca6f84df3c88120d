"""TensorRT and TensorRT-RTX: a graph as a plan for one generation of NVIDIA GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest, Recipe, check_format
from aitune_hf.backends.onnx_export import OnnxExport, export_onnx
from aitune_hf.backends.onnx_precision import SHORT_TYPES, shortened
from aitune_hf.backends.requirements import unmet_requirement
from aitune_hf.backends.tensorrt_engine import TensorRTEngine, engine_summary, load_plan, refittable_names
from aitune_hf.backends.tensorrt_plan import Plan, PlanOrder, make_plan
from aitune_hf.backends.tensorrt_sdk import RTX, TENSORRT, Sdk, driver_problem
from aitune_hf.backends.tensorrt_weights import Delivery, PlanWeights, weights_as_inputs, weights_of
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

if TYPE_CHECKING:
    from aitune_hf.backends.export import CapturedGraph

__all__ = ["PLAN", "TensorRTBackend", "TensorRTRTXBackend"]

PLAN = "model.plan"
_PRECISIONS = ("strict", "tf32", *SHORT_TYPES)
_DEFAULTS: Mapping[str, Any] = {"target": None, "precision": "strict", "refit": False}


class TensorRTBackend:
    """Builds and loads TensorRT plans.

    Options:
        target: GPU generation to build for, such as ``"sm89"``; None is the GPU at hand.
        precision: ``"strict"`` computes in the graph's own types; ``"tf32"`` rounds the factors of float32 products,
            ``"float16"`` and ``"bfloat16"`` compute in that type, all of which is lossy.
        refit: fill the weights into the loaded engine instead of reading the module's in place. Needs a driver to build.
    """

    name = "tensorrt"
    native = True
    format = 1
    isolated = True
    _sdk: Sdk = TENSORRT

    def version(self) -> str:
        """The package's version: plans of another one are not read."""
        return self._sdk.version()

    def available(self) -> str | None:
        """None if engines for the GPU at hand can be built and run here."""
        return self._sdk.missing() or driver_problem()

    def can_aim(self) -> str | None:
        """None if plans for other GPUs can be built here, with a GPU or without; else why not."""
        if not self._sdk.aims:
            return f"{self._sdk.title} builds for the GPU at hand only"
        return self._sdk.missing()

    def targets(self) -> list[str]:
        """GPU generations that plans can be built for without having one."""
        return self._sdk.targets()

    def recipes(self, device: torch.device) -> list[Recipe]:
        """On CUDA: on live weights, with weights filled in, and the lossy ones."""
        if device.type != "cuda":
            return []
        return [
            Recipe(weights="bound", effort="fast", cost=15.0),
            Recipe(options={"refit": True}, weights="filled", cost=20.0),
            Recipe(options={"precision": "bfloat16"}, weights="filled", lossy=True, cost=15.0),
            Recipe(options={"precision": "float16"}, weights="filled", lossy=True, cost=15.0),
            Recipe(options={"precision": "tf32"}, weights="bound", lossy=True, effort="max", cost=15.0),
        ]

    def supports(self, request: BuildRequest) -> str | None:
        """None if the graph can be tried, else why not."""
        options = _checked_options(self.name, request.options)
        unmet = unmet_requirement(request, ("cuda",) if options["target"] is None else ("cpu", "cuda"))
        if unmet:
            return unmet
        graph = request.graph
        specs = [*graph.input_spec.tensors.values(), *graph.output_spec.tensors.values()]
        if any(spec.dtype == torch.float64 for spec in specs):
            return f"it takes or gives float64, which {self._sdk.title} does not have"
        weights = [*request.module.parameters(), *request.module.buffers()]
        has_float = any(tensor.dtype == torch.float32 for tensor in (*weights, *request.example.inputs))
        if options["precision"] != "strict" and not has_float:
            return "nothing in it is float32 that could be computed in another precision"
        return None

    def build(self, request: BuildRequest) -> BuildResult:
        """Build a plan into ``request.workdir``."""
        options = _checked_options(self.name, request.options)
        target = options["target"]
        reason = self.available() if target is None else self.can_aim()
        if reason:
            raise BuildError(f"{request.path}: {self.name} cannot build this graph: {reason}")
        if target is not None and target not in self.targets():
            raise BuildError(
                f"{request.path}: {self._sdk.title} {self.version()} cannot build for {target}: it can for "
                f"{', '.join(self.targets())}"
            )
        delivery = _delivery(request, options)
        graph = request.capture()
        export = export_onnx(graph, opset=self._sdk.opset, path=request.path)
        dtype = options["precision"] if options["precision"] in SHORT_TYPES else None
        recorded_elsewhere = target is not None and request.device.type != "cuda"
        weights = weights_of(graph, export, delivery, dtype, for_cuda=recorded_elsewhere, where=request.path)
        if dtype is not None:
            export = _in_type(export, dtype)
        order = PlanOrder(
            shapes=_shapes(graph, export, request),
            target=target,
            tf32=options["precision"] == "tf32",
            refit=delivery == "refit",
        )
        plan = self._plan(export, order, delivery, request.path)
        inputs = [name if name in plan.inputs else None for name in export.inputs]
        if delivery == "inputs":
            taken = {name: constant for name, constant in weights.constants.items() if name in plan.inputs}
            weights = replace(weights, constants=taken)
        engine = {
            "format": self.format,
            "target": target,
            "options": options,
            "inputs": inputs,
            "outputs": list(export.outputs),
            "weights": weights.to_json(),
        }
        if target is not None:
            engine["verified"] = False  # By whoever built it.
        else:
            engine["summary"] = self._examine(plan, weights, request)
        (request.workdir / PLAN).write_bytes(plan.content)
        return BuildResult(files=[PLAN], envelope=graph.envelope, engine=engine)

    def load(self, request: LoadRequest) -> TensorRTEngine:
        """Load a plan and give it the module's weights."""
        check_format(request, self.format)
        # Asked first: without a driver some runtimes crash as soon as they are touched.
        problem = driver_problem()
        if problem is None and request.device.type != "cuda":
            problem = f"the module is on {request.device}, the engine runs on cuda"
        if problem:
            raise EngineLoadError(f"{request.path}: a {self._sdk.title} engine cannot be loaded: {problem}")
        return TensorRTEngine(self._sdk, request, (request.folder / PLAN).read_bytes())

    def _plan(self, export: OnnxExport, order: PlanOrder, delivery: Delivery, where: str) -> Plan:
        if delivery == "inputs":
            return make_plan(self._sdk, weights_as_inputs(export).SerializeToString(deterministic=True), order, where)
        with tempfile.TemporaryDirectory(prefix="aitune-onnx-") as folder:
            file = Path(folder) / "model.onnx"
            export.save(file)
            return make_plan(self._sdk, file, order, where)

    def _examine(self, plan: Plan, weights: PlanWeights, request: BuildRequest) -> dict[str, Any]:
        """Load what was built once, to see that no weight stayed in it, and what it is like."""
        _runtime, engine = load_plan(self._sdk, plan.content, request.device, request.path)
        if weights.delivery == "refit":
            stuck = sorted(weights.constants.keys() - refittable_names(self._sdk, engine))
            if stuck:
                raise BuildError(
                    f"{request.path}: {self._sdk.title} cannot leave these weights out of the plan: {', '.join(stuck[:5])}"
                )
        return engine_summary(self._sdk.load(), engine)


class TensorRTRTXBackend(TensorRTBackend):
    """Builds and loads TensorRT-RTX plans, for GPUs of other machines too. Options as for :class:`TensorRTBackend`."""

    name = "tensorrt_rtx"
    _sdk = RTX


def _checked_options(backend: str, given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(given.keys() - _DEFAULTS.keys())
    if unknown:
        raise ConfigError(f"{backend} has no option {', '.join(unknown)}; it has {', '.join(sorted(_DEFAULTS))}")
    options = {**_DEFAULTS, **given}
    if options["precision"] not in _PRECISIONS:
        raise ConfigError(f"{backend}: precision must be one of {', '.join(_PRECISIONS)}, got {options['precision']!r}")
    if options["refit"] and options["target"]:
        raise ConfigError(f"{backend}: a plan whose weights are filled in later cannot be built for another GPU")
    return options


def _delivery(request: BuildRequest, options: Mapping[str, Any]) -> Delivery:
    if request.weights == "baked":
        return "plan"
    delivery: Delivery = "refit" if options["refit"] else "inputs"
    if request.weights == "bound" and (delivery == "refit" or options["precision"] in SHORT_TYPES):
        raise BuildError(f"{request.path}: with these options the engine holds copies of the weights: ask for 'filled'")
    return delivery


def _in_type(export: OnnxExport, dtype: str) -> OnnxExport:
    wanted = getattr(torch, dtype)
    weights = {
        name: tensor.to(wanted) if tensor.dtype == torch.float32 else tensor for name, tensor in export.weights.items()
    }
    return replace(export, model=shortened(export.model, dtype), weights=weights)


def _shapes(graph: CapturedGraph, export: OnnxExport, request: BuildRequest) -> dict[str, Any]:
    corners = graph.envelope.corners()
    typical = request.example.shapes
    return {name: (corners[0][index], typical[index], corners[-1][index]) for index, name in enumerate(export.inputs)}
