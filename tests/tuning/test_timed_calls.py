"""Calls to time with: the shapes that matter, and inputs that take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.sample_store import Sample, SampleStore
from aitune_hf.graph.structure import flatten
from aitune_hf.tuning import timed_calls
from aitune_hf.tuning.timed_calls import rotated_samples, rotating, timed_shapes


def forward(x: torch.Tensor) -> torch.Tensor:
    return x


SIGNATURE = ForwardSignature.from_callable(forward)


def sample(x: torch.Tensor) -> Sample:
    node, leaves = flatten(SIGNATURE.bind((x,), {}))
    out_node, out_leaves = flatten(x)
    context = CallContext(training=False, needs_grad=False)
    return Sample(inputs=leaves, input_node=node, outputs=out_leaves, output_node=out_node, context=context)


def store_of(*tensors: torch.Tensor) -> SampleStore:
    store = SampleStore()
    for x in tensors:
        one = sample(x)
        store.wants(one.shapes)
        store.add(one)
    return store


def all_fit(shapes: Any) -> bool:
    return True


def test_the_most_frequent_shapes_and_the_largest_are_timed() -> None:
    store = store_of(*[torch.ones(rows) for rows in (2, 2, 2, 3, 3, 3, 4, 4, 9)])
    assert timed_shapes(store, all_fit) == [((2,),), ((3,),), ((9,),)]
    assert timed_shapes(store, lambda shapes: shapes != ((9,),)) == [((2,),), ((3,),), ((4,),)]
    assert timed_shapes(store, lambda shapes: False) == []


def values_seen(samples: list[Sample], runs: int) -> list[tuple[float, int]]:
    seen: list[tuple[float, int]] = []
    run = rotating(samples, SIGNATURE, lambda args, kwargs: seen.append(_value_and_place(args, kwargs)))
    for _ in range(runs):
        run()
    return seen


def _value_and_place(args: Any, kwargs: Any) -> tuple[float, int]:
    x = (*args, *kwargs.values())[0]
    return float(x[0]), x.data_ptr()


def test_recorded_samples_take_turns() -> None:
    store = store_of(torch.full((2,), 1.0), torch.full((2,), 2.0), torch.full((3,), 3.0))
    values = [value for value, _ in values_seen(rotated_samples(store, ((2,),)), 4)]
    assert values == [1.0, 2.0, 1.0, 2.0]


def test_a_single_sample_takes_turns_with_its_copies() -> None:
    seen = values_seen(rotated_samples(store_of(torch.full((2,), 1.0)), ((2,),)), 8)
    assert {value for value, _ in seen} == {1.0}
    assert len({place for _, place in seen}) == timed_calls.MAX_ROTATED


def test_copies_stay_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_calls, "MAX_ROTATED_BYTES", 20)
    # Of eight bytes each: two fit. One that is larger than all that is allowed is used alone.
    assert len(rotated_samples(store_of(torch.ones(2)), ((2,),))) == 2
    assert len(rotated_samples(store_of(torch.ones(2), torch.zeros(2), torch.ones(2)), ((2,),))) == 2
    assert len(rotated_samples(store_of(torch.ones(9)), ((9,),))) == 1
