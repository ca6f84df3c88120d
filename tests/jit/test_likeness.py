"""A patched or tuned module looks like the original: to inspection, to copies, to pickles, to its own library."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from jit_kit import Bench, FrozenBackend, Leaf, assert_same, check, eager_twin, patched, rows, state, stats, untune
from torch import nn

from aitune_hf.jit import ForwardProxy, ModuleState
from aitune_hf.jit.device import unpatch_device_attribute
from aitune_hf.jit.patcher import patched_modules


@pytest.fixture(params=["init", "recording", "tuned", "eager"])
def leaf(request: pytest.FixtureRequest, bench: Bench) -> nn.Module:
    """A patched leaf in each state."""
    leaf = Leaf()
    bench.backend = FrozenBackend(refuse=["Leaf"] if request.param == "eager" else [])
    bench.session(leaf, min_samples=3)
    with torch.no_grad():
        for _ in range({"init": 0, "recording": 1}.get(request.param, 3)):
            leaf(rows())
    assert state(leaf) == request.param
    return leaf


def test_the_forward_looks_like_the_original(leaf: nn.Module) -> None:
    plain = Leaf()
    assert inspect.signature(leaf.forward) == inspect.signature(plain.forward)
    assert str(inspect.signature(leaf.forward)) == "(x: 'torch.Tensor', gain: 'float' = 1.0) -> 'torch.Tensor'"
    for name in ("__doc__", "__name__", "__qualname__", "__module__", "__func__", "__code__", "__defaults__"):
        assert getattr(leaf.forward, name) == getattr(plain.forward, name), name
    assert leaf.forward.__self__ is leaf
    assert inspect.getsource(leaf.forward) == inspect.getsource(plain.forward)
    assert "forward" in dir(leaf)


def test_the_class_is_the_class(leaf: nn.Module) -> None:
    assert type(leaf) is Leaf
    assert type(leaf).__name__ == "Leaf"
    assert isinstance(leaf, Leaf)
    assert repr(leaf) == repr(Leaf())
    assert list(leaf.state_dict()) == list(Leaf().state_dict())
    assert [name for name, _ in leaf.named_modules()] == [name for name, _ in Leaf().named_modules()]


def test_the_proxy_never_changes(bench: Bench) -> None:
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.session(leaf, min_samples=2)
    kept = leaf.forward
    for _ in range(4):
        x = rows()
        with torch.no_grad():
            assert_same(kept(x), twin(x))
        assert leaf.forward is kept
    assert stats(leaf).engine_calls == 2
    untune(leaf)
    x = rows()
    with torch.no_grad():
        assert_same(kept(x), twin(x))


def test_a_kept_forward_of_a_module_that_is_gone_says_so(bench: Bench) -> None:
    leaf = Leaf()
    bench.tune(leaf, rows())
    kept = leaf.forward
    del leaf
    with pytest.raises(ReferenceError, match=r"Leaf\.forward no longer exists"):
        kept(rows())


def test_a_deep_copy_is_independent_and_unpatched(leaf: nn.Module) -> None:
    twin, other = eager_twin(leaf), copy.deepcopy(leaf)
    assert state(other) is None
    assert vars(other).keys() == vars(Leaf()).keys()
    calls = patched(leaf).call_count
    with torch.no_grad():
        other.linear.weight.zero_()
        other(rows())
    assert patched(leaf).call_count == calls
    check(leaf, twin, rows())


def test_a_shallow_copy_shares_weights_and_is_unpatched(leaf: nn.Module) -> None:
    other = copy.copy(leaf)
    assert type(other) is Leaf
    assert state(other) is None
    assert other.linear is leaf.linear
    calls = patched(leaf).call_count
    check(other, leaf, rows())
    assert patched(leaf).call_count == calls + 1
    other.flag = True
    assert not leaf.flag


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_of_the_plain_module(leaf: nn.Module, protocol: int) -> None:
    content = pickle.dumps(leaf, protocol)
    assert b"aitune" not in content
    other = pickle.loads(content)
    assert state(other) is None
    check(leaf, other, rows())
    assert state(leaf) is not None


def test_torch_save_writes_the_plain_module(leaf: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(leaf, file)
    assert b"aitune" not in file.getvalue()
    file.seek(0)
    check(leaf, torch.load(file, weights_only=False), rows())


def test_a_pickle_loads_where_this_package_is_not(bench: Bench, tmp_path: Path) -> None:
    leaf = Leaf()
    bench.tune(leaf, rows())
    x = rows()
    with torch.no_grad():
        torch.save({"net": leaf, "forward": leaf.forward, "x": x, "y": leaf(x)}, tmp_path / "net.pt")
    script = f"""
