"""A backend for tests that needs no compiler: its engine runs the module's own forward, right or spoilt on purpose."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest, Recipe
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope
from aitune_hf.graph.structure import Node, flatten, unflattener

Spoil = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class FakeEngine:
    """Runs the class's forward on the module's live weights, like an engine bound to them would."""

    def __init__(self, module: nn.Module, engine: Mapping[str, Any], spoil: Spoil) -> None:
        self._module = weakref.ref(module)  # The module owns its engines.
        self.build_call = unflattener(Node.from_json(engine["input_node"]))
        self.signature = ForwardSignature.from_dict(engine["signature"])
        self.spoil = spoil
        self.calls = 0
        self.rebinds = 0
        self.closed = False

    @property
    def module(self) -> nn.Module:
        """The module whose weights it uses."""
        module = self._module()
        assert module is not None
        return module

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.calls += 1
        args, kwargs = self.signature.unbind(self.build_call(inputs))
        module = self.module
        output = type(module).forward(module, *args, **kwargs)
        return self.spoil([leaf.clone() for leaf in flatten(output)[1]])

    def rebind(self) -> None:
        self.rebinds += 1

    def close(self) -> None:
        self.closed = True


class FakeBackend:
    """Accepts any graph. ``spoil`` changes the engine's outputs, ``fail`` is raised by ``build``."""

    native = True
    isolated = False

    def __init__(
        self,
        name: str = "fake",
        spoil: Spoil = lambda leaves: leaves,
        fail: Callable[[BuildRequest], Exception | None] = lambda request: None,
    ) -> None:
        self.name = name
        self.spoil = spoil
        self.fail = fail
        self.builds: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.engines: list[FakeEngine] = []

    def version(self) -> str:
        return "1"

    def available(self) -> str | None:
        return None

    def recipes(self, device: torch.device) -> Sequence[Recipe]:
        return [Recipe(effort="fast", cost=0.0)]

    def supports(self, request: BuildRequest) -> str | None:
        return None

    def build(self, request: BuildRequest) -> BuildResult:
        error = self.fail(request)
        if error is not None:
            raise error
        self.builds.append(request.path)
        self.options.append(dict(request.options))
        (Path(request.workdir) / "engine.json").write_text(json.dumps({"path": request.path}))
        ranges: dict[str, tuple[int, int]] = {}
        extents = []
        for leaf, row in zip(request.example.inputs, request.axes, strict=True):
            line = []
            for size, axis in zip(leaf.shape, row, strict=True):
                if axis is None:
                    line.append(Extent(size))
                else:
                    symbol = axis.name or f"s{len(ranges)}"
                    ranges[symbol] = (axis.min, axis.max)
                    line.append(Extent(0, symbol))
            extents.append(tuple(line))
        return BuildResult(
            files=["engine.json"],
            envelope=ShapeEnvelope(inputs=tuple(extents), ranges=ranges),
            engine={
                "input_node": request.example.input_node.to_json(),
                "signature": request.graph.forward_signature.to_dict(),
            },
        )

    def load(self, request: LoadRequest) -> FakeEngine:
        engine = FakeEngine(request.module, request.engine, self.spoil)
        self.engines.append(engine)
        return engine
