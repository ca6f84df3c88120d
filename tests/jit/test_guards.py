"""What is changed on a module after tuning is seen before an engine answers. The engines here are frozen, so that
whatever is missed gives a wrong answer."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_kit import BakingBackend, Bench, Leaf, Net, assert_same, check, eager_twin, rows, state, stats, untune
from torch import nn
from torch.nn.utils import parametrize

Change = Callable[[Any], object]


class Helper:
    def __init__(self) -> None:
        self.gain = 1.0
        self.table = {"gain": 1.0}
        self.values = [1.0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.table["gain"] * self.values[0]


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Rich(nn.Module):
    """Computes with everything that can hang on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Leaf()
        self.norm = nn.BatchNorm1d(4)
        self.helper = Helper()
        self.slotted = Slotted()
        self.settings = {"deep": {"er": [1.0, {"est": 1.0}]}}
        self.space = types.SimpleNamespace(gain=1.0)
        self.part = functools.partial(torch.mul, other=1.0)
        self.extra = [Leaf()]  # A module that is held without being a child.
        self.queue = deque([1.0])
        self.kinds: set[str] = set()
        self.constant = torch.ones(4)
        self.count = 1
        self.number = 1.0
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.extra[0](self.norm(self.helper(self.inner(x)))) * self.slotted.gain * self.space.gain
        y = self.part(y) * self.settings["deep"]["er"][1]["est"] * self.queue[0] * self.constant
        return y * (2 if "double" in self.kinds else 1) * self.count * self.number


def set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


