"""The map from an artefact's constants to a module's tensors: found by values, never guessed, checked at load."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aitune_hf.backends.base import BuildRequest
from aitune_hf.backends.constant_map import ConstantMap, ProbedBuild, find_constant_map
from aitune_hf.backends.export import CapturedGraph
from aitune_hf.backends.probes import pinned_constants, values_of, with_probes
from aitune_hf.errors import BuildError, EngineLoadError

#: What a compiler makes of a program's tensors: the constants of its artefact.
Compile = Callable[[Mapping[str, torch.Tensor]], dict[str, Any]]
Capture = Callable[[nn.Module, dict[str, Any]], CapturedGraph]


class Net(nn.Module):
    """Norms of ones, biases of zeros, duplicated and tied weights, tables: all that looks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.linear, self.twin, self.tied = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.linear.weight
        self.twin.load_state_dict(self.linear.state_dict())
        self.register_buffer("table", torch.arange(512.0).reshape(64, 8) / 7, persistent=False)
        self.register_buffer("order", torch.arange(8), persistent=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(self.second(self.first(x)).mT).mT + self.table[: x.shape[1]]
        return self.tied(self.twin(self.linear(y)))[..., self.order] * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])


@pytest.fixture
def capture(request_for: Callable[..., BuildRequest], tmp_path: Path) -> Capture:
    return lambda module, call: request_for(module, [call], tmp_path).capture()


@pytest.fixture
def graph(capture: Capture) -> CapturedGraph:
    torch.manual_seed(0)
    return capture(Net().eval(), {"x": torch.randn(2, 5, 6)})


def found(
    graph: CapturedGraph, compiler: Compile, seeds: tuple[int, ...] = (1, 2)
) -> tuple[ConstantMap, dict[str, Any]]:
    probed = [with_probes(graph, seed) for seed in seeds]
    return find_constant_map([ProbedBuild(graph=p, slots=compiler(values_of(p.program))) for p in probed], "net")


