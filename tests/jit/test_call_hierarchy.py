"""Who called whom, by what name, and how it is shown."""

from __future__ import annotations

import threading
from typing import Any

import torch
from jit_kit import Bench, FrozenBackend, Leaf, Net, assert_same, check, eager_twin, patched, rows, state, stats
from torch import nn

from aitune_hf.jit import PRINT_HIERARCHY_HEADER, PRINT_HIERARCHY_NO_MODULES_HEADER, PatchedModule, TuningSession
from aitune_hf.jit.patcher import Patcher
from aitune_hf.jit.session import use_session


class Choosy(nn.Module):
    """Calls its second child only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.always = Leaf()
        self.seldom = Leaf()
        self.eval()

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        y = self.always(x)
        return self.seldom(y) if both else y


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.eval()

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return self(y, depth - 1) if depth else y


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = Leaf()
        self.one = Holder(self.shared)
        self.two = Holder(self.shared)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def lines(session: TuningSession) -> list[str]:
    found: list[str] = []
    with use_session(session):
        PatchedModule.print_hierarchy(found.append)
    return found


def test_names_are_unique_and_tell_the_path(bench: Bench) -> None:
    net = Net()
    session = bench.session(net, mode="inspect")
    net(rows())
    names = [one.fq_name for one in session.modules]
    assert len(set(names)) == 7
    assert {"Net", "Net.Block", "Net.Block#1", "Net.Block.Leaf", "Net.Block#1.Leaf#1"} <= set(names)


def test_a_module_has_no_unique_name_before_its_first_call(bench: Bench) -> None:
    net = Net()
    bench.session(net)
    assert patched(net).fq_name == "Net(not called)"


def test_a_child_first_met_on_a_later_call_finds_its_parent(bench: Bench) -> None:
    choosy = Choosy()
    session = bench.session(choosy, mode="inspect")
    choosy(rows())
    choosy(rows(), both=True)
    assert session.heads == [patched(choosy)]
    assert patched(choosy.seldom).parent is patched(choosy)
    assert patched(choosy.seldom).level == 1


def test_a_child_first_met_after_its_parent_stayed_eager_finds_it_and_is_tuned(bench: Bench) -> None:
    bench.backend = FrozenBackend(refuse=["Choosy"])
    choosy = Choosy()
    twin = eager_twin(choosy)
    session = bench.session(choosy, min_samples=2)
    for both in (False, False, True, True, True):
        check(choosy, twin, rows(), both=both)
    assert session.heads == [patched(choosy)]
    assert state(choosy.seldom) == "tuned"
    assert patched(choosy.seldom).parent is patched(choosy)


def test_a_child_attached_after_tuning_finds_its_parent(bench: Bench) -> None:
    choosy = Choosy()
    twin = eager_twin(choosy)
    session = bench.session(choosy, min_samples=1)
    check(choosy, twin, rows())
    choosy.always = Leaf()
    twin.always = eager_twin(choosy.always)
    Patcher(session).patch_tree(choosy.always)
    check(choosy, twin, rows(), engine=False)
    assert session.heads == [patched(choosy)]
    assert patched(choosy.always).parent is patched(choosy)


def test_the_hierarchy_is_printed_with_states_and_levels(bench: Bench) -> None:
    bench.backend = FrozenBackend(refuse=["Net"])
    net = Net()
    session = bench.session(net, min_samples=1)
    assert lines(session) == [PRINT_HIERARCHY_NO_MODULES_HEADER]
    check(net, eager_twin(net), rows())
    head, top, child, *_ = lines(session)
    assert head == PRINT_HIERARCHY_HEADER
    assert top.startswith("[off] Net [Net, 80 parameters, 1 calls] eager (frozen: Net is refused")
    assert child.startswith("[on ]   Net.Block [Block, 40 parameters, ")


def test_the_history_tells_what_happened_in_order(bench: Bench) -> None:
    leaf = Leaf()
    session = bench.session(leaf, min_samples=1)
    check(leaf, eager_twin(leaf), rows())
    found: list[str] = []
    with use_session(session):
        PatchedModule.print_history(found.append)
    assert found[0] == "Leaf: state recording"
    assert found[1].startswith("Leaf: tuning took")
    assert found[-1] == "Leaf: state tuned"


def test_two_parents_may_share_a_child(bench: Bench) -> None:
    for refuse in ([], ["Sharing"], ["Sharing", "one"], ["Sharing", "Holder"]):
        bench.backend = FrozenBackend(refuse=refuse, name=f"frozen{len(refuse)}{''.join(refuse)[-2:]}")
        sharing = Sharing()
        twin = eager_twin(sharing)
        session = bench.session(sharing, min_samples=2)
        for _ in range(5):
            check(sharing, twin, rows())
        assert session.heads == [patched(sharing)]
        assert len({one.fq_name for one in session.modules}) == len(session.modules)


def test_a_shared_child_keeps_the_engines_it_has_for_another_caller(bench: Bench) -> None:
    bench.backend = FrozenBackend(refuse=["Sharing", "one"])
    sharing = Sharing()
    sharing.two.other = True  # So that the verdict on the first is none on the second.
    twin = eager_twin(sharing)
    bench.session(sharing, min_samples=2)
    for _ in range(3):
        check(sharing, twin, rows())
    assert [state(module) for module in (sharing.one, sharing.two, sharing.shared)] == ["eager", "tuned", "tuned"]
    before = stats(sharing.shared).engine_calls
    check(sharing, twin, rows())
    assert stats(sharing.shared).engine_calls == before + 1


def test_a_module_may_call_itself(bench: Bench) -> None:
    recursive = Recursive()
    twin = eager_twin(recursive)
    session = bench.session(recursive, min_samples=2)
    for depth in (2, 2, 0, 3, 2):
        check(recursive, twin, rows(), depth)
    assert session.heads == [patched(recursive)]
    assert not session.stack


def test_the_engine_of_a_module_may_call_the_module_again(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    inner: list[Any] = []
    x = rows()

    def again(module: nn.Module, args: Any) -> None:
        if not inner:
            inner.append(None)
            inner[0] = module(x)

    leaf.register_forward_pre_hook(again)
    check(leaf, twin, x)
    assert_same(inner[0], twin(x).detach())


def test_each_thread_has_its_own_stack(bench: Bench) -> None:
    net, other = Net(), Leaf()
    session = bench.session(net, other, mode="inspect")
    inside, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        done.wait(10)

    net.first.register_forward_pre_hook(wait)
    thread = threading.Thread(target=net, args=(rows(),))
    thread.start()
    inside.wait(10)
    other(rows())
    done.set()
    thread.join()
    assert set(session.heads) == {patched(net), patched(other)}
