"""What the tests of the patcher share: an engine that is frozen as a compiled one would be, small modules, comparison.

The right answer is always that of the *eager twin*: a deep copy taken before tuning.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from aitune_hf.backends.base import BuildRequest, BuildResult, Recipe
from aitune_hf.backends.testing import FakeBackend
from aitune_hf.config import TuneConfig
from aitune_hf.errors import BuildError, EngineLoadError
from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.structure import Node, flatten, unflattener
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.patcher import Patcher, patched_of, unpatch_tree
from aitune_hf.jit.session import TuningSession, use_session
from aitune_hf.jit.statistics import TuningStats
from aitune_hf.target import tune_target
from aitune_hf.tuning.drive import make_tuner, stats_of


class FrozenEngine:
    """The module's structure as it was at load, with its live weights: whatever a guard misses gives a wrong answer."""

    def __init__(self, module: nn.Module, engine: Mapping[str, Any]) -> None:
        self._live = weakref.ref(module)
        memo: dict[int, Any] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            alias = tensor.detach()
            memo[id(tensor)] = nn.Parameter(alias, requires_grad=False) if isinstance(tensor, nn.Parameter) else alias
        self.frozen = copy.deepcopy(module, memo)
        self.build_call = unflattener(Node.from_json(engine["input_node"]))
        self.signature = ForwardSignature.from_dict(engine["signature"])
        self.context = CallContext.from_dict(engine["context"])
        self.calls = 0
        self.rebinds = 0
        self.closed = False

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert not self.closed, "called after it was closed"
        self.calls += 1
        args, kwargs = self.signature.unbind(self.build_call(inputs))
        with torch.no_grad(), self.context.enter("cpu"):
            output = type(self.frozen).forward(self.frozen, *args, **kwargs)
        return [leaf.clone() for leaf in flatten(output)[1]]

    def rebind(self) -> None:
        self.rebinds += 1
        live = self._live()
        assert live is not None
        mine = {**dict(self.frozen.named_parameters()), **dict(self.frozen.named_buffers())}
        for name, tensor in (*live.named_parameters(), *live.named_buffers()):
            own = mine[name]
            if (own.shape, own.dtype, own.device) != (tensor.shape, tensor.dtype, tensor.device):
                raise EngineLoadError(f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}")
            own.data = tensor.detach()

    def close(self) -> None:
        self.closed = True


class FrozenBackend(FakeBackend):
    """Builds :class:`FrozenEngine`. ``refuse`` names the module paths (or classes) it cannot build."""

    def __init__(self, refuse: Sequence[str] = (), name: str = "frozen") -> None:
        super().__init__(name)
        self.refuse = refuse

    def build(self, request: BuildRequest) -> BuildResult:
        names = {request.path, request.path.rpartition(".")[2], type(request.module).__name__}
        if names & set(self.refuse):
            raise BuildError(f"{request.path} is refused")
        result = super().build(request)
        return replace(result, engine={**result.engine, "context": request.graph.context.to_dict()})

    def load(self, request: Any) -> Any:
        engine = FrozenEngine(request.module, request.engine)
        self.engines.append(engine)  # type: ignore[arg-type]
        return engine


class Forgetful(FrozenBackend):
    """Keeps no engine it has made, so that nothing but the module holds them."""

    def load(self, request: Any) -> Any:
        return FrozenEngine(request.module, request.engine)


class BakingBackend(FrozenBackend):
    """Its engines hold a copy of the weights they were built with."""

    def recipes(self, device: torch.device) -> Sequence[Recipe]:
        return [Recipe(weights="baked", effort="fast", cost=0.0)]

    def build(self, request: BuildRequest) -> BuildResult:
        result = super().build(request)
        save_file(
            {k: v.clone() for k, v in request.module.state_dict().items()}, request.workdir / "weights.safetensors"
        )
        return replace(result, files=[*result.files, "weights.safetensors"])

    def load(self, request: Any) -> Any:
        weights = load_file(request.folder / "weights.safetensors")
        engine = super().load(request)
        for name, tensor in (*engine.frozen.named_parameters(), *engine.frozen.named_buffers()):
            tensor.data = weights[name]
        return engine


