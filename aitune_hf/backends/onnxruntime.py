"""ONNX Runtime: a module's graph as ONNX, which is data, filled with the module's weights when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest, Recipe, check_format
from aitune_hf.backends.constant_map import ConstantMap, ProbedBuild, find_constant_map
from aitune_hf.backends.onnx_export import OnnxExport, declare_external, export_onnx, missing_exporter
from aitune_hf.backends.onnxruntime_engine import OnnxRuntimeEngine
from aitune_hf.backends.onnxruntime_session import (
    WEIGHTS,
    Session,
    check_model,
    element_type,
    missing_runtime,
    providers_for,
)
from aitune_hf.backends.output_check import first_difference
from aitune_hf.backends.probes import values_of, with_probes
from aitune_hf.backends.quiet import quiet_torch
from aitune_hf.backends.requirements import elsewhere, unmet_requirement
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

if TYPE_CHECKING:
    import onnx

    from aitune_hf.backends.export import CapturedGraph

__all__ = ["OnnxRuntimeBackend"]

MODEL = "model.onnx"
_OPTIONS: dict[str, Any] = {"opset": 23, "precision": "strict"}
_PRECISIONS = ("strict", "int8")
#: The first version of ONNX that torch exports to, and the first in which attention is one operator.
_OLDEST_OPSET = 18
#: Seeds of two sets of weights that have nothing in common.
_PROBES = (1, 2)
#: A result of the trial run may differ from torch's by this part of the largest value there: mistakes do by more.
_TRIAL_TOLERANCE = {"strict": 0.02, "int8": 0.5}


class OnnxRuntimeBackend:
    """Builds ONNX graphs without weights, and runs them with ONNX Runtime on CPU, and on CUDA where it has that.

    Options:
        opset: version of the ONNX operators. From 23 on, attention is one operator.
        precision: ``"strict"``, or ``"int8"`` for matrices of 8 bit, whose inputs are quantised as they come.
    """

    name = "onnxruntime"
    native = False
    format = 1
    isolated = True

    def version(self) -> str:
        """ONNX Runtime's version: it decides what the graph is run with."""
        from importlib.metadata import PackageNotFoundError, version

        for package in ("onnxruntime", "onnxruntime-gpu"):
            try:
                return ".".join(version(package).partition("+")[0].split(".")[:3])
            except PackageNotFoundError:
                continue
        return "0"

    def available(self) -> str | None:
        """None if engines can be built here, else what to install."""
        return missing_runtime() or missing_exporter()

    def recipes(self, device: torch.device) -> list[Recipe]:
        """Graphs of the newer operators first; those of the older ones, and of 8 bit, at more effort."""
        if missing_runtime() or not providers_for(device):
            return []
        plain = Recipe(options={"opset": 23}, weights="filled", effort="fast", cost=8.0)
        if device.type != "cpu":
            return [plain]
        older = Recipe(options={"opset": 18}, weights="filled", effort="max", cost=8.0)
        short = Recipe(options={"opset": 23, "precision": "int8"}, weights="baked", lossy=True, cost=10.0)
        return [plain, older, short]

    def supports(self, request: BuildRequest) -> str | None:
        """None if the graph can be tried, else why not."""
        # A session takes all inputs from the memory of one device.
        reason = unmet_requirement(request) or elsewhere(request, request.device.type, constants=False)
        if reason:
            return reason
        if not providers_for(request.device):
            return f"this build of ONNX Runtime does not run on {request.device.type}: pip install onnxruntime-gpu"
        for place, spec in request.graph.input_spec.tensors.items():
            if element_type(spec.dtype) is None:
                return f"{place} is of {spec.dtype}, which ONNX Runtime does not take"
        return None

    def build(self, request: BuildRequest) -> BuildResult:
        """Write the graph into ``request.workdir``, after a trial run with random weights."""
        options = _checked_options(request.options, request.weights)
        reason = self.available() or self.supports(request)
        if reason:
            raise BuildError(f"{request.path}: onnxruntime cannot build this graph: {reason}")
        graph = request.capture()
        if options["precision"] == "int8":
            from aitune_hf.backends.onnxruntime_int8 import quantised

            weights = ConstantMap.baked(graph)
            model = quantised(export_onnx(graph, opset=options["opset"], path=request.path, fold_weights=True))
        else:
            model, weights, graph = _without_weights(graph, options["opset"], request.path)
        content: bytes = model.SerializeToString(deterministic=True)
        _try(content, weights, graph, request, _TRIAL_TOLERANCE[options["precision"]])
        (request.workdir / MODEL).write_bytes(content)
        engine = {"format": self.format, "options": options, "weights": weights.to_json()}
        return BuildResult(files=[MODEL], envelope=graph.envelope, engine=engine)

    def load(self, request: LoadRequest) -> OnnxRuntimeEngine:
        """Open a session on the module's weights."""
        reason = missing_runtime()
        if reason:
            raise EngineLoadError(f"{request.path}: {reason}")
        check_format(request, self.format)
        weights = ConstantMap.from_json(request.engine["weights"])
        model = (request.folder / MODEL).read_bytes()
        try:
            check_model(model, weights.slots)
        except EngineLoadError as error:
            raise EngineLoadError(f"{request.path}: {error}") from error
        return OnnxRuntimeEngine(request, model, weights)


