"""Backends for tests that need no compiler: their engines run the module's own forward, right or wrong on purpose.

:class:`FakeBackend` is right, and records what is asked of it. Each of the others has one fault of a kind that real
backends have. They are for whoever tests a tuner or a pipeline on top of one: whatever they do, eager must stay, the
reason must be in the report, and the user's call must give eager's answer. All can be pickled, so that those that are to
build in a child process (``isolated``) can go there; functions given to :class:`FakeBackend` must be importable for that.
"""

from __future__ import annotations

import json
import os
import signal
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.base import AxisRange, BuildRequest, BuildResult, LoadRequest, Recipe
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope
from aitune_hf.graph.structure import Node, flatten, unflattener

__all__ = [
    "CrashingBackend",
    "ExitingBackend",
    "FakeBackend",
    "FakeEngine",
    "HangingBackend",
    "InaccurateBackend",
    "LossyBackend",
    "MiscountingBackend",
    "NanAtBatchOneBackend",
    "RetypingBackend",
    "ShortAtLargestBackend",
    "SlowBackend",
]

Leaves = list[torch.Tensor]
Spoil = Callable[[Leaves], Leaves]


class FakeEngine:
    """Runs the class's forward on the module's live weights, like an engine bound to them would."""

    def __init__(self, module: nn.Module, engine: Mapping[str, Any], spoil: Spoil) -> None:
        """Make one of what :meth:`FakeBackend.build` left; ``spoil`` changes its outputs."""
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


def _as_it_is(leaves: Leaves) -> Leaves:
    return leaves


def _no_failure(request: BuildRequest) -> Exception | None:
    return None


class FakeBackend:
    """Accepts any graph, and is right.

    Args:
        name: of the backend.
        spoil: changes the engine's outputs.
        fail: gives the exception that ``build`` raises, or None.
        recipes: what it offers; one plain recipe if None.

    Attributes:
        builds: paths of the modules built in this process.
        options: the options of these builds.
        engines: what was loaded.
    """

    native = True
    isolated = False

    def __init__(
        self,
        name: str = "fake",
        spoil: Spoil = _as_it_is,
        fail: Callable[[BuildRequest], Exception | None] = _no_failure,
        recipes: Sequence[Recipe] | None = None,
    ) -> None:
        self.name = name
        self.spoil = spoil
        self.fail = fail
        self.offered = recipes
        self.builds: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.engines: list[FakeEngine] = []

    def __getstate__(self) -> dict[str, Any]:
        """Without its engines, which belong to modules of this process."""
        return {**self.__dict__, "engines": []}

    def version(self) -> str:
        return "1"

    def available(self) -> str | None:
        return None

    def recipes(self, device: torch.device) -> Sequence[Recipe]:
        return [Recipe(effort="fast", cost=0.0)] if self.offered is None else self.offered

    def supports(self, request: BuildRequest) -> str | None:
        return None

    def build(self, request: BuildRequest) -> BuildResult:
        error = self.fail(request)
        if error is not None:
            raise error
        self.builds.append(request.path)
        self.options.append(dict(request.options))
        (Path(request.workdir) / "engine.json").write_text(json.dumps({"path": request.path}))
        return BuildResult(
            files=["engine.json"],
            envelope=_envelope(request),
            engine={
                "input_node": request.example.input_node.to_json(),
                "signature": request.graph.forward_signature.to_dict(),
                "options": dict(request.options),
            },
        )

    def load(self, request: LoadRequest) -> FakeEngine:
        engine = FakeEngine(request.module, request.engine, lambda leaves: self.change(leaves, request.engine))
        self.engines.append(engine)
        return engine

    def change(self, leaves: Leaves, engine: Mapping[str, Any]) -> Leaves:
        """What an engine gives instead of the right outputs.

        Args:
            leaves: the right outputs.
            engine: what :meth:`build` left; ``options`` are those of the recipe.
        """
        return self.spoil(leaves)


def _envelope(request: BuildRequest) -> ShapeEnvelope:
    """All that was asked for: axes of one name vary together, others by themselves."""
    ranges: dict[str, tuple[int, int]] = {}
    extents = [
        tuple(_extent(size, axis, ranges) for size, axis in zip(leaf.shape, row, strict=True))
        for leaf, row in zip(request.example.inputs, request.axes, strict=True)
    ]
    return ShapeEnvelope(inputs=tuple(extents), ranges=ranges)


def _extent(size: int, axis: AxisRange | None, ranges: dict[str, tuple[int, int]]) -> Extent:
    if axis is None:
        return Extent(size)
    symbol = axis.name or f"s{len(ranges)}"
    ranges[symbol] = (axis.min, axis.max)
    return Extent(0, symbol)


# -- wrong answers -----------------------------------------------------------------------------------------------------