def everything(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A compiler that renames, reorders, casts, and keeps some numbers of its own."""
    weight, conv = values["linear.weight"], values["conv.weight"]
    return {
        "c0": values["first.weight"],
        "c1": values["second.weight"].detach().numpy(),
        "c2": values["first.bias"].reshape(1, 1, 6),
        "c3": values["second.bias"].to(torch.bfloat16),
        "c4": weight.t().contiguous(),
        "c5": values["twin.weight"].t().half(),
        "c6": conv.permute(2, 1, 0).contiguous(),
        "c7": conv.reshape(2, 4, 6, 3).permute(0, 2, 1, 3).contiguous(),
        "c8": conv.permute(0, 2, 1).reshape(8, 18),
        "c9": values["table"].t().contiguous(),
        "c10": values["order"],
        "c11": torch.tensor([0, 2, 1]),
        "c12": torch.tensor(1e-5).numpy(),
        "c13": np.zeros((0, 4), dtype=np.float32),
        "c14": weight,
    }


def test_each_constant_finds_its_weight(graph: CapturedGraph) -> None:
    mapped, residuals = found(graph, everything)
    origins = {name: slot.origin.weight for name, slot in mapped.slots.items()}
    assert origins == {
        "c0": "first.weight",
        "c1": "second.weight",
        "c2": "first.bias",
        "c3": "second.bias",
        "c4": "linear.weight",
        "c5": "twin.weight",
        "c6": "conv.weight",
        "c7": "conv.weight",
        "c8": "conv.weight",
        "c9": "table",
        "c14": "linear.weight",
    }
    assert sorted(residuals) == ["c10", "c11", "c12", "c13"]


def test_other_weights_are_filled_in(graph: CapturedGraph, randomized: Callable[..., nn.Module]) -> None:
    mapped, _ = found(graph, everything)
    again = ConstantMap.from_json(json.loads(json.dumps(mapped.to_json())))
    assert again == mapped
    module = randomized(Net(), 3)
    module.get_buffer("table").copy_(Net().table)  # type: ignore[arg-type]
    live = again.resolve(module, "net", torch.device("cpu"))
    filled = again.fill(live)
    wanted = everything(live)
    for name, value in filled.items():
        want = torch.as_tensor(wanted[name])
        assert value.shape == tuple(want.shape), name
        got = torch.from_numpy(value)
        assert torch.equal(got.view(torch.bfloat16) if name == "c3" else got, want), name
    # Not copied: what is as it was in the module is the module's memory.
    for name in ("c0", "c1", "c2", "c14"):
        assert filled[name].ctypes.data == live[mapped.slots[name].origin.weight].data_ptr()


def test_the_map_holds_no_weights(graph: CapturedGraph) -> None:
    mapped, _ = found(graph, everything)
    text = json.dumps(mapped.to_json())
    assert len(text) < 4000
    assert set(mapped.pinned) == {"table", "order"}


@pytest.mark.parametrize(
    "fold",
    [
        lambda v: v["first.weight"] * v["second.weight"],
        lambda v: v["linear.weight"] * 0.125,
        lambda v: v["conv.weight"][:4],
        lambda v: torch.stack([v["first.bias"], v["second.bias"]]),
        lambda v: (v["linear.weight"] * 100).to(torch.int8),
    ],
)
def test_folded_weights_are_refused(graph: CapturedGraph, fold: Callable[[Any], torch.Tensor]) -> None:
    with pytest.raises(BuildError, match=r"^net: the compiler folds weights together: its constant 'odd'"):
        found(graph, lambda values: {**everything(values), "odd": fold(values).clone().float() + 0.5})


def test_folded_tables_are_welcome(graph: CapturedGraph) -> None:
    mapped, residuals = found(
        graph, lambda values: {"a": values["table"] * values["order"], "b": values["linear.bias"]}
    )
    assert list(residuals) == ["a"]
    assert set(mapped.pinned) == {"table", "order"}


def test_a_table_with_other_values_is_refused(graph: CapturedGraph) -> None:
    mapped, _ = found(graph, everything)
    module = Net()
    assert mapped.resolve(module, "net")
    with torch.no_grad():
        module.get_buffer("table")[3, 3] += 1
    with pytest.raises(EngineLoadError, match=r"^net: table has other values"):
        mapped.resolve(module, "net")


def test_ties_must_hold(graph: CapturedGraph) -> None:
    mapped, _ = found(graph, everything)
    module = Net()
    module.tied.weight = nn.Parameter(module.linear.weight.detach().clone())
    with pytest.raises(EngineLoadError, match="was tied to"):
        mapped.resolve(module, "net")


def test_a_constant_that_is_a_number_and_a_weight_by_chance_is_no_weight(capture: Capture) -> None:
    """A number that equals a probe in one build is told from it by the other build."""
    graph = capture(nn.LayerNorm(1).eval(), {"input": torch.randn(2, 1)})
    number = values_of(with_probes(graph, 1).program)["weight"].clone()
    mapped, residuals = found(graph, lambda values: {"w": values["weight"], "n": number})
    assert list(mapped.slots) == ["w"]
    assert list(residuals) == ["n"]


class Scales(nn.Module):
    """Many single numbers in a type so short that chance makes some of them equal."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(1, dtype=torch.bfloat16) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def test_what_cannot_be_told_apart_is_not_guessed(capture: Capture) -> None:
    graph = capture(Scales(400).eval(), {"x": torch.ones(2, dtype=torch.bfloat16)})
    names = sorted(name for name in values_of(graph.program) if name not in pinned_constants(graph))
    with pytest.raises(BuildError, match="the values tried cannot tell them apart"):
        found(graph, dict)
    mapped, _ = found(graph, dict, seeds=(1, 2, 3, 4, 5))
    assert {name: slot.origin.weight for name, slot in mapped.slots.items()} == {name: name for name in names}


def test_builds_must_have_the_same_constants(graph: CapturedGraph) -> None:
    names = iter(["a", "b"])
    with pytest.raises(BuildError, match=r"different constants \(a, b\)"):
        found(graph, lambda values: {next(names): values["first.weight"]})
    with pytest.raises(ValueError, match="one build"):
        found(graph, everything, seeds=(1,))


def test_many_weights_do_not_take_long(capture: Capture) -> None:
    """Equal shapes by the hundred: comparing each with each would be ten thousand comparisons of a megabyte."""
    with torch.device("meta"):
        stack = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(100)))
    module = stack.to_empty(device="cpu").eval()
    graph = capture(module, {"input": torch.zeros(1, 256)})
    start = time.perf_counter()
    mapped, _ = found(graph, lambda values: {name: value.t().contiguous() for name, value in values.items()})
    print(f"{time.perf_counter() - start:.2f} s")
    assert {name: slot.origin.weight for name, slot in mapped.slots.items()} == {n: n for n in values_of(graph.program)}


def test_arrays_of_types_that_numpy_does_not_have(graph: CapturedGraph) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def cast(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {"w": values["linear.weight"].detach().bfloat16().float().numpy().astype(ml_dtypes.bfloat16)}

    mapped, residuals = found(graph, cast)
    assert not residuals
    assert mapped.slots["w"].dtype == "bfloat16"
    assert mapped.fill(mapped.resolve(Net(), "net"))["w"].dtype == np.uint16
