"""States and transitions, and the modes and rules that decide about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_kit import Bench, Block, FrozenBackend, Leaf, Net, check, eager_twin, patched, rows, state, stats
from torch import nn

from aitune_hf.config import TuneConfig
from aitune_hf.errors import GraphBreakException, UntunableError
from aitune_hf.jit import ModuleState, PatchedModule, TuningSession, enable_tune_deferred
from aitune_hf.jit.patch_policy import BUILTIN_EXCLUDE, is_excluded
from aitune_hf.jit.patcher import Patcher, patched_modules
from aitune_hf.jit.session import use_session


def run(net: nn.Module, twin: nn.Module, times: int, **kwargs: Any) -> None:
    for count in range(times):
        check(net, twin, rows(2 + count % 2), **kwargs)


def test_a_module_goes_from_init_over_recording_to_tuned(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    bench.session(net, min_samples=3)
    assert state(net) == "init"
    seen = []
    for _ in range(4):
        run(net, twin, 1)
        seen.append(state(net))
    assert seen == ["recording", "recording", "tuned", "tuned"]
    assert stats(net).engine_calls == 1


def test_below_a_tuned_module_nothing_is_patched(bench: Bench) -> None:
    net = Net()
    bench.session(net, min_samples=1)
    children = [patched(module) for module in (net.first, net.second, net.first.left)]
    check(net, eager_twin(net), rows())
    assert [child.state for child in children] == [ModuleState.DETACHED] * 3
    assert list(patched_modules(net)) == [patched(net)]


def test_deferred_mode_waits_for_the_mark(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    session = bench.session(net, mode="deferred", min_samples=1)
    run(net, twin, 5)
    assert state(net) == "recording"
    enable_tune_deferred(session)
    assert state(net) == "recording"
    run(net, twin, 1)
    assert state(net) == "tuned"
    run(net, twin, 1, engine=True)


def test_inspect_mode_never_tunes_and_reports(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    session = bench.session(net, mode="inspect", min_samples=1)
    run(net, twin, 6)
    patched(net).try_tune()
    assert state(net) == "recording"
    assert bench.backend.builds == []
    reports = [report.to_dict() for head in session.heads for report in head.inspection_subtree_reports()]
    assert json.loads(json.dumps(reports)) == reports
    assert [report["fq_name"] for report in reports[:3]] == ["Net", "Net.Block", "Net.Block.Leaf"]
    assert len(reports) == 7
    top = reports[0]
    assert (top["call_count"], top["level"], top["state"], top["parameters"]) == (6, 0, "recording", 80)
    assert top["dtypes"] == ["float32"]
    assert top["graphs"][0]["input_spec"]["tensors"][0][1]["max_shape"] == [3, 4]


def test_a_dry_run_builds_nothing(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    session = bench.session(net, dry_run=True, min_samples=1)
    run(net, twin, 3)
    assert state(net) == "eager"
    assert session.attempted_tuning
    assert bench.backend.builds == []
    assert set(patched(net).reasons.values()) == {"dry run"}


def test_a_dry_run_that_always_fails_reaches_every_level(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    session = bench.session(net, dry_run=True, dry_run_failure_probability=1.0, min_samples=1)
    run(net, twin, 1)
    assert {one.state for one in session.modules} == {ModuleState.EAGER}
    assert all("pretends" in one.reasons["module"] for one in session.modules)
    run(net, twin, 2)


def test_the_dry_runs_dice_leave_the_global_generator_alone(bench: Bench) -> None:
    import random

    net = Net()
    bench.session(net, dry_run=True, dry_run_failure_probability=0.5, min_samples=1)
    before = random.getstate()
    check(net, eager_twin(net), rows())
    assert random.getstate() == before


def test_tuning_can_wait_for_a_second_batch_size(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    bench.session(net, min_samples=1, batch_axis_required=True)
    for _ in range(4):
        check(net, twin, rows(2))
    assert state(net) == "recording"
    check(net, twin, rows(3))
    assert state(net) == "tuned"


@pytest.mark.parametrize(("depth", "tuned"), [(0, set()), (1, {"Net.Block"}), (None, {"Net.Block"})])
def test_no_module_below_the_deepest_level_is_tuned(bench: Bench, depth: int | None, tuned: set[str]) -> None:
    bench.backend = FrozenBackend(refuse=["Net"])
    net = Net()
    twin = eager_twin(net)
    session = bench.session(net, min_samples=1, max_depth_level=depth)
    run(net, twin, 6)
    assert {one.fq_name.removesuffix("#1") for one in session.modules if one.state is ModuleState.TUNED} == tuned
    deep = [one for one in session.modules if depth is not None and one.level > depth]
    assert all(one.state is not ModuleState.RECORDING for one in deep if one.level == depth + 1)  # type: ignore[operator]


def test_small_modules_stay_eager(bench: Bench) -> None:
    net = Net()
    bench.session(net, min_samples=1, min_parameters=81)
    check(net, eager_twin(net), rows())
    assert state(net) == "eager"
    assert "80 parameters" in patched(net).reasons["module"]
    assert bench.backend.builds == []


def test_a_skipped_class_is_left_alone_with_all_below(bench: Bench) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.extra = Leaf()
            self.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.extra(self.net(x)["y"])

    wrapper = Wrapper()
    twin = eager_twin(wrapper)
    bench.backend = FrozenBackend(refuse=["Wrapper"])
    skipped = None
    session = bench.session(wrapper, min_samples=2, skip_modules=("Net",))
    skipped = patched(wrapper.net)
    below = patched(wrapper.net.first)
    for _ in range(4):
        check(wrapper, twin, rows())
    assert skipped.state is ModuleState.SKIPPED
    assert below.state is ModuleState.DETACHED
    assert all("forward" not in vars(module) for module in wrapper.net.modules())
    assert state(wrapper.extra) == "tuned"
    assert bench.backend.builds == ["extra"]
    assert session.heads[0].children[0] is skipped


def test_exclusion_is_by_dotted_prefix_or_exact_class() -> None:
    class LeafLike(nn.Module):
        pass

    prefix = TuneConfig(patch_exclude=(Leaf.__module__,))
    exact = TuneConfig(patch_exclude=(f"{Leaf.__module__}.{Leaf.__qualname__}",))
    partial = TuneConfig(patch_exclude=(f"{Leaf.__module__}.Lea", Leaf.__module__[:-1]))
    assert is_excluded(Leaf, prefix)
    assert is_excluded(Block, prefix)
    assert is_excluded(Leaf, exact)
    assert not is_excluded(Block, exact)
    assert not is_excluded(Leaf, partial)
    assert not is_excluded(LeafLike, exact)


def test_built_in_exclusions_cannot_be_removed() -> None:
    for config in (TuneConfig(), TuneConfig(patch_exclude=()), TuneConfig(patch_exclude=("mine",))):
        assert is_excluded(nn.Linear, config)
        assert is_excluded(torch.fx.GraphModule, config)
        assert not is_excluded(nn.Sequential, config)
    assert "torch.nn.modules" in BUILTIN_EXCLUDE


def test_excluded_modules_are_not_intercepted(bench: Bench) -> None:
    net = Net()
    bench.session(net, patch_exclude=(f"{Block.__module__}.Block",))
    assert state(net.first) is None
    assert state(net.first.left) == "init"


class Scout:
    """A tuner that finds graph breaks in classes of some name, and never an engine."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.asked: list[str] = []
        self.tuned: list[str] = []

    def restore(self, patched: PatchedModule) -> None:
        return None

    def blocks(self, patched: PatchedModule) -> list[PatchedModule]:
        return []

    def can_capture(self, patched: PatchedModule) -> None:
        self.asked.append(patched.fq_name)
        if patched.name in self.broken:
            raise GraphBreakException(f"{patched.fq_name} has a graph break")

    def tune(self, patched: PatchedModule) -> tuple[list[Any], dict[str, str]]:
        self.tuned.append(patched.fq_name)
        assert all(len(graph.samples) for graph in patched.recorder.graphs.values())
        return [], dict.fromkeys(patched.recorder.graphs, "a scout finds nothing")


