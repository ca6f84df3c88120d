"""Engines hold no weights: whatever way they are changed, the answer is that of the weights the module has now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_kit import BERT_SAMPLES, Tuned, answers, assert_same, bert_call, tiny_bert
from torch import nn

CALL = bert_call(2, 9)


def state_of(seed: int) -> dict[str, torch.Tensor]:
    return dict(tiny_bert(seed).state_dict())


def by_data(model: nn.Module) -> None:
    state = state_of(11)
    for name, parameter in model.named_parameters():
        parameter.data = state[name]


def by_assignment(model: nn.Module) -> None:
    model.load_state_dict(state_of(12), assign=True)


def by_copy(model: nn.Module) -> None:
    model.load_state_dict(state_of(13))


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8).add_(0.05)


def one_new_parameter(model: Any) -> None:
    model.encoder.layer[1].output.dense.weight = nn.Parameter(state_of(14)["encoder.layer.1.output.dense.weight"])


def to_bfloat16_and_back(model: nn.Module) -> None:
    model.to(torch.bfloat16)
    model.to(torch.float32)


@pytest.mark.parametrize(
    "change",
    [by_data, by_assignment, by_copy, in_place, one_new_parameter, to_bfloat16_and_back],
    ids=lambda c: c.__name__,
)
def test_the_engine_takes_up_changed_weights(change: Callable[[Any], None], bert: Tuned) -> None:
    before = bert.same(**CALL)["last_hidden_state"]
    bert.on_both(change)
    with answers(bert.module) as seen:
        for _ in range(2):
            after = bert.same(**CALL)["last_hidden_state"]
    assert not torch.equal(after, before)
    assert (seen.engines, seen.eager) == (2, {})


def test_another_dtype_runs_eager_until_it_is_back(bert: Tuned) -> None:
    bert.same(**CALL)
    bert.on_both(lambda model: model.to(torch.bfloat16))
    with answers(bert.module) as seen:
        out = bert.same(**CALL, atol=1e-6)
    assert out.last_hidden_state.dtype == torch.bfloat16
    assert (seen.engines, sum(seen.eager.values())) == (0, 1)
    assert "dtype" in seen.reasons
    bert.on_both(lambda model: model.to(torch.float32))
    with answers(bert.module) as seen:
        bert.same(**CALL)
    assert (seen.engines, seen.eager) == (1, {})


def test_weights_changed_between_two_calls_of_a_pipeline_are_seen(drawing: Any) -> None:
    before = drawing.same(32, 32)
    states = [copy.deepcopy(pipe.unet.state_dict()) for pipe in (drawing.pipe, drawing.twin)]
    other = {name: value * 1.1 for name, value in states[0].items()}
    try:
        for pipe in (drawing.pipe, drawing.twin):
            pipe.unet.load_state_dict({name: value.clone() for name, value in other.items()}, assign=True)
        with answers(drawing.pipe) as seen:
            changed = drawing.same(32, 32)
    finally:
        for pipe, state in zip((drawing.pipe, drawing.twin), states, strict=True):
            pipe.unet.load_state_dict(state)
    assert not torch.allclose(changed, before, atol=1e-3)
    assert (seen.engines, seen.eager) == (5, {})


def test_two_fine_tunes_share_one_engine_and_keep_their_own_answers(bert: Tuned, tune: Callable[..., Tuned]) -> None:
    other = tune(tiny_bert(seed=21), BERT_SAMPLES)
    assert (other.report.builds, other.report.loads) == (0, 1)
    with answers(other.module) as seen, answers(bert.module) as seen_first:
        ours, theirs = other.same(**CALL), bert.same(**CALL)
    assert (seen.engines, seen_first.engines) == (1, 1)
    assert not torch.allclose(ours.last_hidden_state, theirs.last_hidden_state, atol=1e-2)


def test_a_deep_copy_has_weights_of_its_own(bert: Tuned) -> None:
    bert.same(**CALL)
    copied = copy.deepcopy(bert.module)
    in_place(copied)
    in_place(twin := copy.deepcopy(bert.twin))
    with torch.no_grad():
        assert_same(copied(**CALL), twin(**CALL))
    with answers(bert.module) as seen:
        bert.same(**CALL)
    assert (seen.engines, seen.eager) == (1, {})
