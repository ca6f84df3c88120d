"""Graphs: what makes two calls one graph, the shapes of a graph, and batches made from a call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_strategies import DTYPES, Pair, calls, nested
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from aitune_hf.errors import ConfigError, UntunableError
from aitune_hf.graph import (
    BatchDim,
    CallContext,
    DynamicDim,
    DynamicShapes,
    ForwardSignature,
    GraphSpec,
    Locator,
    SampleMetadata,
)
from aitune_hf.graph.graph_spec import graph_identity
from aitune_hf.graph.structure import flatten

CONTEXT = CallContext()


def identity_of(value: Any, context: CallContext = CONTEXT) -> str:
    return graph_identity(SampleMetadata.of(value), context)


def spec_of(forward: Callable[..., Any], *args: Any, shapes: DynamicShapes | None = None, **kwargs: Any) -> GraphSpec:
    signature = ForwardSignature.from_callable(forward)
    inputs = SampleMetadata.of(signature.bind(args, kwargs))
    return GraphSpec(
        "graph0", inputs, SampleMetadata.of(forward(*args, **kwargs)), signature, shapes or DynamicShapes()
    )


def also_seen(spec: GraphSpec, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    inputs = SampleMetadata.of(spec.forward_signature.bind(args, kwargs))
    spec.update_shapes_seen(inputs, SampleMetadata.of(forward(*args, **kwargs)))


def unet(sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor | None = None, scale: float = 1.0) -> Any:
    """Its sample has two rows per item of ``timestep``."""
    return BaseModelOutput(last_hidden_state=sample * scale)


def call_of(items: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    sample = torch.arange(2 * items, dtype=torch.float32).reshape(-1, 1, 1).expand(2 * items, 3, size)
    return sample.contiguous(), torch.arange(items)


# Identity


def _resized(value: Any, size: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.new_zeros([size] * value.ndim)
    if isinstance(value, BaseModelOutput):
        return type(value)(**{key: _resized(child, size) for key, child in value.items()})
    if isinstance(value, dict):
        return type(value)({key: _resized(child, size) for key, child in value.items()})
    if hasattr(value, "_fields"):
        return type(value)(*[_resized(child, size) for child in value])
    return type(value)(_resized(child, size) for child in value) if type(value) in (tuple, list) else value


def forward_with_defaults(
    a: Any = None, b: Any = 1, hidden: Any = 0.0, *, mask: Any = None, scale: Any = 1.0, t: Any = True
):
    """Parameters of the names that random calls use."""


@settings(max_examples=100)
@given(call=calls, data=st.data())
def test_keyword_order_and_spelled_out_defaults_are_one_graph(call: dict[str, Any], data: st.DataObject) -> None:
    signature = ForwardSignature.from_callable(forward_with_defaults)
    plain = identity_of(signature.bind((), call))
    permuted = {name: call[name] for name in data.draw(st.permutations(list(call)))}
    explicit = {p.name: p.default for p in signature.parameters} | permuted
    by_position = [explicit.pop(name) for name in ("a", "b", "hidden")]
    assert identity_of(signature.bind((), permuted)) == plain
    assert identity_of(signature.bind(tuple(by_position), explicit)) == plain


@given(value=nested, size=st.integers(0, 4))
def test_another_size_is_the_same_graph(value: Any, size: int) -> None:
    assert identity_of(_resized(value, size)) == identity_of(value)


ODD_ONE_OUT = st.sampled_from(
    [
        *(torch.zeros([1] * rank, dtype=dtype) for rank in range(3) for dtype in DTYPES),
        *(None, True, False, 1, 0, 1.0, 0.0, -0.0, float("nan"), "", "1", b"1", 1 + 0j, torch.float32),
        *([], (), {}, [1], (1,), {"a": 1}, {"b": 1}, {0: 1}, {"0": 1}, [[1]], Pair(1, 1), (1, 1), [None], (True,)),
        *({"a": 1, "b": 2}, {"a": 2, "b": 1}, BaseModelOutput(last_hidden_state=torch.zeros(1)), slice(1), range(1)),
    ]
)


def _put(tree: Any, path: tuple[str | int, ...], leaf: Any) -> Any:
    """``tree`` with another thing at ``path``."""
    if not path:
        return leaf
    step, rest = path[0], path[1:]
    if isinstance(tree, BaseModelOutput):
        return type(tree)(**{key: _put(child, rest, leaf) if key == step else child for key, child in tree.items()})
    if isinstance(tree, dict):
        return type(tree)({key: _put(child, rest, leaf) if key == step else child for key, child in tree.items()})
    steps = getattr(tree, "_fields", range(len(tree)))
    children = [_put(child, rest, leaf) if at == step else child for at, child in zip(steps, tree, strict=True)]
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


@settings(max_examples=300)
@given(call=calls, other=ODD_ONE_OUT, data=st.data())
def test_any_single_change_is_another_graph(call: dict[str, Any], other: Any, data: st.DataObject) -> None:
    places = [place for place, _ in flatten(call)[0].leaves()]
    place = data.draw(st.sampled_from(places or [Locator((next(iter(call)),))]))
    old = place.get(call)
    changed = _put(call, place.path, other)
    alike = describe_exactly(old) == describe_exactly(other)
    assert (identity_of(changed) == identity_of(call)) is alike


def describe_exactly(value: Any) -> Any:
    """An independent account of what should matter of a leaf or a small container."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.ndim)
    if isinstance(value, dict):
        return (type(value), [(type(key), key, describe_exactly(child)) for key, child in value.items()])
    if isinstance(value, (tuple, list)):
        return (type(value), [describe_exactly(child) for child in value])
    return (type(value), repr(value))


