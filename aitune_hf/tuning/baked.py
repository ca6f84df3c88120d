"""Engines that hold their weights: valid for exactly the weights they were made from."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from aitune_hf.backends.base import Engine
from aitune_hf.backends.constants import live_tensors
from aitune_hf.backends.weight_trace import WeightSample
from aitune_hf.errors import EngineLoadError

__all__ = ["BakedEngine", "WeightsDigest"]

#: Bytes that are copied to the host and hashed at a time.
_CHUNK = 1 << 24
#: Where hook libraries keep what they need around a forward, such as copies of weights by address.
_OF_HOOKS = frozenset({"_hf_hook", "_old_forward", "_diffusers_hook"})


@dataclass(frozen=True)
class _Known:
    """The digest of one tensor's bytes, and the state in which the tensor had them."""

    tensor: weakref.ref[torch.Tensor]
    state: tuple[int, int]
    digest: str


class WeightsDigest:
    """SHA-256 over the names, dtypes, shapes and bytes of all tensors of a module.

    Buffers that no checkpoint keeps, plain attributes, and tensors of helper objects take part too: an engine that holds
    its weights holds those as well. Tensors whose storage and version are as before are not read again. Does not keep the
    module alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._known: dict[str, _Known] = {}

    def digest(self) -> str:
        """64 hex digits.

        Raises:
            EngineLoadError: if the module is gone, or a weight has no bytes (it is on the meta device).
        """
        module = self._module()
        if module is None:
            raise EngineLoadError("the module of this engine no longer exists")
        whole, named = hashlib.sha256(), _all_tensors(module)
        for name, tensor in sorted(named.items()):
            whole.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0{self._of(name, tensor)}\n".encode())
        return whole.hexdigest()

    def forget(self) -> None:
        """Read every tensor again next time."""
        self._known.clear()

    def sample(self) -> WeightSample:
        """A few numbers of each tensor, as they are now."""
        module = self._module()
        return WeightSample([] if module is None else _all_tensors(module).values())

    def _of(self, name: str, tensor: torch.Tensor) -> str:
        try:
            if tensor.is_inference():
                return _bytes_digest(tensor)  # Edits of it leave no trace.
            state = tensor.data_ptr(), tensor._version
            known = self._known.get(name)
            if known is None or known.tensor() is not tensor or known.state != state:
                known = self._known[name] = _Known(weakref.ref(tensor), state, _bytes_digest(tensor))
        # NotImplementedError: from torch, of tensors that have no memory of their own to read (meta, some subclasses).
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise EngineLoadError(f"the bytes of {name} ({type(tensor).__name__}) cannot be read: {error}") from error
        return known.digest


def _all_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that a constant of an engine can have been, by name."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for path, tensor in live_tensors(module):
        if _OF_HOOKS.isdisjoint(path):
            named.setdefault(".".join(map(str, path)), tensor)
    return named


def _bytes_digest(tensor: torch.Tensor) -> str:
    hasher = hashlib.sha256()
    for chunk in _chunks(tensor.detach()):
        hasher.update(chunk.numpy().data)
    return hasher.hexdigest()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's bytes in the order of its elements, a part at a time, on the host."""
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        flat = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _CHUNK):
            yield flat[start : start + _CHUNK].cpu()
    elif tensor.dim() and tensor.numel() * tensor.element_size() > _CHUNK:
        for row in tensor:
            yield from _chunks(row)
    else:
        yield tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


class BakedEngine:
    """An engine with weights of its own. It may run only while the module's weights are those it was made from."""

    def __init__(self, engine: Engine, weights: WeightsDigest, expected: str) -> None:
        """Wrap ``engine``.

        Args:
            weights: of the module it stands for.
            expected: digest of the weights in it.

        Raises:
            EngineLoadError: if the module's weights are others.
        """
        self._engine = engine
        self._weights = weights
        self._expected = expected
        self._sample: WeightSample | None = None
        self._compare()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        if self._sample is None or self._sample.changed():  # Edits through `.data` leave no other trace.
            self.rebind()
        return self._engine(inputs)

    def rebind(self) -> None:
        """Do nothing if the module's weights are those in the engine, wherever they lie. Reads all of them.

        Raises:
            EngineLoadError: if they are not.
        """
        self._weights.forget()
        with suppress(EngineLoadError):  # It may look at weights too, where they were. If it cannot, its calls say so.
            self._engine.rebind()
        self._compare()

    def close(self) -> None:
        """Let go of the engine."""
        self._sample = None
        self._engine.close()

    def _compare(self) -> None:
        self._sample = None
        sample = self._weights.sample()
        if self._weights.digest() != self._expected:
            raise EngineLoadError("they are part of the engine, and these are others; tune again to use the new ones")
        self._sample = sample
