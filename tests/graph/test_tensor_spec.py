"""Tensor specs: the shapes one input was seen with."""

from __future__ import annotations

import json

import pytest
import torch
from graph_strategies import tensors
from hypothesis import given
from hypothesis import strategies as st

from aitune_hf.graph.tensor_spec import TensorSpec


@given(tensor=tensors, data=st.data())
def test_a_spec_survives_json(tensor: torch.Tensor, data: st.DataObject) -> None:
    spec = TensorSpec.of(tensor)
    spec.update(data.draw(st.tuples(*[st.integers(0, 9)] * tensor.ndim)))
    assert TensorSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_bounds_widen_and_varying_axes_get_names() -> None:
    spec = TensorSpec.of(torch.zeros(2, 3, 4))
    assert spec.shape == [2, 3, 4]
    spec.update((1, 3, 7))
    spec.update((4, 3, 5))
    assert (spec.min_shape, spec.max_shape) == ([1, 3, 4], [4, 3, 7])
    assert spec.dynamic_axes == (0, 2)
    assert spec.shape == ["dim0", 3, "dim2"]
    spec.batch_axis = 0
    assert spec.shape == ["batch0", 3, "dim2"]


def test_another_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zip"):
        TensorSpec.of(torch.zeros(2)).update((1, 2))


def test_specs_match_by_rank_dtype_and_device_type() -> None:
    spec = TensorSpec.of(torch.zeros(2, 3))
    assert spec.matches(TensorSpec.of(torch.zeros(5, 1)))
    assert not spec.matches(TensorSpec.of(torch.zeros(2)))
    assert not spec.matches(TensorSpec.of(torch.zeros(2, 3, dtype=torch.float64)))
    assert not spec.matches(TensorSpec.of(torch.zeros(2, 3, device="meta")))


def test_a_scalar_has_no_axes() -> None:
    spec = TensorSpec.of(torch.tensor(1.0))
    assert (spec.rank, spec.shape, spec.max_shape) == (0, [], [])


def test_a_dtype_that_torch_does_not_have_is_refused() -> None:
    data = TensorSpec.of(torch.zeros(1)).to_dict() | {"dtype": "save"}
    with pytest.raises(ValueError, match="no dtype"):
        TensorSpec.from_dict(data)