def _checked_options(options: Mapping[str, Any], weights: str) -> dict[str, Any]:
    unknown = sorted(options.keys() - _OPTIONS.keys())
    if unknown:
        raise ConfigError(f"onnxruntime has no option {', '.join(unknown)}; it has {', '.join(sorted(_OPTIONS))}")
    checked = {**_OPTIONS, **options}
    if checked["precision"] not in _PRECISIONS:
        raise ConfigError(f"onnxruntime's precision is one of {', '.join(_PRECISIONS)}, got {checked['precision']!r}")
    if not isinstance(checked["opset"], int) or checked["opset"] < _OLDEST_OPSET:
        raise ConfigError(f"onnxruntime's opset is a number from {_OLDEST_OPSET} on, got {checked['opset']!r}")
    wanted = "baked" if checked["precision"] == "int8" else "filled"
    if weights != wanted:
        raise ConfigError(
            f"an onnxruntime engine of precision {checked['precision']} has {wanted} weights, not {weights}"
        )
    return checked


def _without_weights(graph: CapturedGraph, opset: int, path: str) -> tuple[onnx.ModelProto, ConstantMap, CapturedGraph]:
    """The graph as ONNX, which of its constants are weights, and the program with the weights it was written with."""
    graphs = [with_probes(graph, seed) for seed in _PROBES]
    exports = [export_onnx(probed, opset=opset, path=path) for probed in graphs]
    first, second = exports
    weights, _ = find_constant_map(
        [ProbedBuild(graph=probed, slots=export.constants()) for probed, export in zip(graphs, exports, strict=True)],
        path,
    )
    if first.structure() != second.structure():
        raise BuildError(f"{path}: weights became part of the ONNX graph itself, so it would be right for one set only")
    inline = sorted(first.weights.keys() - weights.slots.keys())
    if inline:
        raise BuildError(f"{path}: no weight of the module is the ONNX graph's constant {inline[0]!r}")
    return _emptied(first, weights), weights, graphs[0]


def _emptied(export: OnnxExport, weights: ConstantMap) -> onnx.ModelProto:
    """The graph with a name in place of each weight's values."""
    for tensor in export.model.graph.initializer:
        if tensor.name in weights.slots:
            declare_external(tensor, WEIGHTS)
    return export.model


def _try(content: bytes, weights: ConstantMap, graph: CapturedGraph, request: BuildRequest, tolerance: float) -> None:
    """Run the graph on the example and compare with the program: it must at least be the same function.

    Raises:
        BuildError: if ONNX Runtime cannot run it, or it is another one.
    """
    inputs = [leaf.detach().contiguous() for leaf in request.example.inputs]
    try:
        session = Session(content, weights, values_of(graph.program), request.device, torch.get_num_threads())
        outputs = session.run(inputs)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise BuildError(f"{request.path}: {lines[0][:300] if lines else type(error).__name__}") from error
    with torch.no_grad(), quiet_torch():
        expected = graph.program.module()(*inputs)
    problem = first_difference(outputs, expected, tolerance)
    if problem:
        raise BuildError(f"{request.path}: the ONNX graph is another function than the program: {problem}")
