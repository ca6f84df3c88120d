"""Random values, tensors, nested structures and signatures for the tests of this folder."""

from __future__ import annotations

import enum
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Style(str, enum.Enum):
    PLAIN = "plain"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    first: Any
    second: Any


atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]),
    st.complex_numbers(),
    st.text(max_size=4),
    st.binary(max_size=3),
    st.sampled_from([*Mode, *Level, *Style, Access(0), Access.READ, Access.READ | Access.WRITE]),
    st.sampled_from([torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), ..., torch.Size([2, 3])]),
    st.builds(range, st.integers(0, 5), st.integers(0, 5)),
)
values = st.one_of(atoms, st.builds(slice, atoms, atoms, atoms))


def make_tensor(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


tensors = st.builds(make_tensor, st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES))
keys = st.one_of(st.text(max_size=4), st.integers(-3, 3))
names = st.sampled_from(["a", "b", "hidden", "mask", "scale", "t"])


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(keys, children, max_size=2).map(OrderedDict),
        st.builds(Pair, children, children),
        st.builds(BaseModelOutput, last_hidden_state=tensors, hidden_states=st.lists(tensors, max_size=2).map(tuple)),
        st.builds(UNet2DConditionOutput, sample=tensors),
    )


nested = st.recursive(st.one_of(tensors, values), _containers, max_leaves=6)
calls = st.dictionaries(names, nested, min_size=1, max_size=4)


def same(a: Any, b: Any) -> bool:
    """The same classes, tensors (by identity), key order and values, bit for bit."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@st.composite
def signatures(draw: st.DrawFn) -> Callable[..., dict[str, Any]]:
    """A Python function of random parameters of all five kinds, which returns what it receives."""
    count = draw(st.tuples(*[st.integers(0, 2)] * 3))
    pool = iter(["p0", "p1", "q0", "q1", "k0", "k1"])
    groups: list[list[str]] = []
    defaults_from_here = False
    for position, number in enumerate(count):
        group = []
        for _ in range(number):
            name = next(pool)
            keyword_only = position == 2
            has_default = draw(st.booleans()) or (defaults_from_here and not keyword_only)
            defaults_from_here |= has_default
            group.append(f"{name}={draw(st.sampled_from(['None', '1', 'True', '0.5', '()']))}" if has_default else name)
        groups.append(group)
    parts = groups[0] + (["/"] if groups[0] else []) + groups[1]
    star = draw(st.booleans())
    if star or groups[2]:
        parts.append("*rest" if star else "*")
    parts += groups[2]
    if draw(st.booleans()):
        parts.append("**more")
    namespace: dict[str, Any] = {}
    exec(f"def forward({', '.join(parts)}):\n    return dict(locals())", namespace)
    function: Callable[..., dict[str, Any]] = namespace["forward"]
    return function


@st.composite
def arguments(draw: st.DrawFn, function: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of which most fit ``function``."""
    value = st.one_of(st.integers(0, 3), st.sampled_from([None, True, 1, 0.5, ()]))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_name = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += draw(st.lists(value, max_size=0 if by_name else 2))
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= draw(
                st.dictionaries(st.sampled_from(["x", "y", "p0", "rest", "more", "self"]), value, max_size=2)
            )
        elif parameter.default is not parameter.empty and draw(st.booleans()):
            by_name = True
        elif parameter.kind is parameter.KEYWORD_ONLY or (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD and (by_name or draw(st.booleans()))
        ):
            by_name = True
            kwargs[name] = draw(value)
        else:
            args.append(draw(value))
    names = draw(st.permutations(list(kwargs)))
    return tuple(args), {name: kwargs[name] for name in names}
