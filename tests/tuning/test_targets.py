"""Engines for GPUs that are not here: recorded and built on this machine, taken over by one that has the GPU.

The plans are real. What cannot run here is TensorRT itself: where a test goes as far as the first call over there, this
machine plays the other one, and an engine that computes with torch stands for the runtime.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aitune_hf
from aitune_hf import TuneConfig, build_for, stats, tune
from aitune_hf.backends.tensorrt import PLAN, TensorRTRTXBackend
from aitune_hf.backends.tensorrt_sdk import driver_problem
from aitune_hf.cache import Environment, LocalStore
from aitune_hf.errors import ConfigError, SampleError
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.graph.structure import flatten
from aitune_hf.tuning.candidate import build_here
from aitune_hf.tuning.drive import restore_modules
from aitune_hf.tuning.target_report import BuildForReport
from aitune_hf.tuning.targets import Target, TargetBuilder, graph_on
from aitune_hf.tuning.unverified import UNVERIFIED_POLICY
from aitune_hf.tuning.verdict import Verdict, verdicts_of

pytestmark = pytest.mark.skipif(TensorRTRTXBackend().can_aim() is not None, reason="TensorRT-RTX is not installed")


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a child process takes most of the time; one test does."""
    if request.function is not test_plans_are_built_in_a_child_process:
        monkeypatch.setattr(TargetBuilder, "_build_isolated", lambda self, backend, order: build_here(backend, order))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.linear(x))


class Stack(nn.Module):
    """Equal blocks, and one thing that no compiler takes."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Choosy(nn.Module):
    """Not one graph: what it does depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stack(x)
        return y if float(y.sum()) > 0 else -y


@pytest.fixture
def config(tmp_path: Path) -> TuneConfig:
    return TuneConfig(cache_dir=tmp_path, progress=False)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack().eval()


def inputs(*batches: int) -> list[torch.Tensor]:
    return [torch.randn(batch, 16) for batch in batches]


def place(sm: str) -> Environment:
    here = Environment.current("cpu")
    return Environment(device_type="cuda", arch=here.arch, os=here.os, torch="any", sm=sm)


def verdicts(config: TuneConfig, module: nn.Module, where: Environment) -> list[Verdict]:
    assert config.cache_dir is not None
    return verdicts_of(LocalStore(config.cache_dir), hierarchy_hash(module), where, UNVERIFIED_POLICY)


# -- what is built -----------------------------------------------------------------------------------------------------


def test_every_target_gets_an_engine_that_says_it_was_never_run(config: TuneConfig, model: nn.Module) -> None:
    report = build_for(model, inputs(2, 5), targets=["rtx:sm86", "tensorrt_rtx:sm120"], config=config)
    assert [(build.target, build.outcome) for build in report.builds] == [("rtx:sm86", "built"), ("rtx:sm120", "built")]
    assert len(report.engines) == 2
    entries = {entry.manifest.key.environment: entry for entry in LocalStore(config.cache_dir).entries()}  # type: ignore[arg-type]
    assert set(entries) == {place("sm86"), place("sm120")}
    for entry in entries.values():
        engine: Any = entry.manifest.engine
        assert engine["weights"] == "bound"
        assert engine["backend"]["verified"] is False
        assert engine["backend"]["target"] == entry.manifest.key.environment.sm
        assert set(entry.manifest.files) == {PLAN}
        assert entry.manifest.key.environment.tag in str(entry.path)
    (verdict,) = verdicts(config, model, place("sm86"))
    (record,) = verdict.engines
    assert record.result.outcome == "unverified"
    assert record.envelope.mismatch([(1, 16)]) is None
    assert record.envelope.mismatch([(5, 16)]) is None
    assert record.envelope.mismatch([(6, 16)])
    assert verdict.graph.device_type == "cuda"


def test_plans_are_built_in_a_child_process(
    config: TuneConfig, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorRTRTXBackend, "build", lambda *args: pytest.fail("it was built here"))
    assert build_for(model, inputs(2), targets=["rtx:sm89"], config=config).engines


def test_nothing_is_left_on_the_target(config: TuneConfig, model: nn.Module) -> None:
    forward = model.forward
    build_for(model, inputs(2), targets=["rtx:sm89"], config=config)
    assert model.forward == forward
    assert stats(model).modules == {}
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_second_time_it_is_found(config: TuneConfig, model: nn.Module) -> None:
    first = build_for(model, inputs(2), targets=["rtx:sm89"], config=config)
    torch.manual_seed(1)
    again = build_for(Stack().eval(), inputs(2), targets=["rtx:sm89"], config=config)
    assert [build.outcome for build in (*first.builds, *again.builds)] == ["built", "found"]
    assert first.engines == again.engines, "other weights need no other engine"


