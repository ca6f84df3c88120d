"""The trace of tensors: the same for the same memory and values, another one for any edit."""

from __future__ import annotations

import pytest
import torch

from aitune_hf.backends.weight_trace import WeightSample, trace_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (1024,), (37, 129), (0, 4)])
def test_any_edit_is_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    before = trace_of({"w": tensor})
    assert trace_of({"w": tensor}) == before
    for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else set():
        tensor.data.view(-1)[place] = 0
        assert trace_of({"w": tensor}) != before
        tensor.data.view(-1)[place] = 1
        assert trace_of({"w": tensor}) == before


def test_other_memory_is_seen() -> None:
    tensor = torch.randn(100, 100)
    before = trace_of({"w": tensor})
    assert trace_of({"w": tensor.clone()}) != before
    assert trace_of({"w": tensor.t()}) != before


def test_rows_that_change_places_are_seen() -> None:
    tensor = torch.randn(16, 2048)
    before = trace_of({"w": tensor})
    tensor.copy_(tensor.flip(0))
    assert trace_of({"w": tensor}) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("other", [-1, 2, 0])
@pytest.mark.parametrize("width", [1, 2, 8, 100])
def test_values_that_change_places_are_seen(dtype: torch.dtype, other: int, width: int) -> None:
    """However alike their bits are, and however near their places."""
    tensor = torch.ones(6000, dtype=dtype)
    tensor[1000 : 1000 + width] = other
    before = trace_of({"w": tensor})
    for place in (0, 1000 - width, 1000 + width, 1000 + 3 * width, 5000):
        moved = tensor.clone()
        moved[1000 : 1000 + width] = tensor[place : place + width]
        moved[place : place + width] = other
        kept = tensor.clone()
        tensor.copy_(moved)
        assert trace_of({"w": tensor}) != before
        tensor.copy_(kept)
    assert trace_of({"w": tensor}) == before


def test_a_sample_sees_what_changes_whole_tensors() -> None:
    """Whatever their type and layout."""
    tensors = [
        torch.randn(5, 6).t(),
        torch.randn(7, 9)[1:6, 2:5],
        torch.randn(4, 1).expand(4, 3).contiguous()[:, :1],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3),
        torch.tensor(2.0),
        torch.full((2, 2, 2), torch.nan),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.nn.Parameter(torch.arange(12.0).reshape(3, 4)),
        torch.ones(3, 5, dtype=torch.complex64).t(),
        torch.ones(5, dtype=torch.complex128),
    ]
    sample = WeightSample(tensors)
    assert not sample.changed()
    for tensor in tensors:
        if tensor.numel():
            kept = tensor.detach().clone()
            tensor.data.fill_(7)
            if tensor.dtype == torch.bool:
                tensor.data.fill_(0)
            assert sample.changed()
            tensor.data.copy_(kept)
            assert not sample.changed()
    assert not WeightSample([]).changed()


def test_a_sample_leaves_out_what_is_not_plain_memory() -> None:
    complex_numbers = torch.ones(3, dtype=torch.complex64).conj()
    assert not WeightSample([torch.eye(3).to_sparse(), complex_numbers, complex_numbers.imag]).changed()
