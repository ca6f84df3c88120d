"""Which engine answers a call, with which tensors, and who answers where none may."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from jit_kit import (
    Bench,
    FrozenBackend,
    FrozenEngine,
    Leaf,
    assert_same,
    call,
    check,
    eager_twin,
    patched,
    rows,
    stats,
    untune,
)
from torch import nn

from aitune_hf.errors import EngineLoadError, UnfitInputError
from aitune_hf.jit.dispatcher import FIRST_CALL

Pair = namedtuple("Pair", "left right")


class Mixer(nn.Module):
    """Every argument has a weight of its own, so that no two can be swapped unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.eval()

    def forward(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        /,
        c: Any = None,
        *rest: torch.Tensor,
        d: torch.Tensor | None = None,
        scale: float = 1.0,
        **named: Any,
    ) -> torch.Tensor:
        y = self.linear(a) + 2 * b
        for factor, one in enumerate(self.leaves((c, rest, d, named)), 3):
            y = y + factor * one
        return y * scale

    def leaves(self, value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict):
            return [leaf for key in sorted(value) for leaf in self.leaves(value[key])]
        return [leaf for item in value for leaf in self.leaves(item)] if isinstance(value, (tuple, list)) else []


CALLS = {
    "two": lambda: call(rows(), rows()),
    "keyword": lambda: call(rows(), rows(), c=rows(), d=rows()),
    "keyword, other order": lambda: call(rows(), rows(), d=rows(), c=rows()),
    "many": lambda: call(rows(), rows(), rows(), rows(), rows(), d=rows()),
    "named": lambda: call(rows(), rows(), zz=rows(), aa=rows(), d=rows()),
    "nested": lambda: call(
        rows(), rows(), {"z": rows(), "a": [rows(), (rows(), {"k": rows(), "b": rows()})]}, q=rows()
    ),
    "named tuple": lambda: call(rows(), rows(), Pair(right=rows(), left=rows())),
    "ordered dict": lambda: call(rows(), rows(), {"z": rows(), "b": rows()}, m=OrderedDict(z=rows(), a=rows())),
}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_reach_the_engine_in_its_order(bench: Bench, name: str) -> None:
    mixer = Mixer()
    twin = eager_twin(mixer)
    bench.tune(mixer, CALLS[name]())
    for _ in range(2):
        args, kwargs = CALLS[name]()
        check(mixer, twin, *args, **kwargs, engine=True)
        # The order of ``**named`` can be seen by a forward, so that may be another graph.
        check(mixer, twin, *args, **dict(reversed(kwargs.items())), engine=None if name == "named" else True)
        check(mixer, twin, *args, **kwargs, scale=1.0, engine=True)


@pytest.mark.parametrize("first", ["same", "different"])
def test_one_tensor_given_twice_is_not_mixed_up_with_two(bench: Bench, first: str) -> None:
    mixer = Mixer()
    twin = eager_twin(mixer)
    bench.tune(mixer, call(rows(), rows(), rows(), d=rows()))
    x = rows()
    same, different = (x, x, x), (rows(), rows(), rows())
    for args in (same, different, same) if first == "same" else (different, same, different):
        check(mixer, twin, *args, d=args[0] if args is same else rows(), engine=True)
    check(mixer, twin, x, rows(), x, d=rows(), engine=True)


def test_tuning_on_one_tensor_given_twice_serves_two(bench: Bench) -> None:
    mixer = Mixer()
    twin = eager_twin(mixer)
    x = rows()
    bench.tune(mixer, call(x, x))
    check(mixer, twin, rows(), rows(), engine=True)
    check(mixer, twin, x, x, engine=True)


UNSEEN = {
    "scalar": {"scale": 2.0},
    "integer for float": {"scale": 1},
    "none for tensor": {"d": None},
    "flag": {"flag": True},
    "opaque": {"thing": object()},
    "text": {"mode": "fast"},
    "other dtype": {"d": rows().double()},
    "other rank": {"d": torch.randn(1, 2, 4)},
    "sparse": {"extra": torch.eye(4).to_sparse()},
    "nan": {"scale": float("nan")},
    "list": {"many": [rows()]},
}


