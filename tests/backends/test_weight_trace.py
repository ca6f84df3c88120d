"""The trace of tensors: the same for the same memory and values, another one for any edit."""

from __future__ import annotations

import pytest
import torch

from aitune_hf.backends.weight_trace import trace_of


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