class NanAtBatchOneBackend(FakeBackend):
    """Right but for a batch of one, which no sample need hold: there it gives NaN."""

    def __init__(self, name: str = "nan-at-batch-one") -> None:
        super().__init__(name)

    def change(self, leaves: Leaves, engine: Mapping[str, Any]) -> Leaves:
        return [leaf * float("nan") if leaf.dim() and leaf.shape[0] == 1 else leaf for leaf in leaves]


class InaccurateBackend(FakeBackend):
    """Off by a share of each value."""

    def __init__(self, name: str = "inaccurate", share: float = 0.05) -> None:
        super().__init__(name)
        self.share = share

    def change(self, leaves: Leaves, engine: Mapping[str, Any]) -> Leaves:
        return [leaf * (1 + self.share) if leaf.is_floating_point() else leaf for leaf in leaves]


class MiscountingBackend(FakeBackend):
    """Gives an output too many, as an engine does that also returns what was meant for inside."""

    def __init__(self, name: str = "miscounting") -> None:
        super().__init__(name)

    def change(self, leaves: Leaves, engine: Mapping[str, Any]) -> Leaves:
        return [*leaves, leaves[0]]


class RetypingBackend(FakeBackend):
    """Gives a double precision output where eager's is single, and the other way round."""

    def __init__(self, name: str = "retyping") -> None:
        super().__init__(name)

    def change(self, leaves: Leaves, engine: Mapping[str, Any]) -> Leaves:
        return [leaf.float() if leaf.dtype == torch.float64 else leaf.double() for leaf in leaves]


class ShortAtLargestBackend(FakeBackend):
    """Loses a row at the largest of the sizes it says it takes."""

    def __init__(self, name: str = "short-at-largest") -> None:
        super().__init__(name)

    def build(self, request: BuildRequest) -> BuildResult:
        result = super().build(request)
        largest = max((high for _, high in result.envelope.ranges.values()), default=None)
        return BuildResult(files=result.files, envelope=result.envelope, engine={**result.engine, "largest": largest})

    def change(self, leaves: Leaves, engine: Mapping[str, Any]) -> Leaves:
        return [leaf[1:] if leaf.dim() and leaf.shape[0] == engine["largest"] else leaf for leaf in leaves]


class LossyBackend(FakeBackend):
    """Offers a plain recipe, and one that is off by noise of a given size, relative to each output's root mean square."""

    def __init__(self, name: str = "lossy", noise: float = 0.02) -> None:
        lossy = Recipe(options={"precision": "low"}, lossy=True, effort="fast", cost=1.0)
        super().__init__(name, recipes=[Recipe(effort="fast", cost=0.0), lossy])
        self.noise = noise

    def change(self, leaves: Leaves, engine: Mapping[str, Any]) -> Leaves:
        return leaves if not engine["options"] else [self._noisy(leaf) for leaf in leaves]

    def _noisy(self, leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point():
            return leaf
        signs = torch.ones(leaf.numel(), dtype=leaf.dtype, device=leaf.device)
        signs[1::2] = -1  # The same at every call, as rounding is.
        return leaf + signs.reshape(leaf.shape) * leaf.square().mean().sqrt() * self.noise


# -- right, and of no use ----------------------------------------------------------------------------------------------


class SlowBackend(FakeBackend):
    """Right, and slower than eager by some seconds a call."""

    def __init__(self, name: str = "slow", seconds: float = 0.005) -> None:
        super().__init__(name)
        self.seconds = seconds

    def change(self, leaves: Leaves, engine: Mapping[str, Any]) -> Leaves:
        time.sleep(self.seconds)
        return leaves


# -- builds that do not come back --------------------------------------------------------------------------------------


class HangingBackend(FakeBackend):
    """Its build takes longer than anybody waits. To be ended by ``candidate_timeout_s``."""

    isolated = True

    def __init__(self, name: str = "hanging", seconds: float = 3600.0) -> None:
        super().__init__(name)
        self.seconds = seconds

    def build(self, request: BuildRequest) -> BuildResult:
        time.sleep(self.seconds)
        return super().build(request)


class ExitingBackend(FakeBackend):
    """Its build ends the process, as a library does that calls ``exit`` on an error."""

    isolated = True

    def __init__(self, name: str = "exiting", code: int = 3) -> None:
        super().__init__(name)
        self.code = code

    def build(self, request: BuildRequest) -> BuildResult:
        os._exit(self.code)


class CrashingBackend(FakeBackend):
    """Its build dies by a signal, as native code does that writes where it may not."""

    isolated = True

    def __init__(self, name: str = "crashing", number: int = signal.SIGSEGV) -> None:
        super().__init__(name)
        self.number = int(number)

    def build(self, request: BuildRequest) -> BuildResult:
        os.kill(os.getpid(), self.number)
        return super().build(request)