def test_where_the_whole_cannot_be_built_its_parts_are(config: TuneConfig) -> None:
    module = Choosy().eval()
    report = build_for(module, inputs(2), targets=["rtx:sm89"], config=config)
    outcomes = [(build.path, build.outcome) for build in report.builds]
    assert outcomes[0][1] == "failed"
    assert "cannot be captured" in report.builds[0].reason
    assert outcomes[1:] == [("stack", "built")]


def test_equal_blocks_share_one_engine(config: TuneConfig) -> None:
    import dataclasses

    blocks = dataclasses.replace(config, granularity="blocks")
    report = build_for(Stack(3).eval(), inputs(2), targets=["rtx:sm89"], config=blocks)
    assert [build.outcome for build in report.builds] == ["built", "found", "found"]
    assert len(report.engines) == 1


def test_the_report_is_data_and_a_table(config: TuneConfig, model: nn.Module) -> None:
    report = build_for(model, inputs(2), targets=["rtx:sm75", "rtx:sm89"], config=config)
    assert isinstance(report, BuildForReport)
    assert [build.outcome for build in report.builds] == ["failed", "built"]
    assert "FP32 GEMM is not supported" in report.builds[0].reason
    assert json.loads(report.to_json())["builds"][1]["engine"] == report.engines[0]
    assert "rtx:sm89" in str(report)
    assert "None of them was run" in str(report)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("sm89", "expected a backend and a GPU generation"),
        ("rtx:sm90", "tensorrt_rtx builds for sm75, sm80"),
        ("rtx:avx2", "expected a backend"),
        ("inductor:sm89", "builds for the machine at hand only"),
        ("tensorrt:sm89", "TensorRT builds for the GPU at hand only"),
        ("rxt:sm89", "no backend 'rxt'"),
    ],
)
def test_a_target_that_is_none(target: str, words: str, config: TuneConfig, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=words):
        build_for(model, inputs(2), targets=[target], config=config)


def test_it_needs_targets_and_samples(config: TuneConfig, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="at least one target"):
        build_for(model, inputs(2), targets=[], config=config)
    with pytest.raises(ConfigError, match="takes a list"):
        build_for(model, inputs(2), targets="rtx:sm89", config=config)
    with pytest.raises(SampleError):
        build_for(model, [], targets=["rtx:sm89"], config=config)


def test_calls_that_would_be_others_over_there_are_left_out(config: TuneConfig, model: nn.Module) -> None:
    def under_autocast(module: nn.Module) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(torch.randn(2, 16))

    report = build_for(model, [under_autocast], targets=["rtx:sm89"], config=config)
    assert report.engines == []
    assert all("autocast" in build.reason for build in report.builds)


# -- over there --------------------------------------------------------------------------------------------------------


