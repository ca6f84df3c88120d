"""The samples a user gives to ``tune``, as calls of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from aitune_hf.errors import SampleError

__all__ = ["driver", "generators_restored", "sample_list"]


def sample_list(samples: Any) -> list[Any]:
    """The samples as a list; a single prompt, dict or callable is a list of one.

    Raises:
        SampleError: if there is none, or it is nothing that can be run.
    """
    if isinstance(samples, (str, Mapping, torch.Tensor)) or callable(samples):
        return [samples]
    if samples is None or not isinstance(samples, Iterable):
        raise SampleError(f"tune takes a list of samples, got {type(samples).__name__}")
    found = list(samples)
    if not found:
        raise SampleError("tune needs at least one sample: a prompt, a dict of call arguments, or a callable")
    return found


def driver(target: Callable[..., Any], call_kwargs: Mapping[str, Any]) -> Callable[[Any], object]:
    """A function that runs ``target`` on one sample.

    A dict holds keyword arguments, a tuple ``(args, kwargs)`` a whole call, a callable drives the target itself;
    anything else is the target's first argument. ``call_kwargs`` are given to every call; the sample's own win.
    Random generators among the arguments are as before afterwards, so that each run of a sample draws the same numbers.
    """

    def drive(sample: Any) -> object:
        with generators_restored(sample, call_kwargs):
            return run(sample)

    def run(sample: Any) -> object:
        if callable(sample) and not isinstance(sample, torch.nn.Module):
            return sample(target)
        if isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[1], Mapping):
            args = sample[0] if isinstance(sample[0], (tuple, list)) else (sample[0],)
            return target(*args, **{**call_kwargs, **sample[1]})
        if isinstance(sample, Mapping):
            return target(**{**call_kwargs, **sample})
        return target(sample, **call_kwargs)

    return drive


@contextmanager
def generators_restored(*values: Any) -> Iterator[None]:
    """Random generators anywhere within ``values`` have their state back afterwards."""
    states = [(generator, generator.get_state()) for generator in _generators(values)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _generators(value: Any) -> Iterator[torch.Generator]:
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _generators(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _generators(child)