class Times(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


CHANGES: dict[str, Change] = {
    "a number": lambda m: setattr(m, "number", 2.0),
    "a count": lambda m: setattr(m, "count", 5),
    "a flag of an inner module": lambda m: setattr(m.inner, "flag", True),
    "a new attribute": lambda m: setattr(m, "brand_new", True),
    "a helper's attribute": lambda m: setattr(m.helper, "gain", 2.0),
    "a helper's dictionary": lambda m: set_item(m.helper.table, "gain", 2.0),
    "a helper's list": lambda m: set_item(m.helper.values, 0, 2.0),
    "a helper": lambda m: setattr(m, "helper", Times()),
    "a slot": lambda m: setattr(m.slotted, "gain", 2.0),
    "deep in a dictionary": lambda m: set_item(m.settings["deep"]["er"][1], "est", 2.0),
    "a namespace": lambda m: setattr(m.space, "gain", 2.0),
    "a partial's keyword": lambda m: set_item(m.part.keywords, "other", 2.0),
    "a deque": lambda m: set_item(m.queue, 0, 2.0),
    "a set": lambda m: m.kinds.add("double"),
    "a flag of a module outside the tree": lambda m: setattr(m.extra[0], "flag", True),
    "a hook on a module outside the tree": lambda m: m.extra[0].register_forward_hook(lambda *a: a[-1] * 2),
    "a constant tensor": lambda m: setattr(m, "constant", torch.full((4,), 2.0)),
    "a constant tensor in place": lambda m: m.constant.mul_(2),
    "a child": lambda m: setattr(m, "inner", Times()),
    "a new child": lambda m: setattr(m, "added", Times()),
    "an inner child": lambda m: setattr(m.inner, "linear", nn.Linear(4, 4, bias=False)),
    "an inner forward": lambda m: setattr(m.inner, "forward", lambda x: x * 3),
    "the own forward": lambda m: setattr(m, "forward", lambda x: x * 3),
    "an inner module's mode": lambda m: m.norm.train(),
    "the whole mode": lambda m: (m.train(), m.inner.dropout.eval()),
    "the norm's epsilon": lambda m: setattr(m.norm, "eps", 10.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of(name: str, bench: Bench) -> None:
    rich = Rich()
    twin = eager_twin(rich)
    bench.tune(rich, rows(3), rows(4))
    check(rich, twin, rows(3), engine=True)
    for module in (rich, twin):
        torch.manual_seed(1)
        CHANGES[name](module)
    for _ in range(2):
        x = rows(3)
        with torch.no_grad():
            assert_same(rich(x), twin(x))
    if name != "the own forward":
        assert stats(rich).engine_calls == 1


def test_an_equal_value_is_no_change_and_switching_back_brings_the_engine_back(bench: Bench) -> None:
    rich = Rich()
    twin = eager_twin(rich)
    bench.tune(rich, rows(3))
    rich.number = float("1.0")
    rich.settings = {"deep": {"er": [1.0, {"est": 1.0}]}}
    check(rich, twin, rows(3), engine=True)
    for value, engine in ((3.0, False), (1.0, True)):
        rich.number = twin.number = value
        check(rich, twin, rows(3), engine=engine)


def test_values_that_only_compare_equal_are_told_apart(bench: Bench) -> None:
    class Integers(Leaf):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.full((2,), self.factor) + x.long()  # type: ignore[call-overload]

    module = Integers()
    module.factor = 1
    twin = eager_twin(module)
    bench.tune(module, rows(1, 2))
    for value in (1.0, True, 1):
        module.factor = twin.factor = value  # type: ignore[assignment]
        check(module, twin, rows(1, 2), engine=value is not True and isinstance(value, int))


def test_the_classes_own_forward_may_be_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (Net, Leaf):
        net = Net()
        twin = eager_twin(net)
        bench.tune(net, rows())
        check(net, twin, rows(), engine=True)
        original = target.forward
        with monkeypatch.context() as patch:
            patch.setattr(target, "forward", lambda self, x, o=original: o(self, x * 2))
            check(net, twin, rows(), engine=False)
        check(net, twin, rows(), engine=True)


def test_dropout_switched_on_is_random_again(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    for module in (leaf, twin):
        module.dropout.p = 0.3
        module.dropout.train()
    x = rows(64)
    with torch.no_grad():
        torch.manual_seed(5)
        ours = leaf(x)
        torch.manual_seed(5)
        assert_same(ours, twin(x))


# -- weights -----------------------------------------------------------------------------------------------------------


def reload(module: nn.Module, assign: bool) -> None:
    torch.manual_seed(7)
    fresh = {name: torch.randn_like(tensor) for name, tensor in module.state_dict().items()}
    module.load_state_dict(fresh, assign=assign)


WEIGHTS: dict[str, tuple[Change, bool | None]] = {
    "in place": (lambda m: m.linear.weight.data.mul_(2), True),
    "under no_grad": (lambda m: torch.nn.init.constant_(m.linear.weight, 0.5), True),
    "of a buffer in place": (lambda m: m.shift.add_(1), True),
    "by data": (lambda m: setattr(m.linear.weight, "data", torch.full((4, 4), 0.5)), True),
    "by a new parameter": (lambda m: setattr(m.linear, "weight", nn.Parameter(torch.full((4, 4), 0.5))), True),
    "by a new buffer": (lambda m: setattr(m, "shift", torch.full((4,), 0.5)), True),
    "by loading": (lambda m: reload(m, assign=False), True),
    "by assigning": (lambda m: reload(m, assign=True), True),
    "by transposing the same memory": (lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t()), False),
    "by dropping the bias": (lambda m: setattr(m.linear, "bias", None), False),
    "to double": (lambda m: m.double(), False),
    "to double and back": (lambda m: m.double().float(), True),
    "by tying": (lambda m: setattr(m.linear, "bias", nn.Parameter(m.linear.weight.data[0])), None),
    "by parametrizing": (lambda m: parametrize.register_parametrization(m.linear, "weight", Times()), False),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_changed(name: str, bench: Bench) -> None:
    change, engine = WEIGHTS[name]
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    check(leaf, twin, rows(), engine=True)
    with torch.no_grad():
        for module in (leaf, twin):
            change(module)
    for _ in range(2):
        x = rows().to(leaf.linear.weight.dtype)
        check(leaf, twin, x, engine=engine)


def test_an_engine_that_lost_its_weights_gets_them_back(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = rows().to(dtype)
        check(leaf.to(dtype), twin.to(dtype), x, engine=dtype is torch.float32)


def test_an_engine_that_holds_a_copy_is_told_of_edits_in_place(bench: Bench) -> None:
    from aitune_hf.jit.patcher import patched_of

    leaf = Leaf()
    bench.tune(leaf, rows())
    one = patched_of(leaf)
    assert one is not None
    (installed,) = one.engines
    installed.weights = "filled"
    one._install([installed], {})
    engine = bench.backend.engines[-1]
    with torch.no_grad():
        leaf(rows())
        before = engine.rebinds
        leaf.linear.weight.mul_(2)
        leaf(rows())
        leaf(rows())
    assert engine.rebinds == before + 1


def test_an_engine_with_baked_weights_is_out_while_they_are_others(tmp_path: Path) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    Bench(tmp_path, BakingBackend()).tune(leaf, rows())
    check(leaf, twin, rows(), engine=True)
    before = {name: tensor.clone() for name, tensor in leaf.state_dict().items()}
    with torch.no_grad():
        leaf.linear.weight.mul_(2)
        twin.linear.weight.mul_(2)
    check(leaf, twin, rows(), engine=False)
    check(leaf, twin, rows(), engine=False)
    assert any("part of the engine" in reason for reason in stats(leaf).eager_calls)
    # Equal values are enough, wherever they lie.
    leaf.load_state_dict(before)
    twin.load_state_dict(before)
    check(leaf, twin, rows(), engine=True)
    leaf.linear.weight = torch.nn.Parameter(before["linear.weight"].clone(), requires_grad=False)
    check(leaf, twin, rows(), engine=True)
    with torch.no_grad():
        leaf.shift.add_(1)
        twin.shift.add_(1)
    check(leaf, twin, rows(), engine=False)


def test_an_engine_with_baked_weights_is_taken_over_for_these_weights_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, BakingBackend())
    leaf = Leaf()
    bench.tune(leaf, rows())
    same, other = Leaf(), Leaf()
    same.load_state_dict(leaf.state_dict())
    twins = eager_twin(same), eager_twin(other)
    bench.tune(same, rows())
    assert bench.backend.builds == ["Leaf"]
    bench.tune(other, rows())
    assert bench.backend.builds == ["Leaf", "Leaf"]
    # Each of the three has the engine that holds its weights, and the one verdict names both.
    for one in (leaf, same, other):
        untune(one)
    for one, twin in zip((same, other), twins, strict=True):
        bench.tune(one, rows())
        check(one, twin, rows(), engine=True)
    assert bench.backend.builds == ["Leaf", "Leaf"]


def test_functional_call_uses_the_weights_it_is_given(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    other = {name: torch.randn_like(tensor) for name, tensor in leaf.named_parameters()}
    x = rows()
    with torch.no_grad():
        assert_same(torch.func.functional_call(leaf, other, (x,)), torch.func.functional_call(twin, other, (x,)))
    check(leaf, twin, rows(), engine=True)


# -- modes -------------------------------------------------------------------------------------------------------------


def test_with_gradients_wanted_eager_runs_and_they_flow(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    bench.tune(net, rows())
    x = rows()
    for module in (net, twin):
        module(x)["y"].sum().backward()
    for (name, ours), (_, theirs) in zip(net.named_parameters(), twin.named_parameters(), strict=True):
        assert ours.grad is not None, name
        assert_same(ours.grad, theirs.grad, name)
    assert stats(net).eager_calls == {"gradients are wanted": 1}
    check(net, twin, x, engine=True)


def test_a_gradient_of_the_input_flows_through_frozen_weights(bench: Bench) -> None:
    net = Net().requires_grad_(False)
    twin = eager_twin(net)
    bench.tune(net, rows())
    inputs = [rows().requires_grad_() for _ in range(1)] * 2
    grads = []
    for module, x in zip((net, twin), inputs, strict=True):
        (grad,) = torch.autograd.grad(module(x)["y"].sum(), x)
        grads.append(grad)
    assert_same(*grads)
    assert torch.equal(net(rows())["y"].detach(), net(rows())["y"].detach()) is False
    assert stats(net).engine_calls == 2  # Grad mode is on, but nothing asks for a gradient.


def test_freezing_and_thawing_between_calls_is_seen(bench: Bench) -> None:
    net = Net()
    bench.tune(net, rows())
    outputs = []
    for frozen in (False, True, False, True):
        net.requires_grad_(not frozen)
        outputs.append(net(rows())["y"].requires_grad)
    assert outputs == [True, False, True, False]
    assert stats(net).engine_calls == 2


def test_autocast_unlike_at_tune_time_runs_eager(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(leaf, twin, rows(), engine=False)
    check(leaf, twin, rows(), engine=True)
    with torch.autocast("cpu", dtype=torch.float16):
        check(leaf, twin, rows(), engine=False)


def test_tuning_under_autocast_serves_autocast_only(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.session(leaf, min_samples=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(leaf, twin, rows())
        check(leaf, twin, rows())
    assert state(leaf) == "tuned"
    check(leaf, twin, rows(), engine=False)


@pytest.mark.parametrize("tuned_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("called_in", [torch.no_grad, torch.inference_mode])
def test_inference_mode_and_no_grad_serve_each_other(bench: Bench, tuned_in: Any, called_in: Any) -> None:
    net = Net()
    twin = eager_twin(net)
    bench.session(net, min_samples=2)
    with tuned_in():
        for _ in range(2):
            x = rows()
            assert_same(net(x), twin(x))
    assert state(net) == "tuned"
    with called_in():
        x = rows()
        assert_same(net(x), twin(x))
    assert stats(net).engine_calls == 1


def test_vmap_modes_and_fake_tensors_run_eager(bench: Bench) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows(2, 4), rows(3, 4))
    x = torch.randn(5, 2, 4)
    with torch.no_grad():
        assert_same(torch.vmap(leaf)(x), torch.vmap(twin)(x))
        with FlopCounterMode(display=False) as counter:
            leaf(rows())
        assert counter.get_total_flops() == 2 * 2 * 4 * 4
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert leaf(mode.from_tensor(rows())).shape == (2, 4)
    assert stats(leaf).engine_calls == 0
    check(leaf, twin, rows(), engine=True)


def test_recording_under_a_transform_keeps_no_sample(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.session(leaf, min_samples=1)
    x = torch.randn(5, 2, 4)
    with torch.no_grad():
        assert_same(torch.vmap(leaf)(x), torch.vmap(twin)(x))
    assert state(leaf) == "recording"
    check(leaf, twin, rows())
    assert state(leaf) == "tuned"


def test_the_default_dtype_and_device_are_seen(bench: Bench) -> None:
    class Making(Leaf):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.zeros(2, 1) + x.long()

    making = Making()
    twin = eager_twin(making)
    bench.tune(making, rows())
    x = rows()
    check(making, twin, x, engine=True)
    torch.set_default_dtype(torch.float64)
    try:
        check(making, twin, x, engine=False)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"), torch.no_grad():
        assert making(x.to("meta")).device.type == "meta"
    check(making, twin, x, engine=True)


# -- side effects --------------------------------------------------------------------------------------------------------


class Counting(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        return super().forward(x) * self.calls


class Caching(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x) + self.cache.get("last", torch.zeros(1))
        self.cache["last"] = y
        return y


class Mutating(Leaf):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x.add_(1))


class SecretlyMutating(Leaf):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x.data.add_(1)
        return super().forward(x)


class Buffering(Leaf):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.shift += 1
        return super().forward(x)


class Rebinding(Leaf):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.shift = self.shift + 1
        return super().forward(x)


class Random(Leaf):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + torch.randn(4)


class PythonRandom(Leaf):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + (1.0 if random.random() < 0.01 else 0.0)


SIDE_EFFECTS = {
    Counting: "keeps state on the module",
    Caching: "keeps state on the module",
    Mutating: "changes one of its inputs in place",
    SecretlyMutating: "changes one of its inputs in place",
    Buffering: "changes a parameter or buffer in place",
    Rebinding: "keeps state on the module",
    Random: "draws random numbers",
    PythonRandom: "draws random numbers",
}


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


class Around(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle, self.after = Leaf(), middle, Leaf()
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.before(self.middle(x)))


@pytest.mark.parametrize("cls", SIDE_EFFECTS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("driven", [False, True], ids=["by itself", "by tune"])
def test_a_module_with_a_side_effect_is_refused_and_what_is_around_it_is_tuned(
    bench: Bench, cls: type[nn.Module], mode: Any, driven: bool
) -> None:
    net = Around(cls())
    twin = eager_twin(net)
    if driven:
        with mode():
            report = bench.tune(net, rows(), rows())
        assert SIDE_EFFECTS[cls] in str(report) or net.before is not None
        # Every sample was run once per pass; the twin's state must follow.
        for name in ("calls", "cache", "shift"):
            if hasattr(net.middle, name):
                setattr(twin.middle, name, getattr(eager_twin(net.middle), name))
    else:
        session = bench.session(net, min_samples=2)
    for _ in range(5):
        x = rows()
        ours, theirs = x.clone(), x.clone()
        with mode():
            seed()
            one = net(ours)
            seed()
            other = twin(theirs)
        assert_same(one, other)
        assert_same(ours, theirs)
    assert [state(net.before), state(net.after)] == ["tuned", "tuned"]
    assert stats(net).engine_calls >= 2
    if not driven:
        reports = {r.fq_name: r.reasons for head in session.heads for r in head.inspection_subtree_reports()}
        assert any(SIDE_EFFECTS[cls] in why for why in reports[f"Around.{cls.__name__}"].values())
        assert state(net.middle) == "eager"
    assert state(net) == "eager"


def test_batch_norm_in_training_mode_is_not_run_once_more(bench: Bench) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), Leaf()).train()
    net[1].dropout.p = 0.0
    twin = eager_twin(net)
    bench.session(net, min_samples=2)
    for _ in range(4):
        check(net, twin, rows(5))
    assert_same(net[0].running_mean, twin[0].running_mean)
    assert int(net[0].num_batches_tracked) == 4
    net.eval()
    twin.eval()
    check(net, twin, rows(5))


def test_a_collector_that_was_asked_for_nothing_collects_nothing() -> None:
    from transformers.utils import output_capturing

    from aitune_hf.jit.dormant_hooks import collecting

    collector: Any = output_capturing._active_collector
    for asked, expected in (({}, False), ({"hidden_states": []}, True)):
        token = collector.set(asked)
        try:
            assert collecting() is expected
        finally:
            collector.reset(token)
    assert not collecting()


def test_our_own_settings_are_no_part_of_a_module() -> None:
    module = nn.Linear(2, 2).eval()
    vars(module)["_aitune_config"] = {"a": [1]}
    from aitune_hf.jit.guards import ModuleGuard

    guard = ModuleGuard(module)
    vars(module)["_aitune_config"]["a"].append(2)
    assert guard.structure_change() is None
    vars(module)["_aitune_config"] = None
    assert guard.structure_change() is None
    vars(module)["helper"] = {"a": [1]}
    assert guard.structure_change() is not None