import sys
sys.modules["aitune_hf"] = None
sys.path.insert(0, {str(tmp_path)!r})
import torch
kit = type(sys)("jit_kit")
class Leaf(torch.nn.Module):
    def forward(self, x, gain=1.0):
        return torch.relu(self.dropout(self.linear(x)) + self.shift) * self.scale * gain
kit.Leaf = Leaf
sys.modules["jit_kit"] = kit
saved = torch.load({str(tmp_path / "net.pt")!r}, weights_only=False)
with torch.no_grad():
    assert torch.allclose(saved["net"](saved["x"]), saved["y"], atol=1e-6)
    assert torch.allclose(saved["forward"](saved["x"]), saved["y"], atol=1e-6)
print("loaded")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == "loaded\n", run.stderr


def test_wrapping_the_forward_copies_nothing_of_ours(leaf: nn.Module) -> None:
    @functools.wraps(leaf.forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return leaf.forward(*args, **kwargs)

    assert inspect.signature(wrapper) == inspect.signature(Leaf().forward)
    assert wrapper.__wrapped__ is leaf.forward
    assert not any("patched" in name or name == "_module" for name in vars(wrapper))
    check(leaf, wrapper, rows())


def test_a_hooked_tuned_module_can_be_copied(bench: Bench) -> None:
    leaf = Leaf()
    bench.tune(leaf, rows())
    add_hook_to_module(leaf, ModelHook())
    other = copy.deepcopy(leaf)
    calls = stats(leaf).engine_calls
    check(leaf, other, rows(), engine=True)
    assert stats(leaf).engine_calls == calls + 1


class OwnCopy(Leaf):
    """Copies its dictionary by itself, without telling ``memo``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        twin = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        for name, value in vars(self).items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin


class OwnState(Leaf):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "was_saved": True}


def test_a_class_with_its_own_way_of_copying_keeps_it(bench: Bench) -> None:
    leaf = OwnCopy()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    other = copy.deepcopy(leaf)
    assert state(other) is None
    assert vars(other).keys() == vars(twin).keys()
    with torch.no_grad():
        other.linear.weight.zero_()
    check(leaf, twin, rows(), engine=True)
    assert vars(copy.deepcopy(other)).keys() == vars(twin).keys()


def test_a_class_with_its_own_state_keeps_it(bench: Bench) -> None:
    leaf = OwnState()
    bench.tune(leaf, rows())
    other = pickle.loads(pickle.dumps(leaf))
    assert other.was_saved
    assert state(other) is None
    check(leaf, other, rows(), engine=True)


def test_a_dictionary_that_was_copied_whole_does_not_give_the_originals_state(bench: Bench) -> None:
    leaf = Leaf()
    bench.tune(leaf, rows())
    memo: dict[int, Any] = {}
    other = Leaf()
    memo[id(leaf)] = other
    vars(other).update(copy.deepcopy(vars(leaf), memo))
    with torch.no_grad():
        other.linear.weight.zero_()
        assert torch.equal(copy.deepcopy(other).linear.weight, torch.zeros(4, 4))


def test_the_device_attribute_is_patched_on_the_instance_only(bench: Bench) -> None:
    class Placed(Leaf):
        @property
        def device(self) -> torch.device:
            return self.linear.weight.device

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Placed()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

        @property
        def device(self) -> torch.device:
            return self.inner.linear.weight.device

    outer = Outer().eval()
    twin = eager_twin(outer)
    bench.session(outer, mode="inspect")
    check(outer, twin, rows())
    patched(outer.inner)._patch_device_attribute(torch.device("meta"))
    assert outer.device == outer.inner.device == torch.device("meta")
    assert twin.device == Placed().device == torch.device("cpu")
    assert type(outer).__name__ == "Outer"
    assert type(outer.inner).__qualname__ == Placed.__qualname__
    assert isinstance(outer.inner, Placed)
    assert type(copy.deepcopy(outer)) is Outer
    check(outer, twin, rows())
    untune(outer)
    assert type(outer) is Outer
    assert type(outer.inner) is Placed


def test_unpatching_leaves_other_classes_made_on_the_fly_alone() -> None:
    made = type("Leaf", (Leaf,), {"_aitune_base_class": Leaf})
    module = made()
    unpatch_device_attribute(module)
    assert type(module) is made


def clip() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    return CLIPTextModel(
        CLIPTextConfig(
            hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, vocab_size=100,
            max_position_embeddings=16, eos_token_id=2, bos_token_id=0, pad_token_id=1,
        )
    ).eval()  # fmt: skip


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    ).eval()  # fmt: skip


CALLS = {"clip": (clip, (torch.tensor([[0, 5, 7, 2]]),)), "unet": (unet, (torch.randn(1, 3, 8, 8), 3))}


@pytest.mark.parametrize("which", CALLS)
def test_a_saved_folder_names_and_loads_as_the_real_class(bench: Bench, which: str, tmp_path: Path) -> None:
    make, args = CALLS[which]
    model: Any = make()
    twin = eager_twin(model)
    bench.tune(model, (args, {}))
    check(model, twin, *args, engine=True)
    model.save_pretrained(tmp_path / "ours")
    twin.save_pretrained(tmp_path / "theirs")
    for file in (tmp_path / "theirs").glob("*.json"):
        assert json.loads((tmp_path / "ours" / file.name).read_text()) == json.loads(file.read_text())
    loaded = type(twin).from_pretrained(tmp_path / "ours").eval()
    check(model, loaded, *args, engine=True)
    assert type(model).__name__ == type(twin).__name__
    assert model.dtype == twin.dtype
    assert model.device == twin.device
    check(model, copy.deepcopy(model), *args)
    check(model, pickle.loads(pickle.dumps(model)), *args)


def test_generate_inspects_the_signature_and_equals_the_twin(bench: Bench) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    twin = eager_twin(model)
    ids = torch.tensor([[1, 5, 9, 11]])
    model.generation_config.eos_token_id = twin.generation_config.eos_token_id = None
    bench.tune(model, lambda model: model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False))
    for settings in ({"use_cache": False}, {"use_cache": True}, {"use_cache": True, "num_beams": 2}):
        ours, theirs = (one.generate(ids, max_new_tokens=5, do_sample=False, **settings) for one in (model, twin))
        assert torch.equal(ours, theirs)
    assert stats(model).engine_calls >= 5


def test_export_and_compile_of_a_tuned_module_see_the_plain_forward(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "__init__", nn.Module.__init__)  # torch.compile leaves its own there.
    leaf = Leaf()
    twin = eager_twin(leaf)
    bench.tune(leaf, rows())
    x = rows()
    with torch.no_grad():
        exported = torch.export.export(leaf, (x,), strict=False).module()
        assert_same(exported(x), twin(x))
        compiled = torch.compile(leaf, backend="eager", fullgraph=True)
        assert_same(compiled(x), twin(x))
    check(leaf, twin, rows(), engine=True)


def test_untuning_leaves_no_trace(leaf: nn.Module) -> None:
    one = patched(leaf)
    untune(leaf)
    assert one.state is ModuleState.DETACHED
    assert vars(leaf).keys() == vars(Leaf()).keys()
    assert not isinstance(leaf.forward, ForwardProxy)
    assert list(patched_modules(leaf)) == []