@dataclass
class Bench:
    """Tunes modules with one backend and one cache folder."""

    folder: Path
    backend: FrozenBackend = field(default_factory=FrozenBackend)

    def config(self, **settings: Any) -> TuneConfig:
        known = {
            "backends": (self.backend,),
            "strategy": "first_working",
            "progress": False,
            "cache_dir": self.folder,
            "min_share": 0.0,
        }
        return TuneConfig(**{**known, **settings})

    def tune(self, target: Any, *samples: Any, **settings: Any) -> Any:
        """Tune ``target`` on samples; a sample that is a tensor is the only argument of a call."""
        return tune_target(target, list(samples), self.config(**settings))

    def session(self, *roots: nn.Module, tuner: Any = "real", **settings: Any) -> TuningSession:
        """A session with ``roots`` patched, that tunes by itself when the time has come."""
        config = self.config(**settings)
        session = TuningSession(config, make_tuner(config) if tuner == "real" else tuner)
        with use_session(session):
            for root in roots:
                Patcher(session).patch_tree(root)
        return session


def eager_twin(module: Any) -> Any:
    return copy.deepcopy(module)


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One sample."""
    return args, kwargs


def stats(module: nn.Module) -> TuningStats:
    return stats_of({"": module})


def patched(module: nn.Module) -> PatchedModule:
    found = patched_of(module)
    assert found is not None, f"{type(module).__name__} is not patched"
    return found


def state(module: nn.Module) -> str | None:
    found = patched_of(module)
    return found.state.value if found is not None else None


def untune(module: nn.Module) -> None:
    unpatch_tree(module)


def assert_same(ours: Any, theirs: Any, path: str = "output") -> None:
    """Equal class, structure, shape, dtype and values."""
    assert type(ours) is type(theirs), f"{path}: {type(ours)} is not {type(theirs)}"
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape, f"{path}: {ours.shape} is not {theirs.shape}"
        assert ours.dtype == theirs.dtype, f"{path}: {ours.dtype} is not {theirs.dtype}"
        assert torch.allclose(ours, theirs, atol=1e-4, equal_nan=True), (
            f"{path} differs by {(ours - theirs).abs().max()}"
        )
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), path
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs), path
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    else:
        assert ours == theirs or ours is theirs, f"{path}: {ours} is not {theirs}"


def check(module: Any, twin: Any, *args: Any, engine: bool | None = None, **kwargs: Any) -> Any:
    """Call both and compare; ``engine`` says who must have answered."""
    before = stats(module).engine_calls
    with torch.no_grad():
        ours, theirs = module(*args, **kwargs), twin(*args, **kwargs)
    assert_same(ours, theirs)
    if engine is not None:
        used = stats(module).engine_calls > before
        assert used == engine, f"engine used: {used}; eager calls: {stats(module).eager_calls}"
    return ours


# -- modules ---------------------------------------------------------------------------------------------------------------


class Leaf(nn.Module):
    """A linear layer and some switches."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(size))
        self.scale = 1.0
        self.flag = False
        self.eval()

    def forward(self, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        """Adds a relu to the world."""
        y = torch.relu(self.dropout(self.linear(x)) + self.shift) * self.scale * gain
        return y + 1 if self.flag else y


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.left = Leaf(size)
        self.right = Leaf(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x)) + x


class Net(nn.Module):
    """Two blocks."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first = Block(size)
        self.second = Block(size)
        self.eval()

    def forward(self, x: torch.Tensor, double: bool = False) -> dict[str, torch.Tensor]:
        y = self.second(self.first(x))
        return {"y": y * 2 if double else y, "mean": y.mean(-1)}


def rows(count: int = 2, size: int = 4) -> torch.Tensor:
    return torch.randn(count, size)