@given(call=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), min_size=2))
def test_the_order_of_a_dict_is_part_of_the_graph(call: dict[str, int]) -> None:
    # A forward can see it: torch.cat(list(features.values())).
    reordered = dict(reversed(call.items()))
    assert identity_of({"features": call}) != identity_of({"features": reordered})


def test_added_and_missing_keys_are_other_graphs() -> None:
    x = torch.zeros(1)
    forms = [{"x": x}, {"x": x, "y": None}, {"x": x, "y": x}, {"x": [x]}, {"x": [x, x]}, {"x": {"x": x}}, {"y": x}]
    assert len(set(map(identity_of, forms))) == len(forms)


def test_device_type_and_context_are_part_of_the_graph() -> None:
    x = torch.zeros(1)
    contexts = [CONTEXT, CallContext(training=True), CallContext(needs_grad=True), CallContext(autocast="bfloat16")]
    assert len({identity_of(x, context) for context in contexts}) == len(contexts)
    assert identity_of(x) != identity_of(torch.zeros(1, device="meta"))


def test_the_key_is_a_sha256_of_stable_text() -> None:
    spec = spec_of(unet, *call_of(1))
    assert len(spec.key) == 64
    identity = {"inputs": spec.input_spec.identity(), "context": spec.context.to_dict()}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    assert spec.key == hashlib.sha256(text.encode()).hexdigest()


# JSON


@given(inputs=calls, outputs=nested, training=st.booleans(), autocast=st.sampled_from([None, "bfloat16"]))
def test_a_graph_survives_json(inputs: dict[str, Any], outputs: Any, training: bool, autocast: str | None) -> None:
    spec = GraphSpec(
        "graph7",
        SampleMetadata.of(inputs),
        SampleMetadata.of(outputs),
        ForwardSignature.from_callable(forward_with_defaults),
        DynamicShapes(a={0: BatchDim(max=4), -1: DynamicDim("w", min=8, opt=16, max=64, multiple_of=8)}),
        CallContext(training=training, autocast=autocast),
    )
    again = GraphSpec.from_dict(json.loads(json.dumps(spec.to_dict(), allow_nan=False)))
    assert again == spec
    assert again.key == spec.key
    assert (str(again), repr(again)) == (str(spec), repr(spec))


def test_it_reads_as_a_call_with_its_shapes() -> None:
    spec = spec_of(unet, *call_of(1))
    also_seen(spec, unet, *call_of(2, size=4))
    assert str(spec) == "graph0(sample: ['batch0', 3, 'dim2'], timestep: ['batch0'])"
    assert spec.key[:12] in repr(spec)
    assert "CallContext" in repr(spec)