@pytest.mark.parametrize("name", UNSEEN)
def test_an_unseen_form_of_call_runs_eager_and_says_so_once(
    bench: Bench, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Tolerant(Mixer):
        def leaves(self, value: Any) -> list[torch.Tensor]:
            return [leaf.to_dense() for leaf in super().leaves(value) if leaf.shape[-2:] == (2, 4)]

    mixer = Tolerant()
    twin = eager_twin(mixer)
    bench.tune(mixer, call(rows(), rows(), d=rows()))
    caplog.clear()
    for _ in range(3):
        check(mixer, twin, rows(), rows(), **{"d": rows(), **UNSEEN[name]}, engine=False)
    assert len([record for record in caplog.records if "Said once" in record.message]) == 1
    (count,) = stats(mixer).eager_calls.values()
    assert count == 3
    check(mixer, twin, rows(), rows(), d=rows(), engine=True)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: x.repeat(2, 1)[::2],
        lambda x: x[:1].expand(2, 4),
        lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(2, 4),
        lambda x: torch.complex(x, -x).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "shifted", "lazily negated"],
)
def test_every_memory_layout_gives_the_right_answer(bench: Bench, view: Any) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    for _ in range(2):
        check(leaf, twin, view(rows()))
        check(leaf, twin, rows(), engine=True)


def test_several_graphs_keep_apart(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    gains = [0.5, 1.0, 2.0, 4.0]
    bench.tune(leaf, *(call(rows(), gain=gain) for gain in gains), *(call(rows(3), gain=gain) for gain in gains))
    assert len(patched(leaf).engines) == 4
    for gain in (*gains, *reversed(gains)):
        check(leaf, twin, rows(), gain=gain, engine=True)


def test_many_different_values_do_not_grow_the_plans(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    with torch.no_grad():
        for count in range(1100):
            leaf(rows(), gain=float(count + 2))
    dispatcher = patched(leaf)._dispatcher
    assert dispatcher is not None
    assert len(dispatcher._plans) <= 1024
    check(leaf, twin, rows(), engine=True)


# -- engines from the cache --------------------------------------------------------------------------------------------


def retaken(bench: Bench, leaf: nn.Module) -> None:
    """Tune once, then take the engine from the cache as another process would."""
    bench.tune(leaf, rows())
    untune(leaf)
    bench.session(leaf, min_samples=100)


def test_an_engine_from_the_cache_is_checked_at_its_first_call(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    retaken(bench, leaf)
    check(leaf, twin, rows(), engine=False)
    assert stats(leaf).eager_calls == {FIRST_CALL: 1}
    check(leaf, twin, rows(), engine=True)


def test_a_wrong_engine_from_the_cache_is_never_believed(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    untune(leaf)

    class Wrong(FrozenBackend):
        def load(self, request: Any) -> Any:
            engine = super().load(request)
            engine.frozen.scale = 1.01
            return engine

    bench.backend = Wrong()
    bench.session(leaf, min_samples=100)
    for _ in range(3):
        check(leaf, twin, rows(), engine=False)
    assert any("from the cache is wrong" in reason for reason in stats(leaf).eager_calls)


def test_an_engine_from_the_cache_that_does_not_load_is_recorded_anew(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    untune(leaf)

    class Unloadable(FrozenBackend):
        def load(self, request: Any) -> Any:
            raise EngineLoadError("not today")

    bench.backend = Unloadable()
    bench.session(leaf, min_samples=100)
    check(leaf, twin, rows(), engine=False)
    assert patched(leaf).state.value == "recording"


def test_an_output_that_shares_memory_is_a_tensor_of_its_own(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    x = rows()
    with torch.no_grad():
        first = leaf(x)
        second = leaf(x)
        first.add_(1)
    assert_same(second, twin(x).detach())


# -- values that an engine does not take -------------------------------------------------------------------------------


class ChoosyEngine(FrozenEngine):
    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if any(bool((leaf < 0).any()) for leaf in inputs):
            raise UnfitInputError("an input is negative")
        return super().__call__(inputs)


class Choosy(FrozenBackend):
    """Its engines take no negative numbers."""

    def load(self, request: Any) -> Any:
        return ChoosyEngine(request.module, request.engine)


def test_a_call_whose_values_an_engine_does_not_take_is_eagers_and_the_next_is_not(bench: Bench) -> None:
    bench.backend = Choosy()
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows().abs())
    for _ in range(2):
        check(leaf, twin, -rows().abs(), engine=False)
        check(leaf, twin, rows().abs(), engine=True)
    assert stats(leaf).eager_calls == {"the frozen engine does not take it: an input is negative": 2}


def test_an_engine_from_the_cache_is_not_judged_by_a_call_that_it_does_not_take(bench: Bench) -> None:
    bench.backend = Choosy()
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows().abs())
    untune(leaf)
    bench.session(leaf, min_samples=100)
    check(leaf, twin, -rows().abs(), engine=False)
    check(leaf, twin, rows().abs(), engine=False)
    check(leaf, twin, rows().abs(), engine=True)
    assert stats(leaf).eager_calls == {FIRST_CALL: 2}
