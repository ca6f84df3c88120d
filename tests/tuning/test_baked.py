"""Engines that hold their weights: which tensors those are, and what is seen of edits."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from aitune_hf.errors import EngineLoadError
from aitune_hf.tuning.baked import BakedEngine, WeightsDigest


class Tables(nn.Module):
    """Has tensors that are no parameters and no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = torch.full((3,), 1.05)
        self.tables = {"one": [torch.ones(2)]}


def test_a_digest_covers_tensors_outside_parameters_and_buffers() -> None:
    """They are baked into an engine as well."""
    net = Tables()
    digest = WeightsDigest(net).digest()
    assert WeightsDigest(copy.deepcopy(net)).digest() == digest
    net.gain[0] = 1.0
    changed = WeightsDigest(net).digest()
    assert changed != digest
    net.tables["one"][0].zero_()
    assert WeightsDigest(net).digest() != changed


def test_a_digest_leaves_out_what_hooks_keep() -> None:
    """As accelerate's does: copies of weights, by address."""
    net = Tables()
    digest = WeightsDigest(net).digest()
    net._hf_hook = SimpleNamespace(weights_map={"linear.weight": torch.ones(4)}, tied_params_map={12345: torch.ones(2)})
    assert WeightsDigest(net).digest() == digest


class Watching:
    """Looks at the weights itself, as engines with int8 weights do."""

    def __init__(self) -> None:
        self.rebinds = 0

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return inputs

    def rebind(self) -> None:
        self.rebinds += 1

    def close(self) -> None: ...


@pytest.mark.parametrize("name", ["gain", "linear.weight"])
def test_a_baked_engine_sees_edits_that_leave_no_trace_and_comes_back(name: str) -> None:
    net = Tables()
    weights = WeightsDigest(net)
    engine = BakedEngine(Watching(), weights, weights.digest())
    tensor = net.gain if name == "gain" else net.linear.weight
    kept = tensor.detach().clone()
    assert engine([kept]) == [kept]
    tensor.data.mul_(2)
    for _ in range(2):
        with pytest.raises(EngineLoadError, match="these are others"):
            engine([kept])
    tensor.data.copy_(kept)
    assert engine([kept]) == [kept]


def test_a_baked_engine_reads_all_weights_when_told_to() -> None:
    """The edit of one number shows in no sample; on an accelerator no edit does."""
    net = Tables()
    weights = WeightsDigest(net)
    inner = Watching()
    engine = BakedEngine(inner, weights, weights.digest())
    net.linear.weight.data[2, 1] += 1
    with pytest.raises(EngineLoadError, match="these are others"):
        engine.rebind()
    assert inner.rebinds == 1


def test_a_baked_engine_keeps_no_weights_of_a_module_that_left_them() -> None:
    net = Tables()
    weights = WeightsDigest(net)
    engine = BakedEngine(Watching(), weights, weights.digest())
    old = StorageWeakRef(net.linear.weight.untyped_storage())
    net.to("meta")
    with pytest.raises(EngineLoadError, match="cannot be read"):
        engine.rebind()
    assert old.expired()
