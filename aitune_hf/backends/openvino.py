"""OpenVINO: a module's graph as data that holds no weights. The fastest on most CPUs, and nothing in it to trust."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest, Recipe, check_format
from aitune_hf.backends.constant_map import ConstantMap, ProbedBuild, find_constant_map
from aitune_hf.backends.openvino_convert import constant_nodes, constant_value, convert, decompose
from aitune_hf.backends.openvino_engine import CompiledGraph, OpenVINOEngine
from aitune_hf.backends.openvino_integers import LimitedEngine, check_numbers
from aitune_hf.backends.openvino_model import ModelFiles, take_weights_out, write_model
from aitune_hf.backends.openvino_sdk import (
    OV_TYPES,
    missing_nncf,
    missing_openvino,
    openvino_version,
    runs_bf16,
)
from aitune_hf.backends.output_check import first_difference
from aitune_hf.backends.probes import values_of, with_probes
from aitune_hf.backends.requirements import unmet_requirement
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

if TYPE_CHECKING:
    from aitune_hf.backends.export import CapturedGraph

__all__ = ["OpenVINOBackend"]

_CHOICES = {"precision": ("f32", "bf16"), "compress": ("int8",), "quantize": ("int8",)}
_SEEDS = (1, 2)
#: How far a freshly converted model may be from torch, relative to its largest output: far more than rounding, far less
#: than a wrong graph.
_ROUGHLY = 0.02


class OpenVINOBackend:
    """Builds and loads OpenVINO models, on the CPU.

    Options:
        precision: what it computes in, ``f32`` (default) or ``bf16`` (lossy).
        compress: ``int8`` stores weights in 8 bits (lossy, baked).
        quantize: ``int8`` computes in 8 bits, calibrated on the recorded calls (lossy, baked).
    """

    name = "openvino"
    native = False
    format = 3
    isolated = True

    def version(self) -> str:
        """OpenVINO's version: it makes the model and runs it."""
        return openvino_version()

    def available(self) -> str | None:
        """None if OpenVINO is installed."""
        return missing_openvino()

    def recipes(self, device: torch.device) -> list[Recipe]:
        """Without weights in f32, and in bf16 where the CPU has it; int8 with the weights in it.

        What cannot be brought to 8 bits is computed in bf16 where the CPU has it.
        """
        if device.type != "cpu":
            return []
        found = [Recipe(options={"precision": "f32"}, weights="filled", effort="fast", cost=10.0)]
        short = {"precision": "bf16"} if runs_bf16() else {}
        if short:
            found.append(Recipe(options=short, weights="filled", lossy=True, cost=10.0))
        found += [
            Recipe(options={"quantize": "int8", **short}, weights="baked", lossy=True, cost=20.0),
            Recipe(options={"compress": "int8"}, weights="baked", lossy=True, effort="max", cost=20.0),
        ]
        return found

    def supports(self, request: BuildRequest) -> str | None:
        """None if the graph can be tried, else why not."""
        options = _checked_options(request)
        if (options["compress"] or options["quantize"]) and missing_nncf():
            return missing_nncf()
        if options["precision"] == "bf16" and not runs_bf16():
            return "this CPU does not compute in bfloat16"
        graph, module = request.graph, request.module
        places = [*graph.input_spec.tensors.items(), *graph.output_spec.tensors.items()]
        owned = [*module.named_parameters(), *module.named_buffers()]
        types = [*((str(place), spec.dtype) for place, spec in places), *((name, value.dtype) for name, value in owned)]
        for name, dtype in types:
            if dtype not in OV_TYPES:
                return f"{name} is {dtype}, which OpenVINO does not compute with on the CPU"
        return unmet_requirement(request, ["cpu"])

    def build(self, request: BuildRequest) -> BuildResult:
        """Build a model into ``request.workdir``."""
        options = _checked_options(request)
        reason = self.available() or self.supports(request)
        if reason:
            raise BuildError(f"{request.path}: OpenVINO cannot build this graph: {reason}")
        if request.weights == "baked":
            from aitune_hf.backends.openvino_int8 import bake

            graph = request.capture()
            basic = decompose(graph, request.path)
            limits = check_numbers(basic, request.example.inputs, request.path)
            constants = ConstantMap.baked(basic)
            model = bake(convert(basic, request.path), options, request)
        else:
            graph = with_probes(request.capture(), _SEEDS[0])
            basic = decompose(graph, request.path)
            limits = check_numbers(basic, request.example.inputs, request.path)
            constants, model = _without_weights(basic, request.path)
        files = write_model(model, request.workdir)
        engine = {
            "format": self.format,
            "precision": options["precision"],
            "rounds": options["precision"] != "f32" or bool(options["compress"] or options["quantize"]),
            "integers": [limit and list(limit) for limit in limits],
            **constants.to_json(),
        }
        _check(graph, constants, request)
        return BuildResult(files=files, envelope=graph.envelope, engine=engine)

    def load(self, request: LoadRequest) -> OpenVINOEngine:
        """Load a model, fill it from the module and compile it. Its calls may hold the integers that it is right for."""
        check_format(request, self.format)
        reason = self.available()
        if reason:
            raise EngineLoadError(f"{request.path}: {reason}")
        return LimitedEngine(request)


def _without_weights(graph: CapturedGraph, where: str) -> tuple[ConstantMap, Any]:
    """A model whose weights are inputs, and which tensor each of them is."""
    probed = [with_probes(graph, seed) for seed in _SEEDS]
    models = [convert(program, where) for program in probed]
    builds = [
        ProbedBuild(graph=program, slots={name: constant_value(node) for name, node in constant_nodes(model).items()})
        for program, model in zip(probed, models, strict=True)
    ]
    constants, _ = find_constant_map(builds, where)
    take_weights_out(models[0], constants)
    return constants, models[0]


def _check(graph: CapturedGraph, constants: ConstantMap, request: BuildRequest) -> None:
    """Load what was written and run the example on it: a converter that went wrong is found here and now.

    Raises:
        BuildError: if it fails, or is not what the program gives.
    """
    where, inputs = request.path, list(request.example.inputs)
    try:
        model, weights = ModelFiles.read(request.workdir, where).model(constants, values_of(graph.program), where)
        compiled = CompiledGraph(model, weights, "f32", 1, where)
        got = compiled.run(0, inputs)
    except (EngineLoadError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BuildError(f"{where}: OpenVINO cannot run the model it made: {' '.join(lines)[:300]}") from error
    with torch.no_grad():
        want = graph.program.module(check_guards=False)(*inputs)
    # How near a lossy one is, is measured on real values later.
    problem = first_difference(got, want, math.inf if request.weights == "baked" else _ROUGHLY)
    if problem:
        raise BuildError(f"{where}: OpenVINO made a wrong model: {problem}")


def _checked_options(request: BuildRequest) -> dict[str, Any]:
    options: Mapping[str, Any] = request.options
    unknown = sorted(options.keys() - _CHOICES.keys())
    if unknown:
        raise ConfigError(f"openvino has no option {', '.join(unknown)}; it has {', '.join(sorted(_CHOICES))}")
    for name, value in options.items():
        if value not in _CHOICES[name]:
            raise ConfigError(f"openvino's option {name} is one of {', '.join(_CHOICES[name])}, got {value!r}")
    if (("compress" in options) or ("quantize" in options)) and request.weights != "baked":
        raise ConfigError('an int8 model holds its weights, so it is built with weights="baked"')
    return {"precision": "f32", "compress": None, "quantize": None, **options}
