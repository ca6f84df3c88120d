"""Signatures: calls bound as Python binds them, and spelled out again."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_strategies import Access, Mode, arguments, same, signatures, values
from hypothesis import given, settings
from hypothesis import strategies as st

from aitune_hf.errors import UntunableError
from aitune_hf.graph.forward_signature import ForwardSignature, OpaqueDefault, Parameter


@settings(max_examples=300)
@given(data=st.data(), function=signatures())
def test_bind_gives_what_python_gives_and_unbind_gives_it_back(
    data: st.DataObject, function: Callable[..., dict[str, Any]]
) -> None:
    args, kwargs = data.draw(arguments(function))
    signature = ForwardSignature.from_callable(function)
    try:
        received = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            signature.bind(args, kwargs)
        return
    bound = signature.bind(args, kwargs)
    assert list(bound) == list(inspect.signature(function).parameters)
    assert same({name: bound[name] for name in received}, received)
    args_again, kwargs_again = signature.unbind(bound)
    assert same(function(*args_again, **kwargs_again), received)
    assert same(signature.bind(args_again, kwargs_again), bound)


@given(function=signatures())
def test_a_signature_survives_json(function: Callable[..., Any]) -> None:
    signature = ForwardSignature.from_callable(function)
    again = ForwardSignature.from_dict(json.loads(json.dumps(signature.to_dict())))
    assert again == signature or any(isinstance(p.default, tuple) for p in signature.parameters)
    assert again.to_dict() == signature.to_dict()
    assert [p.name for p in again.as_inspect.parameters.values()] == [p.name for p in signature.parameters]


@given(value=values)
def test_a_default_survives_json(value: Any) -> None:
    parameter = Parameter("x", "KEYWORD_ONLY", True, value)
    assert Parameter.from_dict(json.loads(json.dumps(parameter.to_dict()))) == parameter


@pytest.mark.parametrize(("a", "b"), [(1, True), (1, 1.0), (0.0, -0.0), (None, False), (Access.READ, Mode.FAST)])
def test_parameters_differ_by_the_type_of_their_default(a: Any, b: Any) -> None:
    assert Parameter("x", "KEYWORD_ONLY", True, a) != Parameter("x", "KEYWORD_ONLY", True, b)


def test_parameters_with_and_without_a_default_differ() -> None:
    assert Parameter("x", "KEYWORD_ONLY") != Parameter("x", "KEYWORD_ONLY", True, None)
    assert len({Parameter("x", "KEYWORD_ONLY"), Parameter("x", "KEYWORD_ONLY")}) == 1


def test_a_default_that_is_no_plain_value_is_kept_by_name() -> None:
    def forward(x: Any = torch.zeros(2)) -> None:  # noqa: B008
        pass

    signature = ForwardSignature.from_callable(forward)
    read = ForwardSignature.from_dict(json.loads(json.dumps(signature.to_dict())))
    assert read.parameters[0].default == OpaqueDefault("Tensor")
    assert read.to_dict() == signature.to_dict()


def test_unbind_leaves_defaults_out_for_decorators_that_look_at_keywords() -> None:
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return kwargs.pop("return_dict", "from the config"), function(*args, **kwargs)

        return wrapper

    @decorated
    def forward(x: Any, y: Any = None, return_dict: Any = None) -> Any:
        return x, y, return_dict

    signature = ForwardSignature.from_callable(forward)
    args, kwargs = signature.unbind(signature.bind((1,), {"y": 2}))
    assert forward(*args, **kwargs) == forward(1, y=2) == ("from the config", (1, 2, None))
    args, kwargs = signature.unbind(signature.bind((1, 2, False), {}))
    assert forward(*args, **kwargs) == (False, (1, 2, None))


def test_unbind_keeps_what_only_looks_like_the_default() -> None:
    def forward(a: Any = 1, b: Any = 0.0, device: Any = torch.device("cuda", 0)) -> None:  # noqa: B008
        pass

    signature = ForwardSignature.from_callable(forward)
    call = {"a": True, "b": -0.0, "device": torch.device("cuda", 1)}
    assert same(signature.unbind(signature.bind((), call)), ((), call))


def test_a_callable_without_signature_is_untunable() -> None:
    with pytest.raises(UntunableError, match="signature"):
        ForwardSignature.from_callable(dict)
