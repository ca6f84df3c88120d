"""Call keys: equal only for calls that an engine cannot tell apart."""

from __future__ import annotations

import enum
import itertools
import random
from collections import OrderedDict, UserDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from graph_strategies import DTYPES, Access, Level, Mode, Pair, calls, nested
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from aitune_hf.graph.call_key import call_key
from aitune_hf.graph.structure import flatten


def key(*args: Any, training: bool = False, **kwargs: Any) -> Any:
    return call_key(args, kwargs, training, [])


def account(value: Any) -> Any:
    """What a call is, worked out without care for speed."""
    if isinstance(value, torch.Tensor):
        stride = None if value.is_contiguous() else value.stride()
        return (
            "tensor",
            type(value.shape),
            value.shape,
            str(value.dtype),
            str(value.device),
            stride,
            value.requires_grad,
        )
    if isinstance(value, dict):
        return (type(value), [(type(at), at, account(child)) for at, child in value.items()])
    if isinstance(value, (tuple, list)):
        return (type(value), [account(child) for child in value])
    return (type(value), repr(value))


def renewed(value: Any) -> Any:
    """The same call of other objects."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (BaseModelOutput, UNet2DConditionOutput)):
        return type(value)(**{at: renewed(child) for at, child in value.items()})
    if isinstance(value, dict):
        return type(value)({at: renewed(child) for at, child in value.items()})
    if hasattr(value, "_fields"):
        return type(value)(*map(renewed, value))
    return type(value)(map(renewed, value)) if type(value) in (tuple, list) else value


@settings(max_examples=200)
@given(a=st.lists(nested, max_size=2), b=st.lists(nested, max_size=2), more=calls)
def test_keys_are_equal_exactly_when_calls_are(a: list[Any], b: list[Any], more: dict[str, Any]) -> None:
    assert (key(*a, **more) == key(*b, **more)) is (account(a) == account(b))
    assert (key(*a) == key(*b)) is (account(a) == account(b))


@settings(max_examples=100)
@given(args=st.lists(nested, max_size=2), kwargs=calls)
def test_a_key_can_be_found_again_with_other_objects(args: list[Any], kwargs: dict[str, Any]) -> None:
    first = key(*args, **kwargs)
    again = key(*renewed(args), **renewed(kwargs))
    assert first is not None
    assert {first: 1}[again] == 1


@given(args=st.lists(nested, max_size=2), kwargs=calls)
def test_tensors_are_listed_in_the_order_of_the_call(args: list[Any], kwargs: dict[str, Any]) -> None:
    tensors: list[torch.Tensor] = []
    call_key(tuple(args), kwargs, False, tensors)
    assert list(map(id, tensors)) == list(map(id, flatten((args, kwargs))[1]))


VALUES = [
    *(None, False, True, 0, 1, 2**64, 0.0, -0.0, 1.0, float("nan"), float("inf"), 0j, complex(0.0, -0.0), 1 + 0j),
    *("", "1", b"1", ..., torch.float32, torch.float64, torch.strided, torch.device("cpu"), torch.device("meta")),
    *(
        torch.device("cuda", 0),
        torch.device("cuda", 1),
        torch.Size([1]),
        (1,),
        [1],
        {0: 1},
        {"0": 1},
        OrderedDict({0: 1}),
    ),
    *((), [], {}, ((),), Pair(1, 1), (1, 1), [1, 1], slice(1), slice(1.0), slice(-0.0, 1), slice(0.0, 1), range(1)),
    *(Mode.FAST, Mode.EXACT, Level.LOW, Access(0), Access.READ, Access.READ | Access.WRITE, "first", {"first": 1}),
    *(BaseModelOutput(last_hidden_state=torch.zeros(1)), {"last_hidden_state": torch.zeros(1)}),
]


def test_values_that_are_not_the_same_have_other_keys() -> None:
    keys = [key(value) for value in VALUES]
    assert None not in keys
    assert [(VALUES[i], VALUES[j]) for i, j in itertools.combinations(range(len(keys)), 2) if keys[i] == keys[j]] == []


def test_flags_without_a_name_have_other_keys() -> None:
    class Kept(enum.IntFlag):
        A = 1

    assert len({key(flag) for flag in (Kept(0), Kept(8), Kept(4), Kept(12))}) == 4


def test_spellings_have_other_keys() -> None:
    x = torch.zeros(1)
    spellings = [
        key(x, x),
        key(x, y=x),
        key(x=x, y=x),
        key(y=x, x=x),
        key((x, x)),
        key([x, x]),
        key(x, (x,)),
        key("y", x),
    ]
    assert len(set(spellings)) == len(spellings)
    assert key(x, "a", 1) != key(x, a=1)


def _views() -> dict[str, Callable[[], torch.Tensor]]:
    base = torch.zeros(2, 3, 4, 4)
    wave = torch.zeros(2, 3, 4, 4, dtype=torch.complex64)
    return {
        "plain": lambda: base,
        "shape": lambda: base[:, :2].contiguous(),
        "rank": lambda: base[0],
        "flat": lambda: base.reshape(-1),
        "stride": lambda: base.transpose(2, 3),
        "channels_last": lambda: base.contiguous(memory_format=torch.channels_last),
        "expanded": lambda: base[:1].expand(2, 3, 4, 4),
        "sliced": lambda: torch.zeros(2, 3, 4, 12)[..., ::3],
        "double": lambda: base.double(),
        "meta": lambda: base.to("meta"),
        "grad": lambda: base.clone().requires_grad_(),
        "complex": lambda: wave,
        "conj": lambda: wave.conj(),
        "imag": lambda: wave.imag,
        "neg": lambda: wave.conj().imag,
        "complex_neg": lambda: torch._neg_view(wave),
        "neg_conj": lambda: torch._neg_view(wave).conj(),
        "scalar": lambda: torch.tensor(0.0),
        "empty": lambda: torch.zeros(0, 3, 4, 4),
    }


def test_tensors_that_an_engine_can_tell_apart_have_other_keys() -> None:
    keys = {name: key(make()) for name, make in _views().items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)
    assert {name: key(make()) for name, make in _views().items()} == keys


@given(dtype=st.sampled_from(DTYPES), other=st.sampled_from(DTYPES))
def test_every_dtype_has_its_own_key(dtype: torch.dtype, other: torch.dtype) -> None:
    assert (key(torch.zeros(2, dtype=dtype)) == key(torch.zeros(2, dtype=other))) is (dtype is other)


def test_a_parameter_is_a_tensor() -> None:
    x = torch.zeros(2)
    assert key(torch.nn.Parameter(x, requires_grad=False)) == key(x)


def test_the_same_tensor_twice_is_another_call() -> None:
    # A plan made for f(x, x) may read x twice, which is wrong for f(x, y).
    x, y, z = torch.zeros(2), torch.ones(2), torch.ones(2)
    forms = [key(x, y, z), key(x, x, z), key(x, y, x), key(x, y, y), key(x, x, x)]
    assert len(set(forms)) == len(forms)
    assert key(x, x, y) == key(y, y, z)
    assert key(x, a={"b": x}) != key(x, a={"b": y})


CONTEXTS: dict[str, list[Callable[[], Any]]] = {
    "no_grad": [torch.no_grad],
    "grad": [torch.enable_grad],
    "inference": [torch.inference_mode],
    "bfloat16": [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    "float16": [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.float16)],
}


def test_modes_have_other_keys() -> None:
    x = torch.zeros(2)
    keys = {}
    for name, managers in CONTEXTS.items():
        with ExitStack() as stack:
            for manager in managers:
                stack.enter_context(manager())
            keys[name], keys[f"{name}, training"] = key(x), key(x, training=True)
    assert len(set(keys.values())) == 2 * len(CONTEXTS)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        assert key(x) == keys["no_grad"]


def test_autocast_of_any_device_has_another_key() -> None:
    x = torch.zeros(2)
    plain, on_meta = key(x), key(x.to("meta"))
    torch.set_autocast_enabled("cuda", True)
    try:
        assert key(x) != plain
        assert key(x.to("meta")) != on_meta
    finally:
        torch.set_autocast_enabled("cuda", False)


class Marked(torch.Tensor):
    pass


class Loud(str):
    pass


def _with_note() -> Any:
    output = BaseModelOutput(last_hidden_state=torch.zeros(1))
    output.note = 1
    return output


def _endless() -> Any:
    endless: list[Any] = []
    endless.append(endless)
    return endless


OPAQUE: dict[str, Callable[[], Any]] = {
    "object": object,
    "function": lambda: len,
    "generator": lambda: random.Random(1),
    "set": lambda: {1},
    "user dict": lambda: UserDict(x=1),
    "str subclass": lambda: Loud("x"),
    "tensor key": lambda: {torch.zeros(1): 1},
    "float key": lambda: {0.0: 1},
    "bool key": lambda: {True: 1},
    "annotated output": _with_note,
    "endless": _endless,
    "slice of tensors": lambda: slice(torch.tensor(1)),
    "subclass": lambda: torch.zeros(1).as_subclass(Marked),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("make", OPAQUE.values(), ids=OPAQUE)
def test_what_no_engine_can_take_has_no_key(make: Callable[[], Any]) -> None:
    assert key(make()) is None
    assert key(torch.zeros(1), x=make()) is None
    assert key({"x": (make(),)}) is None


def test_mkldnn_tensors_have_no_key() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch is built without mkldnn")
    assert key(torch.zeros(2, 2).to_mkldnn()) is None
