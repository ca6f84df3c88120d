"""Torch-TensorRT without a GPU: what it says, what it refuses, and what it asks of the package.

The package itself is not here. A stand-in of its documented functions takes its place where a test looks at the calls.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf.backends import torch_tensorrt
from aitune_hf.backends.base import AxisRange, Backend, BuildRequest, LoadRequest
from aitune_hf.backends.tensorrt_sdk import driver_problem
from aitune_hf.backends.torch_tensorrt import PACKAGE, TorchTensorRTBackend
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

RequestFor = Callable[..., BuildRequest]


@pytest.fixture
def order(request_for: RequestFor, tmp_path: Path) -> BuildRequest:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    ranges = {("input", 0): AxisRange(min=1, max=8)}
    return dataclasses.replace(request_for(module, [{"input": torch.randn(2, 4)}], tmp_path, ranges), weights="baked")


class StandIn(types.ModuleType):
    """The functions of Torch-TensorRT that are documented; its engines are the program itself."""

    def __init__(self) -> None:
        super().__init__("torch_tensorrt")
        self.asked: dict[str, Any] = {}
        self.dynamo = types.SimpleNamespace(compile=self._compile)

    def Input(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def _compile(self, program: Any, **kwargs: Any) -> Any:
        self.asked["compile"] = kwargs
        return program

    def save(self, program: Any, file: str, **kwargs: Any) -> None:
        self.asked["save"] = kwargs
        torch.export.save(program, file)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    sdk = StandIn()
    monkeypatch.setitem(sys.modules, "torch_tensorrt", sdk)
    monkeypatch.setattr(torch_tensorrt, "driver_problem", lambda: None)
    return sdk


def test_it_is_a_backend() -> None:
    backend = TorchTensorRTBackend()
    assert isinstance(backend, Backend)
    assert (backend.native, backend.isolated) == (True, True)
    assert backend.recipes(torch.device("cpu")) == []
    assert [recipe.weights for recipe in backend.recipes(torch.device("cuda"))] == ["baked"]


def test_a_package_whose_libraries_are_missing_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_tensorrt.py").write_text("raise Exception('cannot load libtorchtrt.so')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_tensorrt", raising=False)
    reason = str(TorchTensorRTBackend().available())
    assert "cannot load libtorchtrt.so" in reason
    assert "pip install torch-tensorrt" in reason


@pytest.mark.skipif(driver_problem() is None, reason="there is a driver here")
def test_without_a_driver_it_neither_builds_nor_loads(
    order: BuildRequest, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_tensorrt, "driver_problem", driver_problem)
    assert "driver" in str(TorchTensorRTBackend().available())
    with pytest.raises(BuildError, match="driver"):
        TorchTensorRTBackend().build(order)
    with pytest.raises(EngineLoadError, match="driver"):
        TorchTensorRTBackend().load(_load_request(order, {"format": 1}))


def test_it_declines(order: BuildRequest) -> None:
    backend = TorchTensorRTBackend()
    assert "it runs on cpu" in str(backend.supports(order))
    assert "hold their weights" in str(backend.supports(dataclasses.replace(order, weights="bound")))
    with pytest.raises(ConfigError, match="no option blocks; it has min_block_size"):
        backend.supports(dataclasses.replace(order, options={"blocks": 1}))


def test_what_is_asked_of_it(order: BuildRequest, stand_in: StandIn) -> None:
    result = TorchTensorRTBackend().build(order)
    assert result.files == [PACKAGE]
    compiled = stand_in.asked["compile"]
    assert compiled["disable_tf32"]
    assert compiled["use_explicit_typing"]
    assert not compiled["cache_built_engines"]
    assert not compiled["reuse_cached_engines"]
    (given,) = compiled["arg_inputs"]
    assert (given["min_shape"], given["opt_shape"], given["max_shape"]) == ((1, 4), (2, 4), (8, 4))
    assert stand_in.asked["save"]["output_format"] == "exported_program"


def test_what_was_saved_runs_and_is_let_go(order: BuildRequest, stand_in: StandIn) -> None:
    result = TorchTensorRTBackend().build(order)
    engine = torch_tensorrt.TorchTensorRTEngine(order.workdir / PACKAGE, "model", torch.device("cpu"))
    x = torch.randn(3, 4)
    (output,) = engine([x])
    assert torch.allclose(output, order.module(x), atol=1e-6)
    with pytest.raises(EngineLoadError, match="part of the engine"):
        engine.rebind()
    engine.close()
    with pytest.raises(EngineLoadError, match="closed"):
        engine([x])
    with pytest.raises(EngineLoadError, match="the module is on cpu"):
        TorchTensorRTBackend().load(_load_request(order, result.engine))
    with pytest.raises(EngineLoadError, match="format is unknown"):
        TorchTensorRTBackend().load(_load_request(order, {"format": 2}))


def test_its_failures_are_build_errors(order: BuildRequest, stand_in: StandIn) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("engine could not be built\nmore")

    stand_in.dynamo.compile = fail
    with pytest.raises(BuildError, match=r"^model: Torch-TensorRT failed: RuntimeError: engine could not be built$"):
        TorchTensorRTBackend().build(order)


def _load_request(order: BuildRequest, engine: Any) -> LoadRequest:
    return LoadRequest(
        path="model", module=order.module, folder=order.workdir, engine=engine, device=torch.device("cpu")
    )
