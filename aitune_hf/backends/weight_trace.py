"""Whether tensors are still where they were, and hold what they held.

``tensor._version`` does not tell: an edit through ``.data``, as adapters are merged with, leaves it as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from aitune_hf.backends.constants import memory_key

__all__ = ["WeightSample", "trace_of"]

#: Words of 8 bytes that are added up before anything is hashed: adding runs about as fast as memory does.
_BLOCK = 512
#: Blocks that are added up at a time, so that what is computed meanwhile stays in the processor's cache.
_BLOCKS = 256
#: Random numbers, which tell a block's places apart. Odd, so that each bit of a word reaches the sum.
_PLACES = np.random.Generator(np.random.PCG64(0)).integers(1 << 63, size=(2, _BLOCK), dtype=np.uint64) * 2 + 1
_HALF = np.uint64(32)
_FEW = 4
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def trace_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What is equal later on if, and only if, each tensor is the same memory with the same values."""
    return {name: (memory_key(tensor), _sums(tensor)) for name, tensor in tensors.items()}


class WeightSample:
    """A few numbers of each tensor, as they are now; so few that they can be compared at every call (0.1 µs a tensor).

    It sees what changes whole tensors, such as an adapter that is merged, and not an edit of a single row.

    It leaves out tensors that are not plain memory, and what lies in the memory of an accelerator: to read a number from
    there is to wait for all work that is queued, which costs a call more than most engines gain. So there edits through
    ``.data`` are not seen from call to call. Engines look at all of their weights when they are told to rebind.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # Views of the tensors' memory, which they keep.
        self._few = [_few(tensor.detach()) for tensor in tensors if tensor.numel() and _is_readable(tensor)]
        self._seen = self._read()

    def changed(self) -> bool:
        """True if any of the numbers is another one by now."""
        return self._read() != self._seen

    def _read(self) -> bytes:
        return np.concatenate(self._few).tobytes() if self._few else b""


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg() and not tensor.is_quantized


def _few(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A handful of numbers from the start of a tensor to its end, as bits: a view."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span == tensor.numel():
        line = tensor.as_strided((span,), (1,))
    else:  # Between its numbers lie those of others.
        longest = max(range(tensor.dim()), key=lambda axis: tensor.shape[axis])
        line = tensor[tuple(slice(None) if axis == longest else 0 for axis in range(tensor.dim()))]
    if line.is_complex():
        line = torch.view_as_real(line)[:, 0]
    step = max(1, (line.numel() - 1) // (_FEW - 1))
    array: np.ndarray[Any, Any] = line[::step].view(_WORDS[line.element_size()]).numpy()
    return array


def _sums(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    whole = words.size // _BLOCK * _BLOCK
    found = hashlib.sha256()
    rows = words[:whole].reshape(-1, _BLOCK)
    for start in range(0, len(rows), _BLOCKS):
        part = rows[start : start + _BLOCKS]
        # The second term, so that what only differs in the highest bits, such as signs, cannot change places unseen.
        found.update((part @ _PLACES[0] + (part >> _HALF) @ _PLACES[1]).tobytes())
    found.update(raw[whole * 8 :].tobytes())
    return found.hexdigest()
