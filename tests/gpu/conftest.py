"""What the tests on a GPU share. They are left out unless asked for (``make test-gpu``), and skip where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from aitune_hf import TuneConfig
from aitune_hf.backends.base import Recipe
from aitune_hf.backends.inductor import InductorBackend


class Graphs(InductorBackend):
    """AOTInductor, replayed as CUDA graphs only."""

    def recipes(self, device: torch.device) -> list[Recipe]:
        return [Recipe(options={"cuda_graphs": True}, weights="bound", effort="fast")]


class Block(nn.Module):
    """What transformers are made of, in a size that takes a moment on a GPU."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU of this process: that of its rank where a launcher has started several."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU that torch can use")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@pytest.fixture
def make(device: torch.device) -> Callable[..., nn.Module]:
    """A module on the GPU; equal seeds give equal weights."""

    def make(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return Block().to(device, dtype).eval().requires_grad_(False)

    return make


@pytest.fixture
def settings(engine_cache: Path) -> Callable[..., TuneConfig]:
    """Settings that take the first right engine, from the cache that the whole run shares."""

    def settings(*backends: InductorBackend, **changes: object) -> TuneConfig:
        fixed = {"backends": backends or (InductorBackend(),), "strategy": "first_working", "effort": "fast"}
        return TuneConfig(**{"cache_dir": engine_cache, "progress": False, **fixed, **changes})  # type: ignore[arg-type]

    return settings


@pytest.fixture
def graphs() -> InductorBackend:
    return Graphs()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
