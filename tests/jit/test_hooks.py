"""Hooks of every kind fire once per call, in their order, whenever they were added and whatever tuning came of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook as AccelerateHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks.hooks import HookRegistry
from diffusers.hooks.hooks import ModelHook as DiffusersHook
from jit_kit import (
    Bench,
    FrozenBackend,
    Leaf,
    Net,
    assert_same,
    call,
    check,
    eager_twin,
    patched,
    rows,
    state,
    stats,
    untune,
)
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

Log = list[str]


def add_plain(module: nn.Module, log: Log) -> Callable[[], None]:
    one = module.register_forward_pre_hook(lambda m, args: log.append("pre"))
    two = module.register_forward_hook(lambda m, args, output: log.append("post"))

    def remove() -> None:
        one.remove()
        two.remove()

    return remove


def add_with_kwargs(module: nn.Module, log: Log) -> Callable[[], None]:
    def before(m: nn.Module, args: Any, kwargs: Any) -> Any:
        log.append("pre")
        return args, {**kwargs, "gain": kwargs.get("gain", 1.0) * 2}

    one = module.register_forward_pre_hook(before, with_kwargs=True)
    two = module.register_forward_hook(
        lambda m, args, kwargs, output: log.append("post") or output + 1, with_kwargs=True
    )

    def remove() -> None:
        one.remove()
        two.remove()

    return remove


class Accelerate(AccelerateHook):
    def __init__(self, log: Log) -> None:
        self.log = log

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.log.append("pre")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append("post")
        return output + 1


def add_accelerate(module: nn.Module, log: Log) -> Callable[[], None]:
    add_hook_to_module(module, Accelerate(log))
    return lambda: remove_hook_from_module(module) and None


class Diffusers(DiffusersHook):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.log.append("pre")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append("post")
        return output + 1


class Rewriting(Diffusers):
    """Takes the forward's place, and calls it by itself."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.log.append("new")
        return self.fn_ref.original_forward(*args, **kwargs) * 2


def add_diffusers(module: nn.Module, log: Log) -> Callable[[], None]:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(Diffusers(log), "test")
    return lambda: module._diffusers_hook.remove_hook("test")


def add_rewriting(module: nn.Module, log: Log) -> Callable[[], None]:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(Rewriting(log), "test")
    return lambda: module._diffusers_hook.remove_hook("test")


KINDS = {
    "plain": (add_plain, ["pre", "post"]),
    "with_kwargs": (add_with_kwargs, ["pre", "post"]),
    "accelerate": (add_accelerate, ["pre", "post"]),
    "diffusers": (add_diffusers, ["pre", "post"]),
    "diffusers_new_forward": (add_rewriting, ["pre", "new", "post"]),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, module: nn.Module) -> tuple[Callable[[], None], Log, list[str]]:
    add, order = KINDS[kind]
    log: Log = []
    return add(module, log), log, order


def call_both(leaf: nn.Module, twin: nn.Module, log: Log, order: list[str], **kwargs: Any) -> None:
    log.clear()
    x = rows()
    with torch.no_grad():
        ours = leaf(x)
        fired = list(log)
        theirs = twin(x)
    assert fired == order
    assert_same(ours, theirs)


def hooked_pair(kind: str) -> tuple[nn.Module, nn.Module, Callable[[], None], Callable[[], None], Log, list[str]]:
    leaf = Leaf()
    twin = eager_twin(leaf)
    remove, log, order = make(kind, leaf)
    remove_twin = KINDS[kind][0](twin, [])
    return leaf, twin, remove, remove_twin, log, order


@kinds
@pytest.mark.parametrize("refused", [False, True], ids=["tuned", "tuning failed"])
def test_added_before_and_removed_after_tuning(bench: Bench, kind: str, refused: bool) -> None:
    bench.backend = FrozenBackend(refuse=["Leaf"] if refused else [])
    leaf, twin, remove, remove_twin, log, order = hooked_pair(kind)
    bench.tune(leaf, rows(), rows(3))
    for _ in range(3):
        call_both(leaf, twin, log, order)
    assert stats(leaf).engine_calls == (0 if refused else 3)
    remove()
    remove_twin()
    call_both(leaf, twin, log, [])
    # Without the hook that changed the arguments, the call is one that was never recorded.
    assert stats(leaf).engine_calls == (0 if refused else 3 if kind == "with_kwargs" else 4)
    untune(leaf)
    call_both(leaf, twin, log, [])
    assert type(leaf).forward is leaf.forward.__func__


@kinds
@pytest.mark.parametrize("refused", [False, True], ids=["tuned", "tuning failed"])
def test_added_after_tuning_and_kept_after_untuning(bench: Bench, kind: str, refused: bool) -> None:
    bench.backend = FrozenBackend(refuse=["Leaf"] if refused else [])
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    remove, log, order = make(kind, leaf)
    remove_twin = KINDS[kind][0](twin, [])
    for _ in range(2):
        call_both(leaf, twin, log, order)
    assert stats(leaf).engine_calls == (0 if refused or kind == "with_kwargs" else 2)
    untune(leaf)
    call_both(leaf, twin, log, order)
    remove()
    remove_twin()
    call_both(leaf, twin, log, [])


