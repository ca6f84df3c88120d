"""Nested structures: taken apart and put together exactly, or not taken apart at all."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import warnings
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from graph_strategies import Mode, Pair, nested, same
from hypothesis import given
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from aitune_hf.errors import UntunableError
from aitune_hf.graph.structure import Node, describe, flatten, unflattener

X, Y = torch.zeros(1), torch.ones(2)


def through_json(node: Node) -> Node:
    return Node.from_json(json.loads(json.dumps(node.to_json(), allow_nan=False)))


@given(value=nested)
def test_what_is_taken_apart_can_be_put_together(value: Any) -> None:
    node, tensors = flatten(value)
    assert same(unflattener(node)(tensors), value)
    assert len(tensors) == sum(leaf.kind == "tensor" for _, leaf in node.leaves())


@given(value=nested)
def test_a_node_survives_json_and_still_builds(value: Any) -> None:
    node, tensors = flatten(value)
    read = through_json(node)
    assert read == node
    assert hash(read) == hash(node)
    assert read.to_json() == node.to_json()
    if not any(name in json.dumps(read.to_json()) for name in ('"0"]', "READ|WRITE")):  # No members of their own.
        assert same(unflattener(read)(tensors), value)


@given(value=nested)
def test_locators_lead_to_the_leaves(value: Any) -> None:
    node, tensors = flatten(value)
    found = [place.get(value) for place, leaf in node.leaves() if leaf.kind == "tensor"]
    assert all(map(same, found, tensors))


@pytest.mark.parametrize(
    "output",
    [
        BaseModelOutput(last_hidden_state=X),
        BaseModelOutput(last_hidden_state=X, attentions=(Y, X)),
        BaseModelOutput(attentions=(X,)),
        BaseModelOutputWithPooling(last_hidden_state=X, pooler_output=Y, hidden_states=(X, Y)),
        UNet2DConditionOutput(sample=X),
        Pair(X, Pair(Y, None)),
        OrderedDict(b=X, a=Y),
        torch.nn.Parameter(X),
    ],
    ids=lambda output: type(output).__name__,
)
def test_outputs_come_back_with_their_class(output: Any) -> None:
    node, tensors = flatten(output)
    assert all(leaf.kind != "opaque" for _, leaf in node.leaves())
    for built in (unflattener(node)(tensors), unflattener(through_json(node))(tensors)):
        assert type(built) is type(output)
        assert same(built, output)
        assert vars(built).keys() == vars(output).keys() if hasattr(output, "__dict__") else True


def test_keys_keep_their_order() -> None:
    node, tensors = flatten({"logits": X, "aux": Y})
    assert list(unflattener(through_json(node))(tensors)) == ["logits", "aux"]
    assert [str(place) for place, _ in node.leaves()] == ["logits", "aux"]
    assert tensors[0] is X


def test_integer_and_string_keys_are_not_mixed_up() -> None:
    node, tensors = flatten({0: X, "0": Y})
    assert same(unflattener(through_json(node))(tensors), {0: X, "0": Y})


@pytest.mark.parametrize(("a", "b"), [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({"a": 1}, {"a": True})])
def test_nodes_differ_by_the_type_of_a_value(a: Any, b: Any) -> None:
    assert describe(a) != describe(b)
    assert describe((X, a)) != describe((X, b))


def test_not_a_number_is_one_node() -> None:
    assert describe(float("nan")) == describe(float("nan"))
    assert describe(X) != "tensor"


class Features(dict[str, Any]):
    pass


class Stateful(dict[str, Any]):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state = object()


class Picky(NamedTuple):
    x: Any


class Renamed(Picky):
    def __new__(cls, x: Any, y: Any) -> Renamed:
        return super().__new__(cls, x)


def _with_attribute(value: Any) -> Any:
    value.note = object()
    return value


def _out_of_step() -> Any:
    output = BaseModelOutput(last_hidden_state=X, attentions=(Y,))
    output.attentions = None  # The key stays.
    return output


def _with_extra_key() -> Any:
    output = BaseModelOutput(last_hidden_state=X)
    output["extra"] = Y
    return output


@dataclasses.dataclass
class Plain:
    x: Any


@pytest.mark.parametrize(
    "thing",
    [
        _with_attribute(Features(x=X)),
        Stateful({"x": X}),
        _with_attribute(BaseModelOutput(last_hidden_state=X)),
        _out_of_step(),
        _with_extra_key(),
        _with_attribute(OrderedDict(x=X)),
        defaultdict(list, x=X),
        UserDict(x=X),
        BatchEncoding({"input_ids": X}),
        types.MappingProxyType({"x": X}),
        Renamed(X, Y),
        Plain(X),
        {1.0: X},
        {True: X},
        {("a",): X},
        {X},
        object(),
        torch.max(torch.ones(2, 2), 0),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_more_than_its_children_is_opaque(thing: Any) -> None:
    node, tensors = flatten((X, thing))
    assert node.children[1].kind == "opaque"
    assert len(tensors) == 1
    with pytest.raises(UntunableError, match="cannot be rebuilt"):
        unflattener(node)
    with pytest.raises(UntunableError, match="cannot be rebuilt"):
        unflattener(through_json(node))


def test_a_dict_subclass_without_state_is_a_container() -> None:
    node, tensors = flatten(Features(b=X, a=Y))
    built = unflattener(through_json(node))(tensors)
    assert type(built) is Features
    assert same(built, Features(b=X, a=Y))


class Marked(torch.Tensor):
    pass


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([X, Y])


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


UNUSUAL = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": _nested,
    "quantized": _quantized,
    "subclass": lambda: torch.ones(2).as_subclass(Marked),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_a_tensor_that_is_more_than_numbers_in_a_block_is_opaque(make: Any) -> None:
    node, tensors = flatten({"x": make()})
    assert node.children[0].kind == "opaque"
    assert tensors == []


def test_stand_ins_of_tensors_while_tracing_are_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert describe(torch.ones(2)).kind == "tensor"


def test_a_structure_that_contains_itself_is_opaque() -> None:
    endless: list[Any] = [X]
    endless.append(endless)
    node, tensors = flatten(endless)
    assert node.kind == "opaque"
    assert tensors == []


def test_a_class_that_is_not_imported_is_never_imported_for_a_file(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "their_outputs.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind, keys in (("output", ["x"]), ("namedtuple", ["x"]), ("dict", ["x"])):
        data = {"kind": kind, "type": "their_outputs:Out", "keys": keys, "children": [{"kind": "tensor"}]}
        with pytest.raises(UntunableError, match="their_outputs:Out"):
            unflattener(Node.from_json(data))
    assert "their_outputs" not in sys.modules


def test_a_lazy_module_is_not_asked_for_a_class(monkeypatch: Any) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, "lazy_outputs", Lazy("lazy_outputs"))
    data = {"kind": "output", "type": "lazy_outputs:Out.Inner", "keys": ["x"], "children": [{"kind": "tensor"}]}
    with pytest.raises(UntunableError, match=r"lazy_outputs:Out\.Inner"):
        unflattener(Node.from_json(data))


@pytest.mark.parametrize(
    ("kind", "type_name", "keys"),
    [
        ("output", "subprocess:Popen", ["args"]),
        ("output", "transformers.modeling_outputs:BaseModelOutput", ["not_a_field"]),
        ("namedtuple", f"{Pair.__module__}:Pair", ["second", "first"]),
        ("namedtuple", "builtins:tuple", ["x"]),
        ("dict", "os:environ", ["x"]),
        ("dict", "collections:UserDict", ["x"]),
        ("output", "", ["x"]),
    ],
)
def test_a_class_that_does_not_fit_is_refused(kind: str, type_name: str, keys: list[str]) -> None:
    children = [{"kind": "tensor"}] * len(keys)
    with pytest.raises(UntunableError, match="not the one recorded"):
        unflattener(Node.from_json({"kind": kind, "type": type_name, "keys": keys, "children": children}))


def test_an_enum_read_from_a_file_is_built_as_the_member() -> None:
    node = through_json(describe({"mode": Mode.EXACT, "s": slice(Mode.FAST, 1)}))
    built = unflattener(node)([])
    assert built["mode"] is Mode.EXACT
    assert built["s"].start is Mode.FAST


def test_an_enum_that_is_gone_cannot_be_built() -> None:
    data = {"kind": "value", "value": {"t": "enum", "v": [f"{Mode.__module__}:Mode", "GONE"]}}
    with pytest.raises(UntunableError, match="GONE"):
        unflattener(Node("tuple", children=(Node.from_json(data),)))
