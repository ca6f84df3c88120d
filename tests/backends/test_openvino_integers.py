"""Numbers that OpenVINO cannot hold: found where they may come up, and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from aitune_hf.backends import openvino_sdk
from aitune_hf.backends.base import AxisRange, BuildRequest
from aitune_hf.backends.export import CapturedGraph
from aitune_hf.backends.integer_range import Call, IntegerRange, hull, size_ranges
from aitune_hf.backends.integer_rules import range_of_call
from aitune_hf.backends.openvino import OpenVINOBackend
from aitune_hf.backends.openvino_integers import check_numbers
from aitune_hf.errors import BuildError
from aitune_hf.graph.shape_envelope import Extent, ShapeEnvelope

if openvino_sdk.missing_openvino():
    pytest.skip(str(openvino_sdk.missing_openvino()), allow_module_level=True)

Function = Callable[[torch.Tensor], Any]
INPUT = (-(1 << 22), 1 << 22)


class Of(nn.Module):
    """A function of one input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def graph_of(function: Function, x: torch.Tensor, free: bool = False) -> CapturedGraph:
    """The program of a function, for up to 100 rows where ``free``."""
    dims = ({0: torch.export.Dim("rows", min=2, max=100)},) if free else None
    program = torch.export.export(Of(function), (x,), dynamic_shapes=dims, strict=False)
    program = program.run_decompositions({})
    first = Extent(0, "s", 1) if free else Extent(x.shape[0])
    envelope = ShapeEnvelope(
        inputs=((first, *(Extent(size) for size in x.shape[1:])),), ranges={"s": (2, 100)} if free else {}
    )
    return CapturedGraph(program=program, envelope=envelope, constants=(), residuals={})


def limits_of(function: Function, x: torch.Tensor, free: bool = False) -> Any:
    return check_numbers(graph_of(function, x, free), [x], "model")


IDS = torch.tensor([[5, 9, 30], [7, 8, 2]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: ((x + 1) * 113) % 16384, "aten.mul"),  # A bucket of a hash.
        (lambda x: x * x, "aten.mul"),
        (lambda x: x**2, "aten.pow"),
        (lambda x: 2**x, "aten.pow"),
        (lambda x: x << 3, "aten.__lshift__"),
        (lambda x: x.sum(-1) * 3, "aten.sum|aten.mul"),
        (lambda x: torch.cumsum(x.sum(-1), 0), "aten.cumsum|aten.sum"),
        (lambda x: x.prod(), "aten.prod"),
        (lambda x: x @ x.mT, "aten.m?a?t?mul|aten.b?mm"),
        (lambda x: torch.arange(x.shape[1]) * 10_000_000, "aten.mul"),
        (lambda x: torch.where(x > 0, x, 1 << 30), "aten"),
    ],
)
def test_integers_that_may_leave_24_bits_are_declined(function: Function, operator: str) -> None:
    with pytest.raises(BuildError, match=rf"^model: integers of ({operator}).* may lie between .*another backend"):
        limits_of(function, IDS)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1, x - 3, 1 - x, -x),
        lambda x: (x % 16384, x // 7, torch.fmod(x, 5), x >> 2),
        lambda x: x * (x > 0),
        lambda x: (x != 1).int() * 7,
        lambda x: torch.cumsum(x.ne(1).int(), 1).type_as(x) * x.ne(1).int() + 1,  # Positions, in RoBERTa's way.
        lambda x: (torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None]).abs() * 16,
        lambda x: x.clamp(0, 1000) * 16000,
        lambda x: x.argmax(-1) * 1000,
        lambda x: x.sort(-1)[1] * 1000,
        lambda x: x.size(0) * x.size(1) + x,
        lambda x: (x.float() * 3).sum(),
        lambda x: x.to(torch.uint8).to(torch.int64) * 1000,
    ],
)
@pytest.mark.parametrize("free", [False, True])
def test_integers_that_stay_within_24_bits_are_not_declined(function: Function, free: bool) -> None:
    assert limits_of(function, IDS, free) == [INPUT]


def test_sizes_count_by_what_the_envelope_allows() -> None:
    """What is exact for the sizes recorded may not be for the largest."""

    def counted(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[0]) * 1_000_000

    assert limits_of(counted, IDS) == [INPUT]
    with pytest.raises(BuildError, match="between 0 and 100000000"):
        limits_of(counted, IDS, free=True)