class StandIn:
    """Takes the place of a loaded plan: computes with torch, on the module's own weights."""

    def __init__(self, module: nn.Module, error: float) -> None:
        self.module, self.error, self.calls = module, error, 0

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        x = inputs[0]
        for block in self.module.blocks:  # type: ignore[union-attr]
            x = x + torch.nn.functional.gelu(torch.nn.functional.linear(x, block.linear.weight, block.linear.bias))
        return [leaf + self.error for leaf in flatten(x)[1]]

    def rebind(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def over_there(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[StandIn]]:
    """Makes this machine the one that engines are built for, with a runtime whose answers are off by ``error``."""

    def make(error: float) -> list[StandIn]:
        loaded: list[StandIn] = []

        def load(backend: Any, request: Any) -> StandIn:
            assert (request.folder / PLAN).stat().st_size > 10_000
            loaded.append(StandIn(request.module, error))
            return loaded[-1]

        monkeypatch.setattr(TensorRTRTXBackend, "load", load)
        return loaded

    here = Environment.current("cpu").for_plans()
    monkeypatch.setattr(Target, "place", property(lambda target: here))
    return make


def test_the_first_machine_that_can_checks_it_and_writes_that_down(
    config: TuneConfig, model: nn.Module, over_there: Callable[[float], list[StandIn]]
) -> None:
    loaded = over_there(0.0)
    build_for(model, inputs(2), targets=["rtx:sm89"], config=config)
    torch.manual_seed(1)
    fine_tune = Stack().eval()
    assert restore_modules({"": fine_tune}, config) == 1
    x = torch.randn(2, 16)
    with torch.no_grad():
        expected = Stack.forward(fine_tune, x)
        answers = [fine_tune(x) for _ in range(3)]
    assert all(torch.allclose(answer, expected, atol=1e-5) for answer in answers)
    assert loaded[0].calls == 3
    assert stats(fine_tune).engine_calls == 2, "the first call was answered by eager"
    here = Environment.current("cpu").for_plans()
    (verdict,) = verdicts(config, model, here)
    assert [record.result.outcome for record in verdict.engines] == ["right"]
    # Building once more does not make it unverified again.
    build_for(model, inputs(2), targets=["rtx:sm89"], config=config)
    (verdict,) = verdicts(config, model, here)
    assert [record.result.outcome for record in verdict.engines] == ["right"]


def test_one_that_is_wrong_there_is_never_used(
    config: TuneConfig, model: nn.Module, over_there: Callable[[float], list[StandIn]]
) -> None:
    loaded = over_there(0.5)
    build_for(model, inputs(2), targets=["rtx:sm89"], config=config)
    assert restore_modules({"": model}, config) == 1
    x = torch.randn(2, 16)
    with torch.no_grad():
        answers = [model(x) for _ in range(3)]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert loaded[0].calls == 1
    assert stats(model).engine_calls == 0
    assert LocalStore(config.cache_dir).entries() == []  # type: ignore[arg-type]
    (verdict,) = verdicts(config, model, Environment.current("cpu").for_plans())
    assert verdict.engines == []
    assert restore_modules({"": Stack().eval()}, config) == 0


def test_a_verdict_of_a_tuning_there_comes_first(
    config: TuneConfig, model: nn.Module, over_there: Callable[[float], list[StandIn]]
) -> None:
    import dataclasses

    from aitune_hf.backends.testing import FakeBackend

    over_there(0.0)
    build_for(model, inputs(2), targets=["rtx:sm89"], config=config)
    own = dataclasses.replace(config, backends=(FakeBackend("own"),), strategy="first_working")
    tune(model, inputs(2), own)
    twin = Stack().eval()
    assert restore_modules({"": twin}, own) == 1
    with torch.no_grad():
        twin(torch.randn(2, 16))
    assert {one.backend for one in aitune_hf.jit.patcher.patched_of(twin).engines} == {"own"}  # type: ignore[union-attr]


@pytest.mark.skipif(driver_problem() is None, reason="there is a driver here")
def test_without_a_driver_eager_stays_and_a_line_says_why(
    config: TuneConfig, model: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = Environment.current("cpu").for_plans()
    monkeypatch.setattr(Target, "place", property(lambda target: here))
    build_for(model, inputs(2), targets=["rtx:sm89"], config=config)
    assert restore_modules({"": model}, config) == 0
    assert "there is no NVIDIA driver on this machine" in caplog.text
    with torch.no_grad():
        model(torch.randn(2, 16))


def test_graphs_are_moved_only_where_they_stay_the_same_call(config: TuneConfig) -> None:
    from aitune_hf.errors import UntunableError
    from aitune_hf.graph.call_context import CallContext
    from aitune_hf.graph.forward_signature import ForwardSignature
    from aitune_hf.graph.graph_spec import GraphSpec
    from aitune_hf.graph.sample_metadata import SampleMetadata

    def forward(x: torch.Tensor, device: Any = None) -> torch.Tensor:
        return x

    def spec(context: CallContext, **call: Any) -> GraphSpec:
        call = {"x": torch.ones(2), **call}
        outputs = SampleMetadata.of(torch.ones(2))
        return GraphSpec(
            "g", SampleMetadata.of(call), outputs, ForwardSignature.from_callable(forward), context=context
        )

    plain = spec(CallContext())
    moved = graph_on(plain, "cuda")
    assert (plain.device_type, moved.device_type) == ("cpu", "cuda")
    assert moved.key != plain.key
    assert graph_on(moved, "cpu").key == plain.key
    for odd in (spec(CallContext(autocast="bfloat16")), spec(CallContext(), device=torch.device("cpu"))):
        with pytest.raises(UntunableError):
            graph_on(odd, "cuda")