@kinds
def test_added_and_removed_while_recording(bench: Bench, kind: str) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.session(leaf, min_samples=4)
    with torch.no_grad():
        leaf(rows())
        remove, log, order = make(kind, leaf)
        remove_twin = KINDS[kind][0](twin, [])
        call_both(leaf, twin, log, order)
        remove()
        remove_twin()
        for _ in range(4):
            call_both(leaf, twin, log, [])
    assert state(leaf) == "tuned"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pair
        for pair in itertools.permutations(("accelerate", "diffusers", "diffusers_new_forward", "plain"), 2)
        if not all(name.startswith("diffusers") for name in pair)  # One registry takes one hook of a name.
    ],
)
@pytest.mark.parametrize("when", ["both before", "one before", "both after"])
def test_hooks_of_two_libraries_keep_their_order(bench: Bench, first: str, second: str, when: str) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    log: Log = []
    expected: Log = []
    KINDS[first][0](twin, expected)
    KINDS[second][0](twin, expected)
    if when != "both after":
        KINDS[first][0](leaf, log)
    if when == "both before":
        KINDS[second][0](leaf, log)
    bench.tune(leaf, rows())
    if when == "both after":
        KINDS[first][0](leaf, log)
    if when != "both before":
        KINDS[second][0](leaf, log)
    for _ in range(2):
        log.clear()
        expected.clear()
        x = rows()
        with torch.no_grad():
            assert_same(leaf(x), twin(x))
        assert log == expected
        assert len(log) >= 4
    assert stats(leaf).engine_calls == 2


@kinds
def test_a_hook_on_an_inner_module_after_tuning_fires_and_is_said_once(
    bench: Bench, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    twin = eager_twin(net)
    bench.tune(net, rows())
    check(net, twin, rows(), engine=True)
    remove, log, order = make(kind, net.first.left)
    remove_twin = KINDS[kind][0](twin.first.left, [])
    for _ in range(3):
        log.clear()
        check(net, twin, rows(), engine=False)
        assert log == order
    warnings = [record.message for record in caplog.records if "first.left" in record.message]
    assert len(warnings) == 1
    remove()
    remove_twin()
    # diffusers leaves its empty registry and a bound forward behind, accelerate nothing.
    check(net, twin, rows(), engine=None if kind.startswith("diffusers") else True)


@kinds
def test_a_module_with_hooked_descendants_is_never_collapsed(bench: Bench, kind: str) -> None:
    net = Net()
    twin = eager_twin(net)
    _, log, order = make(kind, net.first.left)
    KINDS[kind][0](twin.first.left, [])
    bench.tune(net, rows())
    assert state(net) == "eager"
    assert "would not fire inside an engine" in patched(net).reasons["module"]
    assert state(net.second) == "tuned"
    assert state(net.first) != "tuned"
    assert state(net.first.right) == "tuned"
    for _ in range(2):
        log.clear()
        check(net, twin, rows())
        assert log == order
    assert stats(net).engine_calls > 0


def test_a_global_module_hook_runs_eager_and_fires_for_every_module(bench: Bench) -> None:
    net = Net()
    twin = eager_twin(net)
    bench.tune(net, rows())
    seen: list[str] = []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    try:
        check(net, twin, rows(), engine=False)
    finally:
        handle.remove()
    assert seen.count("Net") == 2
    assert seen.count("Linear") == 8
    check(net, twin, rows(), engine=True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_cpu_offload_gives_no_engine_a_meta_tensor(bench: Bench, when: str) -> None:
    net = Net()
    twin = eager_twin(net)
    if when == "before":
        cpu_offload(net, execution_device=torch.device("cpu"))
    bench.tune(net, rows(), rows(3))
    if when == "after":
        check(net, twin, rows(), engine=True)
        cpu_offload(net, execution_device=torch.device("cpu"))
    for _ in range(2):
        check(net, twin, rows(), engine=False)
    remove_hook_from_module(net, recurse=True)
    check(net, twin, rows())


def test_offload_of_the_whole_module_by_one_hook_runs_engines_with_the_weights_it_brings(bench: Bench) -> None:
    from accelerate.hooks import AlignDevicesHook

    leaf = Leaf()
    twin = eager_twin(leaf)
    weights = {name: tensor.clone() for name, tensor in leaf.state_dict().items()}
    bench.tune(leaf, rows())
    hook = AlignDevicesHook(
        execution_device="cpu", offload=True, weights_map=weights, offload_buffers=True, place_submodules=True
    )
    add_hook_to_module(leaf, hook)
    assert all(tensor.is_meta for tensor in leaf.parameters())
    for _ in range(3):
        check(leaf, twin, rows())
    assert all(tensor.is_meta for tensor in leaf.parameters())


def triple(module: nn.Module) -> None:
    inner = module.forward
    module.forward = lambda x: inner(x) * 3  # type: ignore[assignment]


@pytest.mark.parametrize("when", [0, 1, 3], ids=["before", "while recording", "after tuning"])
def test_a_forward_that_was_wrapped_by_hand_keeps_its_wrapper(bench: Bench, when: int) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    if when == 0:
        triple(leaf)
    bench.session(leaf, min_samples=2)
    for count in range(5):
        if count == when:
            triple(twin)
            if when:
                triple(leaf)
        check_outputs(leaf, twin)
    untune(leaf)
    check_outputs(leaf, twin)


def check_outputs(ours: nn.Module, theirs: nn.Module) -> None:
    x = rows()
    with torch.no_grad():
        assert_same(ours(x), theirs(x))


def test_hooks_that_change_arguments_decide_which_graph_is_called(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    for module in (leaf, twin):
        add_with_kwargs(module, [])
    bench.tune(leaf, call(rows()), call(rows(), gain=2.0))
    check(leaf, twin, rows(), engine=True)
    check(leaf, twin, rows(), gain=2.0, engine=True)
    check(leaf, twin, rows(), gain=3.0, engine=False)
