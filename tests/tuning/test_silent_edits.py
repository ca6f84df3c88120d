"""Edits of weights through ``.data`` leave no trace in torch's counters. No engine that holds a copy may miss them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import aitune_hf
from aitune_hf import TuneConfig
from aitune_hf.backends.registry import get_backend

X = torch.randn(4, 16)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)).eval()


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_a_merged_adapter_is_seen(backend: str, tmp_path: Path) -> None:
    if reason := get_backend(backend).available():
        pytest.skip(reason)
    model = net()
    config = TuneConfig(cache_dir=tmp_path, backends=[backend], strategy="first_working", progress=False)
    with torch.no_grad():
        aitune_hf.tune(model, [X], config)
        low_rank = torch.randn(32, 2) @ torch.randn(2, 16)
        for sign in (1.0, -1.0):
            model[0].weight.data += sign * low_rank
            twin = copy.deepcopy(model)
            aitune_hf.untune(twin)
            torch.testing.assert_close(model(X), twin(X), atol=1e-4, rtol=1e-4)
    assert aitune_hf.stats(model).engine_calls >= 2
    assert aitune_hf.stats(model).eager_calls == {}


def test_an_engine_with_weights_of_its_own_goes_eager(tmp_path: Path) -> None:
    inductor = get_backend("inductor")
    if reason := inductor.available():
        pytest.skip(reason)
    frozen = [recipe for recipe in inductor.recipes(torch.device("cpu")) if recipe.weights == "baked"]
    inductor.recipes = lambda device: frozen  # type: ignore[method-assign]
    model = net()
    settings = {"cache_dir": tmp_path, "backends": [inductor], "strategy": "first_working", "effort": "max"}
    with torch.no_grad():
        aitune_hf.tune(model, [X], TuneConfig(progress=False, batch_sizes=(), **settings))  # type: ignore[arg-type]
        before = model(X)
        assert aitune_hf.stats(model).engine_calls == 1
        old = model[0].weight.detach().clone()
        model[0].weight.data *= 2
        changed = model(X)
        assert not torch.allclose(changed, before)
        assert any("they are part of the engine" in reason for reason in aitune_hf.stats(model).eager_calls)
        model[0].weight.copy_(old)  # This edit is counted, so the engine is asked again.
        torch.testing.assert_close(model(X), before)
    assert aitune_hf.stats(model).engine_calls == 2