# Shapes


def test_bounds_of_inputs_and_outputs_widen_together() -> None:
    spec = spec_of(unet, *call_of(1))
    also_seen(spec, unet, *call_of(3, size=4))
    sample = spec.input_spec.tensors[Locator(("sample",))]
    output = spec.output_spec.tensors[Locator(("last_hidden_state",))]
    for seen in (sample, output):
        assert (seen.min_shape, seen.max_shape) == ([2, 3, 4], [6, 3, 8])


@pytest.mark.parametrize("other", [(torch.zeros(1),), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), None])
def test_outputs_of_another_form_are_refused_and_change_nothing(other: Any) -> None:
    spec = spec_of(lambda x: x, torch.zeros(1))
    before = json.dumps(spec.to_dict())
    with pytest.raises(UntunableError, match="outputs change"):
        spec.update_shapes_seen(SampleMetadata.of({"x": torch.zeros(5)}), SampleMetadata.of(other))
    assert json.dumps(spec.to_dict()) == before


def test_outputs_that_differ_in_the_type_of_a_value_are_refused() -> None:
    spec = spec_of(lambda x: (x, 1), torch.zeros(1))
    with pytest.raises(UntunableError, match="outputs change"):
        spec.update_shapes_seen(SampleMetadata.of({"x": torch.zeros(1)}), SampleMetadata.of((torch.zeros(1), True)))


def test_recorded_bounds_are_the_shapes_to_compile_for() -> None:
    spec = spec_of(unet, *call_of(1))
    also_seen(spec, unet, *call_of(2, size=4))
    place = Locator(("sample",))
    assert spec.get_shape_definition(place) is None
    shapes = spec.get_effective_input_shapes(place, spec.input_spec.tensors[place])
    assert shapes == ([2, 3, 4], [4, 3, 8], [4, 3, 8])


def test_the_definition_of_the_user_wins_and_negative_axes_count_from_the_end() -> None:
    width = DynamicDim("width", min=8, opt=16, max=64, multiple_of=8)
    batch = BatchDim(min=2, max=8, multiple_of=2)
    spec = spec_of(unet, *call_of(1), shapes=DynamicShapes(sample={0: batch, -1: width}))
    also_seen(spec, unet, *call_of(20))
    place = Locator(("sample",))
    assert spec.get_shape_definition(place) == {0: batch, 2: width}
    shapes = spec.get_effective_input_shapes(place, spec.input_spec.tensors[place])
    assert shapes == ([2, 3, 8], [8, 3, 16], [8, 3, 64])


@pytest.mark.parametrize("axes", [[3], [-4], [0, -3]])
def test_axes_that_are_not_there_or_named_twice_are_refused(axes: list[int]) -> None:
    shapes = DynamicShapes(sample={axis: BatchDim(max=4) for axis in axes})
    spec = spec_of(unet, *call_of(1), shapes=shapes)
    with pytest.raises(ConfigError, match="sample"):
        spec.get_shape_definition(Locator(("sample",)))
    with pytest.raises(ConfigError, match="sample"):
        spec.batch_axes()


# Batches


def test_batch_sizes_count_rows_or_items() -> None:
    spec = spec_of(unet, *call_of(1))
    also_seen(spec, unet, *call_of(4))
    assert spec.batch_axes() == {Locator(("sample",)): (0, 2), Locator(("timestep",)): (0, 1)}
    assert spec.get_min_batch_size() == 1
    assert spec.get_max_batch_size() == 8
    assert spec.get_max_batch_size(normalized=True) == 4
    assert sorted(spec._iter_batch_size_ranges()) == [(1, 4), (2, 8)]
    assert set(spec._iter_batch_size_ranges(normalized=True)) == {(1, 4)}


def test_batch_sizes_declared_by_the_user_win() -> None:
    shapes = DynamicShapes(sample={0: BatchDim(min=4, max=32, multiple_of=2)})
    spec = spec_of(unet, *call_of(1), shapes=shapes)
    also_seen(spec, unet, *call_of(3))
    assert (spec.get_min_batch_size(), spec.get_max_batch_size(), spec.get_max_batch_size(normalized=True)) == (
        2,
        32,
        16,
    )


