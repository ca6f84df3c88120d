"""``torch.compile``: for forwards that no other backend can capture as one graph.

There is no artefact to share: the file of an engine is the recipe alone, and each process compiles again at the first
call of each kind, faster where the compiler's own cache of this machine helps. So it is tried at the highest effort only.
"""

from __future__ import annotations

import json
import os
import sysconfig
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aitune_hf.backends.aoti_compile import compiler
from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest, Recipe, check_format
from aitune_hf.backends.quiet import quiet_torch
from aitune_hf.backends.requirements import unmet_requirement
from aitune_hf.errors import BuildError, EngineLoadError
from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope
from aitune_hf.graph.structure import Node, flatten, unflattener

__all__ = ["CompiledEngine", "TorchCompileBackend"]

RECIPE = "recipe.json"


class TorchCompileBackend:
    """Compiles a module's forward in the process that runs it."""

    name = "torch_compile"
    native = False
    format = 1
    isolated = False

    def version(self) -> str:
        """Torch's version."""
        return torch.__version__.partition("+")[0]

    def available(self) -> str | None:
        """None if kernels can be compiled here."""
        if compiler() is None:
            name = os.environ.get("CXX", "g++")
            return f"no C++ compiler found: install {name} (on Debian and Ubuntu: apt-get install g++)"
        if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            return "no Python.h found, which its kernels need (on Debian and Ubuntu: apt-get install python3-dev)"
        return None

    def recipes(self, device: torch.device) -> list[Recipe]:
        """One, at the highest effort."""
        return [Recipe(weights="bound", effort="max", cost=60.0)]

    def supports(self, request: BuildRequest) -> str | None:
        """None if the graph can be tried, else why not."""
        forward = request.forward
        if getattr(forward, "__func__", None) is not type(request.module).forward:
            return "its forward was replaced on the instance"
        return unmet_requirement(request)

    def build(self, request: BuildRequest) -> BuildResult:
        """Compile once, to see that it can be done, and note how."""
        reason = self.available() or self.supports(request)
        if reason:
            raise BuildError(f"{request.path}: torch.compile cannot build this graph: {reason}")
        engine = {
            "format": self.format,
            "input_node": request.example.input_node.to_json(),
            "signature": request.graph.forward_signature.to_dict(),
            "context": request.graph.context.to_dict(),
            "dynamic": any(axis is not None for row in request.axes for axis in row),
        }
        compiled = CompiledEngine(request.path, request.module, engine, request.device)
        try:
            compiled(list(request.example.inputs))
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BuildError(f"{request.path}: torch.compile failed: {lines[0][:300]}") from error
        finally:
            compiled.close()
        (request.workdir / RECIPE).write_text(json.dumps({"format": self.format, "dynamic": engine["dynamic"]}) + "\n")
        return BuildResult(files=[RECIPE], envelope=_asked_for(request), engine=engine)

    def load(self, request: LoadRequest) -> CompiledEngine:
        """An engine that compiles at its first call."""
        check_format(request, self.format)
        return CompiledEngine(request.path, request.module, request.engine, request.device)


class CompiledEngine:
    """A module's own forward, compiled; it reads the live weights by itself."""

    def __init__(self, path: str, module: torch.nn.Module, engine: Mapping[str, Any], device: torch.device) -> None:
        self._path = path
        self._module = weakref.ref(module)  # The module owns its engines.
        self._rebuild = unflattener(Node.from_json(engine["input_node"]))
        self._signature = ForwardSignature.from_dict(engine["signature"])
        self._context = CallContext.from_dict(engine["context"])
        self._device_type = device.type
        # What is compiled must not keep the module alive either.
        self._compiled: Any = torch.compile(type(module).forward, dynamic=True if engine["dynamic"] else None)
        self._first = threading.local()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        module, compiled = self._module(), self._compiled
        if module is None or compiled is None:
            raise EngineLoadError(f"{self._path}: the engine is closed, or its module no longer exists")
        args, kwargs = self._signature.unbind(self._rebuild(inputs))
        with torch.no_grad(), self._context.enter(self._device_type):
            if getattr(self._first, "done", False):
                output = compiled(module, *args, **kwargs)
            else:
                with quiet_torch():
                    output = compiled(module, *args, **kwargs)
                self._first.done = True
        given = {id(leaf) for leaf in inputs}
        return [leaf.clone() if id(leaf) in given else leaf for leaf in flatten(output)[1]]

    def rebind(self) -> None:
        """Nothing to do: the forward reads the module."""

    def close(self) -> None:
        """Let go of the compiled code."""
        self._compiled = None


def _asked_for(request: BuildRequest) -> ShapeEnvelope:
    """Exactly the shapes that were asked for: whether it is right there is for the tuner to check."""
    ranges: dict[str, tuple[int, int]] = {}
    rows = []
    for leaf, row in zip(request.example.inputs, request.axes, strict=True):
        extents = []
        for size, axis in zip(leaf.shape, row, strict=True):
            if axis is None:
                extents.append(Extent(size))
                continue
            symbol = axis.name or f"s{len(ranges)}"
            low, high = -(-axis.min // axis.multiple_of), axis.max // axis.multiple_of
            ranges[symbol] = (low, high)
            extents.append(Extent(0, symbol, axis.multiple_of))
        rows.append(tuple(extents))
    return ShapeEnvelope(inputs=tuple(rows), ranges=ranges)