def test_a_mask_is_one_where_that_makes_the_program_right() -> None:
    def positions(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, 1) * x - 1  # In OPT's way.

    assert limits_of(positions, MASK) == [(0, 1)]
    assert limits_of(lambda x: x + 1, MASK) == [INPUT]
    with pytest.raises(BuildError, match="24 bits"):
        limits_of(positions, IDS)


def test_what_a_table_holds_is_looked_up() -> None:
    table = torch.tensor([3, 70, 900])
    assert limits_of(lambda x: table[x % 3] * 1000, IDS) == [INPUT]
    with pytest.raises(BuildError, match="between 3000000 and 900000000"):
        limits_of(lambda x: table[x % 3] * 1_000_000, IDS)


def test_float64_is_declined_and_numbers_in_it_are_not() -> None:
    with pytest.raises(BuildError, match=r"^model: aten.*float64.*another backend .*, or compute in float32$"):
        limits_of(lambda x: (x.double() * 2e-3).sin().float(), torch.rand(3))
    assert limits_of(lambda x: x * torch.tensor(0.1, dtype=torch.float64), torch.rand(3)) == [None]


RULES: dict[str, Function] = {
    "sums": lambda x: (x + 3, torch.add(x, x, alpha=-5), torch.sub(x, 4, alpha=2), 1 - x, -x, x.abs(), x.sign(), ~x),
    "products": lambda x: (x * -3, x * x, x.square(), x**3, x @ x.mT, x.prod(), x.prod(1), x.cumprod(1)),
    "quotients": lambda x: (
        x % 7, x % -7, torch.fmod(x, 7), torch.fmod(x, -7), x // 7, x // -3, x.div(4, rounding_mode="trunc"),
    ),
    "bits": lambda x: (x & 12, x | 12, x ^ 12, x & x.abs(), x << 2, x >> 1, x.abs() >> 1),
    "limits": lambda x: (
        x.clamp(-2, 5), x.clamp(min=40), x.clamp(max=-40), x.clamp_min(3), x.clamp_max(3),
        torch.minimum(x, x + 2), torch.maximum(x, 4 - x), x.amax(1), x.max(1), x.min(0), x.max(),
    ),
    "sums over axes": lambda x: (x.sum(), x.sum(1), x.sum((0, 1)), x.cumsum(0), x.cumsum(1), (x > 0).sum()),
    "places": lambda x: (x.argmax(), x.argmin(1), x.sort(1), x.topk(2), x.argsort(0), torch.bucketize(x, x[0].sort()[0])),
    "moves": lambda x: (
        x.flip(0), x[:, 1:], x.T, x.roll(1, 1), torch.cat([x, x + 1]), x.repeat(2, 1), x.gather(1, x % 3),
        torch.nn.functional.pad(x, (1, 1), value=-99), x.masked_fill(x > 0, 77), torch.where(x > 0, x, 50),
        x.unbind(1), x.split(1, 1), x[x % 2, x % 3], x.int().long(), (x.float() * 1.5).long(),
    ),
    "given": lambda x: (
        torch.arange(x.shape[0]), torch.arange(3, 9, 2), torch.arange(5, 0, -1), torch.full((2,), 9), torch.zeros_like(x),
        torch.ones_like(x), torch.full_like(x, -8), x.new_full((2,), 6),
    ),
    "scattered": lambda x: (
        torch.zeros_like(x).scatter_add(1, x % 3, x), torch.zeros_like(x).index_add(0, x[:, 0] % 2, x, alpha=3),
        x.scatter(1, x % 3, 88), x.index_put((x % 2, x % 3), x * 2, accumulate=True), x.index_fill(1, x[0] % 3, -71),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("free", [False, True])
def test_each_rule_holds_for_what_its_operator_gives(rule: str, free: bool) -> None:
    graph = graph_of(lambda x: RULES[rule](x), IDS, free)
    program, held = graph.program, IntegerRange(-50, 50)
    sizes = size_ranges(program, graph.envelope)
    ranges: dict[fx.Node, Any] = {
        node: held if node.name in program.graph_signature.user_inputs else None
        for node in program.graph.nodes
        if node.op == "placeholder"
    }
    for node in program.graph.nodes:
        if node.op == "call_function":
            ranges[node] = range_of_call(Call(node=node, ranges=ranges, sizes=sizes, unknown=IntegerRange(-99, 99)))
    seen = 0

    class Checked(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            nonlocal seen
            result = super().run_node(node)
            for part, allowed in zip(*_parts(result, ranges.get(node)), strict=True):
                if isinstance(part, torch.Tensor) and not part.is_floating_point() and node.op == "call_function":
                    seen += 1
                    assert allowed.low <= int(part.min()) <= int(part.max()) <= allowed.high, node.format_node()
            return result

    draw = torch.Generator().manual_seed(0)
    for rows in (2, 9, 100) if free else (2, 2, 2):
        x = torch.randint(-50, 51, (rows, 3), generator=draw)
        Checked(program.graph_module).run(*program.constants.values(), x)
    assert seen >= 3 * 4


def _parts(result: Any, allowed: Any) -> tuple[Any, Any]:
    if isinstance(result, (list, tuple)):
        return result, allowed if isinstance(allowed, tuple) else (hull(allowed),) * len(result)
    return (result,), (allowed,)


# -- builds ------------------------------------------------------------------------------------------------------------


def request(module: nn.Module, call: dict[str, Any], folder: Path, ranges: Any = None) -> BuildRequest:
    recorded = importlib.import_module("backends_recorded")  # Registered by the conftest of this folder.
    made: BuildRequest = recorded.request_for(module.eval(), [call], folder, ranges)
    return made


class Hashed(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ((ids + 1) * 113) % 16384


def test_a_hash_of_its_input_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"aten\.mul\.Tensor \(return \(\(ids \+ 1\) \* 113\) % 16384\) may lie"):
        OpenVINOBackend().build(request(Hashed(), {"ids": torch.tensor([5, 97])}, tmp_path))


class Buckets(nn.Module):
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ids % 16384, ids % -7, ids // 7, ids // -7, ids // (ids % 3 + 1), ids + 1, ids - 3


def test_an_engine_refuses_integers_beyond_what_it_is_right_for(tmp_path: Path) -> None:
    recorded = importlib.import_module("backends_recorded")
    asked = request(Buckets(), {"ids": torch.tensor([5, 97])}, tmp_path)
    result = OpenVINOBackend().build(asked)
    engine = OpenVINOBackend().load(recorded.load_request(asked, result, asked.module))
    for ids in (torch.tensor(INPUT), torch.tensor([4_194_299, -4_194_301]), torch.tensor([-48, 48])):
        assert all(torch.equal(a, b) for a, b in zip(engine([ids]), asked.module(ids), strict=True))
    for number in (INPUT[1] + 1, INPUT[0] - 1, 173_782_000):
        with pytest.raises(ValueError, match=f"those from {INPUT[0]} to {INPUT[1]}"):
            engine([torch.tensor([5, number])])
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", "Roberta", "T5Encoder", "CLIPText", "OPT"])
def test_common_models_are_still_built(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    recorded = importlib.import_module("backends_recorded")
    sizes = {
        "vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "max_position_embeddings": 34,
    }  # fmt: skip
    if name == "T5Encoder":
        sizes = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    if name == "OPT":
        sizes |= {"ffn_dim": 32, "word_embed_proj_dim": 16, "use_cache": False}
    if name == "CLIPText":
        sizes |= {"bos_token_id": 1, "eos_token_id": 98}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**sizes)
    module = getattr(transformers, f"{name}Model")(config).eval()
    limits = AxisRange(min=1, max=8), AxisRange(min=2, max=32)
    names = ("input_ids", "attention_mask")
    asked = request(module, _text(2, 7), tmp_path, {(one, axis): limits[axis] for one in names for axis in (0, 1)})
    result = OpenVINOBackend().build(asked)
    engine = OpenVINOBackend().load(recorded.load_request(asked, result, module))
    for batch, length in ((2, 7), (8, 32), (1, 3)):
        call = _text(batch, length)
        got = recorded.flatten(recorded.run(engine, asked, call))[1]
        for ours, theirs in zip(got, recorded.eager(module, call), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    engine.close()


def _text(batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": torch.randint(3, 98, (batch, length)), "attention_mask": mask}
