"""Whether tensors are still where they were, and hold what they held.

``tensor._version`` does not tell: an edit through ``.data``, as adapters are merged with, leaves it as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from aitune_hf.backends.constants import memory_key

__all__ = ["WeightSample", "trace_of"]

#: Words of 8 bytes that are added up before anything is hashed: adding runs as fast as memory does.
_BLOCK = 512
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def trace_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What is equal later on if, and only if, each tensor is the same memory with the same values.

    Values that were exchanged within one block of 4 kB may go unseen; any other edit does not.
    """
    return {name: (memory_key(tensor), _sums(tensor)) for name, tensor in tensors.items()}


class WeightSample:
    """A few numbers of each tensor, the corners, as they are now; cheap enough to be compared at every call.

    It sees what changes whole tensors, such as an adapter that is merged, and not an edit of a single row.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # Views of the tensors' memory, which they keep.
        self._corners = [_corners(tensor.detach()) for tensor in tensors if tensor.numel()]
        self._seen = self._read()

    def changed(self) -> bool:
        """True if any of the numbers is another one by now."""
        return self._read() != self._seen

    def _read(self) -> bytes:
        return np.concatenate(self._corners, axis=None).tobytes() if self._corners else b""


def _corners(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    steps = tuple(slice(None, None, max(1, size - 1)) for size in tensor.shape)
    array: np.ndarray[Any, Any] = tensor[steps].view(_WORDS[tensor.element_size()]).numpy()
    return array


def _sums(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    whole = words.size // _BLOCK * _BLOCK
    sums = words[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.uint64)
    found = hashlib.sha256(sums.tobytes())
    found.update(raw[whole * 8 :].tobytes())
    return found.hexdigest()