def test_graph_breaks_send_tuning_down_before_anything_is_built(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    scout = Scout("Net", "Block")
    session = bench.session(net, tuner=scout, detect_graph_breaks=True, min_samples=2)
    run(net, twin, 3)
    assert scout.asked[:3] == ["Net", "Net.Block", "Net.Block.Leaf"]
    assert scout.tuned == ["Net.Block.Leaf", "Net.Block.Leaf#1", "Net.Block#1.Leaf", "Net.Block#1.Leaf#1"]
    assert patched(net).reasons["module"] == "Net has a graph break"
    assert any("looking for graph breaks took" in entry for entry in session.history)


def test_graph_breaks_are_not_looked_for_unless_asked(bench: Bench) -> None:
    net = Net()
    scout = Scout("Net")
    bench.session(net, tuner=scout, min_samples=1)
    check(net, eager_twin(net), rows())
    assert scout.asked == []
    assert scout.tuned == ["Net"]


def test_a_parent_that_fails_hands_over_to_its_children(bench: Bench) -> None:
    bench.backend = FrozenBackend(refuse=["Net", "second"])
    net = Net()
    net.second.right = Leaf()
    net.second.right.scale = 2.0  # So that no engine fits both blocks.
    twin = eager_twin(net)
    bench.session(net, min_samples=2)
    run(net, twin, 2)
    assert [state(module) for module in (net, net.first, net.second)] == ["eager", "tuned", "eager"]
    assert [state(module) for module in (net.second.left, net.second.right)] == ["tuned", "tuned"]
    assert bench.backend.builds == ["first", "second.left", "second.right"]
    check(net.first, twin.first, rows(), engine=True)
    run(net, twin, 2)
    assert "Net is refused" in patched(net).reasons["module"]


def test_when_eager_is_faster_nothing_below_is_tried(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    scout = Scout()
    bench.session(net, tuner=scout, min_samples=1)
    run(net, twin, 6)
    assert scout.tuned == ["Net"]
    assert state(net.first) == "eager"
    assert "its caller stays eager" in patched(net.first).reasons["module"]


def test_an_unexpected_error_is_logged_with_its_traceback(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Scout):
        def tune(self, patched: PatchedModule) -> Any:
            raise ZeroDivisionError("a bug of the tuner")

    leaf = Leaf()
    bench.session(leaf, tuner=Broken(), min_samples=1)
    check(leaf, eager_twin(leaf), rows())
    assert state(leaf) == "eager"
    log = bench.folder / "logs" / "Leaf" / "error.log"
    assert "ZeroDivisionError: a bug of the tuner" in log.read_text()
    assert str(log) in caplog.text


def test_a_log_that_cannot_be_written_changes_nothing(bench: Bench) -> None:
    bench.folder = Path("/proc/nowhere")

    class Broken(Scout):
        def tune(self, patched: PatchedModule) -> Any:
            raise ZeroDivisionError

    leaf = Leaf()
    with use_session(TuningSession(bench.config(min_samples=1), Broken())) as session:
        Patcher(session).patch_tree(leaf)
    check(leaf, eager_twin(leaf), rows())
    assert state(leaf) == "eager"


def test_a_cache_that_raises_is_no_reason_for_a_call_to_fail(bench: Bench) -> None:
    class Raising(Scout):
        def restore(self, patched: PatchedModule) -> None:
            raise UntunableError("no hash for this one")

    leaf = Leaf()
    bench.session(leaf, tuner=Raising())
    check(leaf, eager_twin(leaf), rows())
    assert state(leaf) == "recording"


def test_a_forward_without_a_signature_stays_eager(bench: Bench) -> None:
    class NoSignature:
        __signature__ = "none"

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forward = NoSignature()

    odd = Odd()
    bench.session(odd, min_samples=1)
    assert torch.equal(odd(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(odd(torch.ones(2)), torch.full((2,), 2.0))


def test_reset_unpatches_and_forgets_even_what_is_gone(bench: Bench) -> None:
    net = Net()
    session = bench.session(net, min_samples=2)
    with use_session(session):
        check(net, eager_twin(net), rows())
        net.second = nn.Identity()  # Its PatchedModule lives on as a child of the head.
        PatchedModule.print_hierarchy(lambda line: None)
        PatchedModule.reset()
        assert list(patched_modules(net)) == []
        assert (session.heads, session.history, session.module_counter) == ([], [], 0)
        assert not session.attempted_tuning
        assert all("forward" not in vars(module) for module in net.modules())


def test_calling_try_tune_before_its_time_does_nothing(bench: Bench) -> None:
    net = Net()
    bench.session(net, min_samples=3)
    check(net, eager_twin(net), rows())
    patched(net).try_tune()
    assert state(net) == "recording"


def test_a_module_is_patched_once(bench: Bench) -> None:
    net = Net()
    session = bench.session(net)
    assert Patcher(session).patch(net) is patched(net)
    with pytest.raises(ValueError, match="patched already"):
        PatchedModule(net, session)
