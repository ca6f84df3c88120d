"""The hierarchy hash: equal where the computation is, different where it may differ, the same in every
process."""

from __future__ import annotations

import collections
import copy
import functools
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import aitune_hf.errors
from aitune_hf.errors import CorruptEntryError, UntunableError
from aitune_hf.graph.hierarchy_hash import HierarchyFactors, explain, hierarchy_factors, hierarchy_hash

ROOT = pathlib.Path(aitune_hf.errors.__file__).parents[1]
Mutation = Callable[[Any], object]


# Fixtures: the small models of FIELD_CASES.


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    model: nn.Module = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
    ).eval()
    return model


def vae() -> nn.Module:
    from diffusers import AutoencoderKL

    model: nn.Module = AutoencoderKL(
        block_out_channels=[32, 64],
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    ).eval()
    return model


def clip() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model: nn.Module = CLIPTextModel(CLIPTextConfig(vocab_size=1000, bos_token_id=0, eos_token_id=1, **sizes)).eval()
    return model


def bert(**changes: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = BertModel(
        BertConfig(**{"vocab_size": 99, "max_position_embeddings": 64, **sizes, **changes})
    ).eval()
    return model


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes, **changes)).eval()
    return model


class LoRALinear(nn.Module):
    """Low-rank adapters around a linear layer, laid out as peft does."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0, name: str = "default") -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = {name: alpha / rank}
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        for name, scale in self.scaling.items():
            out = out + self.lora_B[name](self.lora_A[name](x)) * scale
        return out


class Quantizer:
    """A helper object with settings and a handle that says nothing."""

    def __init__(self, bits: int = 8) -> None:
        self.bits = bits
        self.owner: object = self  # a cycle
        self.handle = object()


class Block(nn.Module):
    """A block with one of everything an attribute can be."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.act: Callable[..., torch.Tensor] = F.silu
        self.eps = 1e-5
        self.modes = {"b", "a", "c", "d", "e"}
        self.table = {"x": 1, "y": (2, None)}
        self.out_dtype = torch.float32
        self.helper: Any = Quantizer()
        self.scratch: torch.Tensor = torch.zeros(3)
        self.register_buffer("steps", torch.arange(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.proj(self.norm(x)))
        return out

    @functools.cached_property
    def width(self) -> int:
        return int(self.norm.normalized_shape[0])


class OtherBlock(Block):
    """The same, by another class."""


class Stack(nn.Module):
    """Equal blocks in a row."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def setter(path: str, name: str, value: object) -> Mutation:
    return lambda m: setattr(m.get_submodule(path), name, value)


def replace(name: str, value: object) -> Mutation:
    """Deletes an attribute first: so a callable becomes a child, a buffer a parameter."""

    def mutate(m: Any) -> None:
        delattr(m, name)
        setattr(m, name, value)

    return mutate


def add_lora(rank: int = 4, alpha: float = 8.0, name: str = "default") -> Mutation:
    def mutate(m: Any) -> None:
        m.proj = LoRALinear(m.proj, rank, alpha, name)

    return mutate


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def made_in_function(factor: float) -> nn.Module:
    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    return Local()


def reorder(m: Any) -> None:
    first, last = m.blocks, m.head
    del m.blocks, m.head
    m.head, m.blocks = last, first


def replace_parameter(m: Any) -> None:
    m.proj.bias = nn.Parameter(torch.zeros(1))


def freeu(m: Any) -> None:
    m.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def freeu_and_back(m: Any) -> None:
    freeu(m)
    m.disable_freeu()


def plain_attention(m: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    m.set_attn_processor(AttnProcessor())


def one_processor(m: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    m.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(AttnProcessor())


def run_unet(m: Any) -> None:
    with torch.no_grad():
        m(torch.randn(1, 4, 16, 16), 5, torch.randn(1, 3, 32))


def run_vae(m: Any) -> None:
    with torch.no_grad():
        m(torch.randn(1, 3, 16, 16))


def run_text(m: Any) -> None:
    with torch.no_grad():
        m(torch.tensor([[2, 3, 1]]))


def save(m: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        m.save_pretrained(folder)


def randomise(m: nn.Module) -> None:
    with torch.no_grad():
        for p in m.parameters():
            p.normal_()


def hook(m: nn.Module) -> None:
    m.register_forward_hook(lambda *_: None)


def accelerate_hook(m: nn.Module) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(m, ModelHook())


def to_meta(m: nn.Module) -> None:
    m.to("meta")


def backward(m: Any) -> None:
    m(torch.randn(2, 8)).sum().backward()


def patched_device(m: nn.Module) -> None:
    kind = type(m)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    m.__class__ = type(kind.__name__, (kind,), {**names, "device": property(lambda self: torch.device("cpu"))})


def tie(m: Any) -> None:
    m.blocks[1].proj.weight = m.blocks[0].proj.weight


def alias(m: Any) -> None:
    m.blocks[1] = m.blocks[0]


class QuantizedParameter(nn.Parameter):
    """A parameter with settings of its own, as bitsandbytes has."""

    bits: int


def quantize(bits: int) -> Mutation:
    def mutate(m: Any) -> None:
        m.proj.weight = QuantizedParameter(m.proj.weight.detach())
        m.proj.weight.bits = bits

    return mutate


def point_at(*names: str) -> Mutation:
    def mutate(m: Any) -> None:
        m.pointers = [m.get_submodule(name) for name in names]

    return mutate


CHANGED: list[tuple[str, Callable[[], nn.Module], Mutation]] = [
    ("eps", Block, setter("norm", "eps", 1e-6)),
    ("attribute of own", Block, setter("", "eps", 1e-6)),
    ("int to float", Block, setter("", "table", {"x": 1.0, "y": (2, None)})),
    ("bool to int", Block, setter("", "eps", True)),
    ("nested value", Block, setter("", "table", {"x": 1, "y": (3, None)})),
    ("tuple to list", Block, setter("", "table", {"x": 1, "y": [2, None]})),
    ("set member", Block, setter("", "modes", {"a", "b"})),
    ("dtype attribute", Block, setter("", "out_dtype", torch.float16)),
    ("activation function", Block, setter("", "act", F.gelu)),
    ("activation partial", Block, setter("", "act", functools.partial(F.gelu, approximate="tanh"))),
    ("activation lambda", Block, setter("", "act", lambda x: x * 2)),
    ("activation child", Block, replace("act", nn.GELU())),
    ("helper setting", Block, lambda m: setattr(m.helper, "bits", 4)),
    ("helper type", Block, setter("", "helper", types.SimpleNamespace(bits=8))),
    ("other class", Block, lambda m: setattr(m, "__class__", OtherBlock)),
    ("train", Block, lambda m: m.train(not m.training)),
    ("one child in train", Stack, lambda m: m.blocks[1].eval()),
    ("half", Block, lambda m: m.half()),
    ("one parameter's dtype", Block, lambda m: m.proj.double()),
    ("parameter shape", Block, replace_parameter),
    ("bias removed", Block, setter("proj", "bias", None)),
    ("buffer added", Block, lambda m: m.register_buffer("extra", torch.zeros(1))),
    (
        "buffer to parameter",
        Block,
        replace("steps", nn.Parameter(torch.zeros(4))),
    ),
    ("tensor attribute", Block, setter("", "scratch", torch.zeros(4))),
    ("child added", Stack, lambda m: m.blocks.append(Block())),
    ("child removed", Stack, lambda m: delattr(m, "head")),
    ("children reordered", Stack, reorder),
    ("child replaced", Stack, lambda m: m.blocks.__setitem__(1, OtherBlock())),
    ("parameters tied", Stack, tie),
    ("module with two names", Stack, alias),
    ("attribute points at a module", Stack, point_at("blocks.0")),
    ("lora", Block, add_lora()),
    ("parametrization", Block, lambda m: nn.utils.parametrizations.weight_norm(m.proj)),
    ("quantized parameter", Block, quantize(8)),
    ("upcast", unet, setter("mid_block.attentions.0.transformer_blocks.0.attn1", "upcast_attention", True)),
    ("scale factor", unet, setter("mid_block.resnets.0", "output_scale_factor", 2.0)),
    ("all processors", unet, plain_attention),
    ("one processor", unet, one_processor),
    ("freeu", unet, freeu),
    ("fused qkv", unet, lambda m: m.fuse_qkv_projections()),
    ("unet config", unet, lambda m: m.register_to_config(act_fn="gelu")),
    ("tiling", vae, lambda m: m.enable_tiling()),
    ("slicing", vae, lambda m: m.enable_slicing()),
    ("scaling factor", vae, lambda m: m.register_to_config(scaling_factor=1.5)),
    ("hidden states", clip, lambda m: setattr(m.config, "output_hidden_states", True)),
    ("eos token", clip, setter("", "eos_token_id", 7)),
    ("attention implementation", bert, lambda m: m.set_attn_implementation("eager")),
    ("layer norm eps", bert, setter("encoder.layer.1.output.LayerNorm", "eps", 1e-3)),
    ("rope", llama, lambda m: m.config.rope_parameters.update(rope_theta=5e5)),
    ("layer index", llama, setter("model.layers.1.self_attn", "layer_idx", 0)),
    ("tied head", llama, lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight)),
]

UNCHANGED: list[tuple[str, Callable[[], nn.Module], Mutation]] = [
    ("weights", Block, randomise),
    ("requires_grad", Block, lambda m: m.requires_grad_(False)),
    ("backward", Block, backward),
    ("device", Block, to_meta),
    ("device attribute", Block, setter("", "device", torch.device("cuda:1"))),
    ("hook", Block, hook),
    ("cached property", Block, lambda m: m.width),
    ("set order", Block, setter("", "modes", {"e", "d", "c", "b", "a"})),
    ("persistence", Block, lambda m: m.register_buffer("steps", m.steps)),
    ("other handle", Block, lambda m: setattr(m.helper, "handle", object())),
    ("attribute order", Block, replace("eps", 1e-5)),
    ("replaced forward", Block, lambda m: setattr(m, "forward", m.forward)),
    ("compiled in place", Block, lambda m: m.compile(backend="eager")),
    ("device property", Block, patched_device),
    ("unet called", unet, run_unet),
    ("freeu on and off", unet, freeu_and_back),
    ("unet saved", unet, save),
    ("unet loading path", unet, lambda m: m.register_to_config(_name_or_path="/somewhere/else")),
    ("accelerate hook", unet, accelerate_hook),
    ("vae called", vae, run_vae),
    ("clip called", clip, run_text),
    ("clip saved", clip, save),
    ("bert called", bert, run_text),
    ("bert loading path", bert, lambda m: setattr(m.config, "_name_or_path", "org/other")),
    ("bert version", bert, lambda m: setattr(m.config, "transformers_version", "4.0.0")),
    ("bert label names", bert, lambda m: setattr(m.config, "id2label", {0: "no", 1: "yes"})),
    ("bert architectures", bert, lambda m: setattr(m.config, "architectures", ["Other"])),
    ("llama called", llama, run_text),
    ("llama saved", llama, save),
]


@pytest.mark.parametrize(("make", "mutate"), [c[1:] for c in CHANGED], ids=[c[0] for c in CHANGED])
def test_changes_with_what_may_change_the_computation(make: Callable[[], nn.Module], mutate: Mutation) -> None:
    module = make()
    before = hierarchy_factors(module)
    mutate(module)
    after = hierarchy_factors(module)
    assert before.digest != after.digest
    assert explain(before, after)


@pytest.mark.parametrize(("make", "mutate"), [c[1:] for c in UNCHANGED], ids=[c[0] for c in UNCHANGED])
def test_blind_to_the_rest(make: Callable[[], nn.Module], mutate: Mutation) -> None:
    module = make()
    before = hierarchy_factors(module)
    mutate(module)
    assert explain(before, module) is None
    assert hierarchy_hash(module) == before.digest


@pytest.mark.parametrize("make", [unet, vae, clip, bert, llama, Stack])
def test_subtree_digest_is_the_hash_of_the_submodule(make: Callable[[], nn.Module]) -> None:
    module = make()
    factors = hierarchy_factors(module)
    for path, child in module.named_modules():
        assert factors.at(path).digest == hierarchy_hash(child), path
    assert {path for path, _ in factors.walk()} >= {path for path, _ in module.named_modules()}


@pytest.mark.parametrize("make", [unet, vae, clip, bert, llama])
def test_a_saved_and_loaded_model_is_the_same(make: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    module = make()
    before = hierarchy_factors(module)
    module.save_pretrained(tmp_path)
    loaded = type(module).from_pretrained(tmp_path).eval()
    assert explain(before, loaded) is None


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (add_lora(4, 8.0), add_lora(4, 8.0), True),
        (add_lora(4, 8.0), add_lora(8, 16.0), False),  # rank, same scaling
        (add_lora(4, 8.0), add_lora(4, 4.0), False),  # scaling
        (add_lora(), add_lora(name="other"), False),  # the name is part of the parameters' names
        (quantize(4), quantize(4), True),
        (quantize(4), quantize(8), False),
        (setter("", "act", scaled(2.0)), setter("", "act", scaled(2.0)), True),
        (setter("", "act", scaled(2.0)), setter("", "act", scaled(3.0)), False),  # a closure cell
        (setter("", "path", "/a/b"), setter("", "path", "/c/d"), True),
        (setter("", "path", pathlib.Path("a")), setter("", "path", pathlib.Path("b")), True),
        (setter("", "where", "cuda:0"), setter("", "where", "cpu"), True),
        (setter("", "note", repr(object())), setter("", "note", repr(Block)), False),
        (setter("", "note", "<x at 0x7f00aa>"), setter("", "note", "<x at 0x7f11bb>"), True),
        (setter("", "od", collections.OrderedDict(a=1, b=2)), setter("", "od", {"a": 1, "b": 2}), False),
    ],
)
def test_pairs(a: Mutation, b: Mutation, equal: bool) -> None:
    first, second = Block(), Block()
    a(first)
    b(second)
    assert (hierarchy_hash(first) == hierarchy_hash(second)) is equal
    assert (explain(first, second) is None) is equal


@pytest.mark.parametrize("make", [unet, vae, clip, bert, llama, Block, Stack])
def test_a_deep_copy_and_another_instance_are_the_same(make: Callable[[], nn.Module]) -> None:
    module = make()
    factors = hierarchy_factors(module)
    assert explain(factors, copy.deepcopy(module)) is None
    assert explain(factors, make()) is None


def test_pointers_tell_equal_modules_apart() -> None:
    hashes = set()
    for names in (("blocks.0", "blocks.1"), ("blocks.1", "blocks.0"), ("blocks.0", "blocks.0")):
        stack = Stack()
        point_at(*names)(stack)
        hashes.add(hierarchy_hash(stack))
    assert len(hashes) == 3


def test_pointer_to_parent_or_sibling_keeps_subtree_digests() -> None:
    stack: Any = Stack()
    for block in stack.blocks:
        block.parent = [stack]
    stack.blocks[0].friend = [stack.blocks[1]]
    factors = hierarchy_factors(stack)
    for path, child in stack.named_modules():
        assert factors.at(path).digest == hierarchy_hash(child), path
    assert factors.at("blocks.1") == factors.at("blocks.2")
    other: Any = Stack()
    for block in other.blocks:
        block.parent = [other]
    other.blocks[0].friend = [other.blocks[2]]
    assert factors.at("blocks.0").digest == hierarchy_hash(other.blocks[0])
    assert factors.digest != hierarchy_hash(other)


def test_equal_blocks_have_equal_digests() -> None:
    factors = hierarchy_factors(Stack(24))
    blocks = [factors.at(f"blocks.{i}") for i in range(24)]
    assert len({b.digest for b in blocks}) == 1
    assert all(b is blocks[0] for b in blocks)
    assert len(json.dumps(factors.to_dict())) < 2 * len(json.dumps(hierarchy_factors(Stack(2)).to_dict()))


def test_ties_are_recorded_where_they_meet() -> None:
    stack: Any = Stack()
    plain = hierarchy_factors(stack)
    tie(stack)
    tied = hierarchy_factors(stack)
    assert tied.at("blocks.0").digest == tied.at("blocks.1").digest == plain.at("blocks.0").digest
    assert tied.at("blocks").digest != plain.at("blocks").digest
    assert tied.at("blocks").own["tied"] == [["0.proj.weight", "1.proj.weight"]]
    assert "tied" not in tied.own


@pytest.mark.parametrize(
    ("make", "mutate", "words"),
    [
        (
            bert,
            setter("encoder.layer.1.output.LayerNorm", "eps", 1e-3),
            ["encoder.layer.1.output.LayerNorm", "'eps'", "0.001"],
        ),
        (
            unet,
            one_processor,
            ["mid_block.attentions.0.transformer_blocks.0.attn1", "'processor'", "AttnProcessor2_0"],
        ),
        (unet, freeu, ["up_blocks.0", "'b1'", "1.2"]),
        (
            clip,
            lambda m: setattr(m.config, "output_hidden_states", True),
            ["'config.output_hidden_states'", "True"],
        ),
        (
            llama,
            lambda m: m.config.rope_parameters.update(rope_theta=5e5),
            ["config.rope_parameters.rope_theta", "500000.0"],
        ),
        (Stack, lambda m: m.blocks.append(Block()), ["module blocks", "child '3'", "Block"]),
        (Stack, reorder, ["(root)", "another order"]),
        (Stack, tie, ["module blocks ", "tied", "0.proj.weight"]),
        (Block, lambda m: m.proj.double(), ["proj", "'bias'", "torch.float64"]),
        (Block, lambda m: m.train(False), ["training", "False"]),
        (Block, lambda m: setattr(m, "__class__", OtherBlock), ["class", "OtherBlock"]),
        (Block, lambda m: setattr(m.helper, "bits", 4), ["'helper.bits'", "8", "4"]),
    ],
)
def test_explain_names_path_and_factor(make: Callable[[], nn.Module], mutate: Mutation, words: list[str]) -> None:
    module = make()
    before = hierarchy_factors(module)
    mutate(module)
    sentence = explain(json.loads(json.dumps(before.to_dict())), module)
    assert sentence is not None
    assert all(word in sentence for word in words), sentence


def test_factors_survive_json() -> None:
    for make in (unet, llama, Stack):
        factors = hierarchy_factors(make())
        text = json.dumps(factors.to_dict())
        back = HierarchyFactors.from_dict(json.loads(text))
        assert back == factors
        assert back.to_dict() == factors.to_dict()
        sub = factors.children[0][1]
        assert HierarchyFactors.from_dict(sub.to_dict()) == sub


def test_damaged_factors_are_refused() -> None:
    good: Any = hierarchy_factors(Block()).to_dict()
    damaged: Any = copy.deepcopy(good)
    next(iter(damaged["nodes"].values()))["own"]["training"] = "no"
    with pytest.raises(CorruptEntryError, match="digest"):
        HierarchyFactors.from_dict(damaged)
    with pytest.raises(CorruptEntryError, match="incomplete"):
        HierarchyFactors.from_dict({**good, "nodes": {}})
    with pytest.raises(CorruptEntryError, match="schema"):
        HierarchyFactors.from_dict({**good, "schema": 99})


# Code: where it comes from, and what happens to it at run time.


def load(folder: pathlib.Path, source: str, name: str) -> Any:
    """Imports ``source`` as a module of this name from ``folder``."""
    import importlib.util

    file = folder / f"{name.rpartition('.')[2]}.py"
    file.write_bytes(source.encode())
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module


SOURCE = textwrap.dedent("""
    from torch import nn
    SCALE = 2
    class Net(nn.Module):
        def forward(self, x):
            return x * SCALE
""")


def test_source_file_is_a_factor_and_its_folder_is_not(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    folders = [tmp_path / n for n in "abc"]
    for folder in folders:
        folder.mkdir()
    first = hierarchy_factors(load(folders[0], SOURCE, "their_net").Net())
    assert first.digest == hierarchy_hash(load(folders[1], SOURCE.replace("\n", "\r\n"), "their_net").Net())
    changed = load(folders[2], SOURCE.replace("SCALE = 2", "SCALE = 3"), "their_net").Net()
    assert "source file of class their_net.Net" in str(explain(first, changed))


def test_code_from_a_hub_repo_is_known_without_repo_and_commit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    names = [
        "transformers_modules.org.repo.0123abcd.modeling_net",
        "transformers_modules.my_folder.modeling_net",
    ]
    assert len({hierarchy_hash(load(tmp_path, SOURCE, name).Net()) for name in names}) == 1


def executed(source: str, cls: str = "Net", module: str = "a_console") -> nn.Module:
    namespace: dict[str, Any] = {"__name__": module}
    exec(source, namespace)
    net: nn.Module = namespace[cls]()
    return net


def test_code_without_a_file() -> None:
    first = executed(SOURCE)
    assert hierarchy_hash(first) == hierarchy_hash(executed("\n\n" + SOURCE))  # no line numbers
    assert hierarchy_hash(first) != hierarchy_hash(executed(SOURCE.replace("x *", "x +")))
    assert hierarchy_hash(first) != hierarchy_hash(executed(SOURCE.replace("SCALE = 2", "SCALE = 3")))
    helper = SOURCE.replace("SCALE = 2", "def f(x):\n    return x\nSCALE = 2").replace("x * SCALE", "f(x)")
    assert hierarchy_hash(executed(helper)) != hierarchy_hash(executed(helper.replace("return x\n", "return -x\n")))


def test_class_made_in_a_function_is_known_by_what_it_captured() -> None:
    assert hierarchy_hash(made_in_function(2.0)) == hierarchy_hash(made_in_function(2.0))
    assert hierarchy_hash(made_in_function(2.0)) != hierarchy_hash(made_in_function(3.0))


def test_method_patched_on_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    module = llama()
    before = hierarchy_factors(module)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: x)
    assert "forward" in str(explain(before, module))
    monkeypatch.undo()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert "forward" in str(explain(before, module))
    monkeypatch.undo()
    assert explain(before, module) is None


def test_what_cannot_be_hashed_says_where() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UntunableError, match=r"'0'.*lazy"):
        hierarchy_hash(lazy)
    cycle = nn.Sequential(nn.Linear(1, 1))
    cycle.append(cycle)
    with pytest.raises(UntunableError, match="descendant"):
        hierarchy_hash(cycle)
    with pytest.raises(TypeError, match="int"):
        hierarchy_hash(3)  # type: ignore[arg-type]


def test_traced_graphs_are_told_apart() -> None:
    one, two = (torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), m)) for m in (nn.Identity(), nn.Identity()))
    assert hierarchy_hash(one) == hierarchy_hash(two)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    class Squared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x

    assert hierarchy_hash(torch.fx.symbolic_trace(Twice())) != hierarchy_hash(torch.fx.symbolic_trace(Squared()))


GOLDEN = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
{before}
import test_hierarchy_hash as t
from torch import nn
extra = {extra}
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
import torch
torch.manual_seed({seed})
makers = [t.unet, t.vae, t.clip, t.bert, t.llama, t.Block, t.Stack, lambda: t.made_in_function(2.0)]
order = makers if {seed} % 2 else makers[::-1]
made = {{id(m): hierarchy_hash(m()) for m in order}}
print("HASHES", *(made[id(m)] for m in makers))
"""


def test_equal_in_two_processes(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    found = []
    settings = [
        ("0", "import diffusers, transformers", "None", 1),
        ("4242", "import transformers", "[t.Stack(2), t.bert()]", 2),
    ]
    processes = []
    for seed, before, extra, number in settings:
        cwd = tmp_path / f"cwd{number}"
        cwd.mkdir()
        code = GOLDEN.format(
            root=str(ROOT), tests=str(pathlib.Path(__file__).parent), before=before, extra=extra, seed=number
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=cwd,
                env={**os.environ, "PYTHONHASHSEED": seed},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        found.append(next(line for line in output.splitlines() if line.startswith("HASHES")))
    assert found[0] == found[1]
    assert len(set(found[0].split())) == 9


def test_two_thousand_modules_are_quick() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared: Any = Quantizer()
            self.blocks = nn.ModuleList(Stack(2) for _ in range(223))
            for name, child in self.named_modules():
                if isinstance(child, Block):
                    child.helper, child.layer = self.shared, name

    module = Wide()
    count = sum(1 for _ in module.modules())
    started = time.perf_counter()
    hierarchy_hash(module)
    seconds = time.perf_counter() - started
    print(f"{count} modules: {seconds:.2f} s")
    assert count >= 2000
    assert seconds < 5
