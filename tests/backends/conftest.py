"""Engines that the tests of this folder share, built once: compiling is what takes the time."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf.backends.base import AxisRange, BuildRequest, BuildResult
from aitune_hf.backends.inductor import InductorBackend, InductorEngine


def _sibling(name: str) -> ModuleType:
    # Tests are imported without their folder on the path.
    spec = importlib.util.spec_from_file_location(f"backends_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


recorded = _sibling("recorded")


@dataclasses.dataclass
class Built:
    """A module, the request for one of its graphs, and what was built for it."""

    module: nn.Module
    request: BuildRequest
    result: BuildResult
    call: Callable[..., dict[str, Any]]

    def load(self, module: nn.Module | None = None, threads: int = 1) -> InductorEngine:
        request = recorded.load_request(self.request, self.result, module or self.module, threads)
        return InductorBackend().load(request)

    def run(self, engine: InductorEngine, call: dict[str, Any]) -> Any:
        return recorded.run(engine, self.request, call)

    def difference(self, engine: InductorEngine, module: nn.Module, call: dict[str, Any]) -> float:
        """Largest difference between the engine and eager."""
        got = recorded.flatten(self.run(engine, call))[1]
        want = recorded.eager(module, call)
        assert [leaf.shape for leaf in got] == [leaf.shape for leaf in want]
        assert [leaf.dtype for leaf in got] == [leaf.dtype for leaf in want]
        return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


@pytest.fixture
def request_for() -> Callable[..., BuildRequest]:
    function: Callable[..., BuildRequest] = recorded.request_for
    return function


@pytest.fixture
def randomized() -> Callable[[nn.Module, int], nn.Module]:
    function: Callable[[nn.Module, int], nn.Module] = recorded.randomized
    return function


class Table:
    """A helper object of a module, not a module itself, that holds a tensor."""

    def __init__(self) -> None:
        self.offset = torch.full((4,), 5.0)


@dataclasses.dataclass
class Answer(dict[str, Any]):
    """An output class in the way of transformers and diffusers."""

    first: torch.Tensor
    rest: tuple[Any, ...]

    def __post_init__(self) -> None:
        self["first"], self["rest"] = self.first, self.rest


class Odd(nn.Module):
    """Takes tensors from everywhere a module can have them, and nested inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.plain = torch.randn(4)
        self.tables = [torch.randn(4)]
        self.helper = Table()

    def forward(self, x: torch.Tensor, extra: dict[str, Any], gain: float = 2.0) -> Answer:
        y = self.tied(self.linear(x) * self.scale + self.hidden)
        y = y + self.plain + self.tables[0] + self.helper.offset
        y = y + torch.tensor([1.0, 2.0, 3.0, 9.0]) + torch.tensor(0.5)
        long, pair = extra["long"], extra["pair"]
        return Answer(y * gain + pair[0], (y + pair[1], 3, long + 1))


def odd_call(batch: int, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(batch, 4, generator=draw) for _ in range(3)]
    return {"x": rows[0], "extra": {"pair": (rows[1], rows[2]), "long": torch.randn(7, generator=draw)}}


def unet_call(batch: int, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {"sample": torch.randn(batch, 3, 8, 8, generator=draw), "timestep": torch.tensor(3 + seed)}


def bert_call(batch: int, length: int = 5, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": torch.randint(0, 99, (batch, length), generator=draw), "attention_mask": mask}


def tiny_unet() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet: nn.Module = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    ).eval()
    return unet


def tiny_bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=99,
        max_position_embeddings=64,
        intermediate_size=64,
    )
    bert: nn.Module = transformers.BertModel(config).eval()
    return bert


def _build(module: nn.Module, call: Callable[..., Any], calls: list[Any], folder: Path, ranges: Any) -> Built:
    backend = InductorBackend()
    if backend.available():
        pytest.skip(str(backend.available()))
    request = recorded.request_for(module, calls, folder, ranges)
    return Built(module, request, backend.build(request), call)


BATCH = AxisRange(min=1, max=8)


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch.manual_seed(0)
    ranges = {("x", 0): BATCH, ("extra.pair[0]", 0): BATCH, ("extra.pair[1]", 0): BATCH}
    return _build(Odd().eval(), odd_call, [odd_call(3)], tmp_path_factory.mktemp("odd"), ranges)


@pytest.fixture(scope="session")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("unet")
    return _build(tiny_unet(), unet_call, [unet_call(2), unet_call(1)], folder, {("sample", 0): BATCH})


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Built:
    length = AxisRange(min=1, max=64)
    ranges = {(name, axis): (BATCH, length)[axis] for name in ("input_ids", "attention_mask") for axis in (0, 1)}
    return _build(tiny_bert(), bert_call, [bert_call(2, 5), bert_call(3, 17)], tmp_path_factory.mktemp("bert"), ranges)