def test_one_shape_alone_is_taken_by_convention() -> None:
    def forward(x: Any, mask: Any, table: Any, scalar: Any) -> Any:
        return x

    spec = spec_of(forward, torch.zeros(3, 5), torch.zeros(3), torch.zeros(5, 3), torch.tensor(1.0))
    assert spec.batch_axes() == {Locator(("x",)): (0, 1), Locator(("mask",)): (0, 1)}
    assert (spec.get_min_batch_size(), spec.get_max_batch_size()) == (3, 3)


def test_without_a_batch_there_is_none() -> None:
    spec = spec_of(lambda x: x, torch.zeros(4, 3))
    also_seen(spec, lambda x: x, torch.zeros(4, 5))
    assert spec.batch_axes() == {}
    assert spec.get_min_batch_size() is None
    assert spec.get_max_batch_size() == 1
    with pytest.raises(ConfigError, match="batch axes"):
        spec.make_batch((torch.zeros(4, 3),), {}, 2)


@pytest.mark.parametrize("items", [1, 2, 3, 7])
def test_a_batch_is_made_of_the_rows_of_the_call_only(items: int) -> None:
    spec = spec_of(unet, *call_of(1))
    also_seen(spec, unet, *call_of(3))
    sample, timestep = call_of(3)
    args, kwargs = spec.make_batch((sample,), {"timestep": timestep, "scale": 2.0}, items)
    made = spec.forward_signature.bind(args, kwargs)
    rows = torch.arange(2 * items) % 6
    assert torch.equal(made["sample"], sample[rows])
    assert torch.equal(made["timestep"], timestep[torch.arange(items) % 3])
    assert (made["scale"], made["text"]) == (2.0, None)
    assert sample.shape[0] == 6


def test_a_batch_of_nested_inputs_keeps_their_structure() -> None:
    def forward(x: Any, cond: Any = None) -> Any:
        return x

    cond = {"b": (torch.ones(2, 1), "text"), "a": [torch.ones(3)]}
    spec = spec_of(forward, torch.zeros(2, 4), cond)
    args, kwargs = spec.make_batch((torch.zeros(2, 4), cond), {}, 5)
    made = spec.forward_signature.bind(args, kwargs)["cond"]
    assert list(made) == ["b", "a"]
    assert (made["b"][0].shape, made["b"][1], made["a"][0].shape) == ((5, 1), "text", (3,))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.uint8, torch.complex64, torch.float8_e4m3fn])
def test_a_batch_can_be_made_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0], [1.0]]).to(dtype)
    spec = spec_of(lambda x: x, x)
    (_, kwargs) = spec.make_batch((x,), {}, 3)
    assert kwargs["x"].dtype == dtype
    assert kwargs["x"].to(torch.complex64).real.flatten().tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_nothing_is_refused(size: int) -> None:
    spec = spec_of(unet, *call_of(1))
    with pytest.raises(ConfigError, match="cannot make a batch"):
        spec.make_batch(call_of(1), {}, size)


def test_rows_are_not_invented_for_an_empty_input() -> None:
    spec = spec_of(lambda x: x, torch.zeros(0, 2))
    with pytest.raises(ConfigError, match="no rows"):
        spec.make_batch((torch.zeros(0, 2),), {}, 2)


def test_the_largest_batch_can_be_set_beyond_what_was_seen() -> None:
    spec = spec_of(unet, *call_of(1))
    also_seen(spec, unet, *call_of(2))
    spec.update_max_batch_size((call_of(2), {}), 16)
    assert (spec.get_min_batch_size(), spec.get_max_batch_size(normalized=True)) == (1, 16)
    assert spec.input_spec.tensors[Locator(("sample",))].max_shape == [32, 3, 8]
    assert spec.batch_axes()[Locator(("sample",))] == (0, 2)


def test_the_device_type_is_that_of_the_inputs() -> None:
    assert spec_of(unet, *call_of(1)).device_type == "cpu"
    assert spec_of(lambda x: x, torch.zeros(1, device="meta")).device_type == "meta"
    assert spec_of(lambda x: x, 1).device_type == "cpu"
