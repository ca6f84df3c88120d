"""torch.compile as a backend: for forwards that cannot be captured as one graph."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf.backends.base import AxisRange, Backend
from aitune_hf.backends.torch_compile import TorchCompileBackend
from aitune_hf.errors import BuildError, EngineLoadError, GraphBreakException

sys.path.insert(0, str(Path(__file__).parent))

from recorded import eager, load_request, request_for, run

pytestmark = pytest.mark.skipif(
    TorchCompileBackend().available() is not None, reason=str(TorchCompileBackend().available())
)


class Branches(nn.Module):
    """Takes a branch by the values of its input, which no exported program can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        y = torch.relu(y) if float(x.sum()) > 0 else torch.sigmoid(y) * 3
        return {"y": y, "same": x}


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    torch.manual_seed(0)
    module = Branches().eval()
    ranges = {("x", 0): AxisRange(min=1, max=16)}
    request = request_for(module, [{"x": torch.randn(4, 8)}], tmp_path_factory.mktemp("branches") / "w", ranges)
    backend = TorchCompileBackend()
    engine = backend.load(load_request(request, backend.build(request), module))
    yield module, request, engine
    engine.close()


def test_it_is_a_backend_of_the_highest_effort() -> None:
    backend = TorchCompileBackend()
    assert isinstance(backend, Backend)
    assert [recipe.effort for recipe in backend.recipes(torch.device("cpu"))] == ["max"]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("batch", [1, 2, 7, 16])
def test_every_branch_is_taken(branches: Any, sign: float, batch: int) -> None:
    module, request, engine = branches
    with pytest.raises(GraphBreakException):
        request.capture()
    call = {"x": torch.rand(batch, 8) * sign}
    got = run(engine, request, call)
    want = eager(module, call)
    torch.testing.assert_close(list(got.values()), want)
    assert got["same"].data_ptr() != call["x"].data_ptr(), "an output must not be the caller's own tensor"


def test_weights_are_read_live(branches: Any) -> None:
    module, request, engine = branches
    call = {"x": torch.rand(3, 8)}
    before = run(engine, request, call)["y"]
    with torch.no_grad():
        module.linear.bias.add_(1.0)
    engine.rebind()
    assert not torch.allclose(run(engine, request, call)["y"], before)
    torch.testing.assert_close(list(run(engine, request, call).values()), eager(module, call))


def test_threads(branches: Any) -> None:
    module, request, engine = branches

    def work(seed: int) -> None:
        for index in range(50):
            draw = torch.Generator().manual_seed(seed * 1000 + index)
            call = {"x": torch.rand(1 + index % 5, 8, generator=draw) - 0.5}
            torch.testing.assert_close(list(run(engine, request, call).values()), eager(module, call))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_a_closed_engine_and_a_dead_module(tmp_path: Path) -> None:
    module = Branches().eval()
    request = request_for(module, [{"x": torch.randn(4, 8)}], tmp_path / "w")
    backend = TorchCompileBackend()
    result = backend.build(request)
    assert result.envelope.is_static
    engine = backend.load(load_request(request, result, module))
    inputs = [torch.randn(4, 8)]
    engine(list(inputs))
    alive = weakref.ref(module)
    del module, request
    gc.collect()
    assert alive() is None
    with pytest.raises(EngineLoadError, match="no longer exists"):
        engine(list(inputs))


def test_a_replaced_forward_is_declined(tmp_path: Path) -> None:
    module = Branches().eval()
    module.forward = lambda x: {"y": x}  # type: ignore[method-assign]
    request = request_for(module, [{"x": torch.randn(4, 8)}], tmp_path / "w")
    with pytest.raises(BuildError, match="replaced on the instance"):
        TorchCompileBackend().build(request)
