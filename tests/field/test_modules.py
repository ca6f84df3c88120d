"""Field cases of single models, with engines that need no compiler. The numbers are those of the list of field cases."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from jit_kit import Bench, FrozenBackend, assert_same, call, check, eager_twin, state, stats

from aitune_hf.jit.patcher import patched_modules


def noisy(batch: int = 1, height: int = 8, width: int = 8, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, height, width)


def text(batch: int = 1, length: int = 7) -> torch.Tensor:
    return torch.randn(batch, length, 32)


def tokens(batch: int = 1, length: int = 8) -> torch.Tensor:
    ids = torch.randint(3, 98, (batch, length))
    ids[:, -1] = 2
    return ids


def test_3_sampling_at_batch_one_does_not_freeze_the_batch(bench: Bench, text_encoder: Any, small_unet: Any) -> None:
    for model, make in ((text_encoder, tokens), (small_unet, lambda batch: noisy(batch))):
        twin = eager_twin(model)
        extra = () if model is text_encoder else (3,)
        bench.tune(model, ((make(1), *extra), {}))
        check(model, twin, make(1), *extra, engine=True)
        for batch in (4, 3, 1):
            check(model, twin, make(batch), *extra)


def test_5_sizes_that_the_factor_does_not_divide(bench: Bench, unet: Any) -> None:
    twin = eager_twin(unet)
    bench.tune(unet, call(noisy(1, 16, 16, 4), 5, text()))
    assert check(unet, twin, noisy(1, 15, 17, 4), 5, text()).sample.shape[-2:] == (15, 17)


def test_6_residuals_of_one_and_of_several_controlnets(bench: Bench, unet: Any) -> None:
    twin = eager_twin(unet)

    def residuals(scale: float) -> dict[str, Any]:
        shapes = [(32, 16), (32, 16), (32, 8), (64, 8)]
        down = tuple(torch.randn(1, channels, size, size) * scale for channels, size in shapes)
        return {"down_block_additional_residuals": down, "mid_block_additional_residual": torch.randn(1, 64, 8, 8)}

    x = noisy(1, 16, 16, 4)
    bench.tune(unet, call(x, 5, text(), **residuals(0.1)), call(x, 5, text()))
    for _ in range(2):
        check(unet, twin, x, 5, text(), **residuals(1.0), engine=True)
        check(unet, twin, x, 5, text(), engine=True)
    other = residuals(1.0)
    other["mid_block_additional_residual"] = other["mid_block_additional_residual"].expand(2, -1, -1, -1)
    check(unet, twin, noisy(2, 16, 16, 4), 5, text(2), **other)


def test_7_outputs_keep_their_class(bench: Bench, bert: Any, small_unet: Any) -> None:
    twin = eager_twin(bert)
    ids = tokens()
    bench.tune(bert, call(ids), call(ids, return_dict=False), call(ids, output_hidden_states=True))
    for settings in ({}, {"return_dict": False}, {"output_hidden_states": True}):
        output = check(bert, twin, tokens(), engine=True, **settings)
        if settings.get("return_dict", True):
            assert torch.equal(output.last_hidden_state, output[0])
            assert output.keys() == twin(ids, **settings).keys()
    check(bert, twin, tokens(), output_hidden_states=True, return_dict=False, engine=False)
    unet_twin = eager_twin(small_unet)
    bench.tune(small_unet, call(noisy(), 3), call(noisy(), 3, return_dict=False))
    assert isinstance(check(small_unet, unet_twin, noisy(), 3, return_dict=False, engine=True), tuple)
    output = check(small_unet, unet_twin, noisy(), 3, engine=True)
    assert torch.equal(output.sample, output[0])
    assert torch.equal(output.sample, output["sample"])


def test_7_asking_for_hidden_states_later_costs_no_engine(bench: Bench, bert: Any) -> None:
    """Transformers leaves hooks on the layers when it was asked for hidden states once."""
    twin = eager_twin(bert)
    bench.tune(bert, call(tokens()))
    check(bert, twin, tokens(), output_hidden_states=True, engine=False)
    check(bert, twin, tokens(), engine=True)


def test_7_hidden_states_are_collected_from_tuned_parts(bench: Bench, bert: Any) -> None:
    bench.backend = FrozenBackend(refuse=["BertModel", "BertEncoder"])
    twin = eager_twin(bert)
    bench.session(bert, min_samples=2)
    for settings in ({}, {}, {}, {"output_hidden_states": True}, {}, {"output_attentions": True}):
        check(bert, twin, tokens(), **settings)
    assert any(one.engines for one in patched_modules(bert))


def test_9_attributes_and_config_are_those_of_the_model(bench: Bench, unet: Any) -> None:
    twin = eager_twin(unet)
    bench.tune(unet, call(noisy(1, 16, 16, 4), 5, text()))
    assert unet.dtype == twin.dtype
    assert unet.device == twin.device
    assert unet.config == twin.config
    assert unet.config.sample_size == 32
    assert [name for name, _ in unet.named_modules()] == [name for name, _ in twin.named_modules()]
    assert unet.attn_processors.keys() == twin.attn_processors.keys()
    assert unet.mid_block.attentions[0] is unet.get_submodule("mid_block.attentions.0")


def flip_config(model: Any) -> None:
    model.config.output_hidden_states = True


def test_15_a_config_flag_is_seen(bench: Bench, bert: Any) -> None:
    twin = eager_twin(bert)
    bench.tune(bert, call(tokens()))
    check(bert, twin, tokens(), engine=True)
    for model in (bert, twin):
        flip_config(model)
    output = check(bert, twin, tokens(), engine=False)
    assert len(output.hidden_states) == 3


class Loud:
    """An attention processor that gives another answer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * 1.5


SWITCHES = {
    "FreeU": lambda m: m.enable_freeu(s1=0.9, s2=0.2, b1=1.4, b2=1.6),
    "an attention processor": lambda m: m.set_attn_processor({k: Loud(p) for k, p in m.attn_processors.items()}),
    "fused projections": lambda m: m.fuse_qkv_projections(),
    "another attention backend": lambda m: m.set_default_attn_processor(),
    "sliced attention": lambda m: m.set_attention_slice("max"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_15_switches_in_python_are_seen(bench: Bench, unet: Any, name: str) -> None:
    twin = eager_twin(unet)
    args = (noisy(1, 16, 16, 4), 5, text())
    bench.tune(unet, call(*args))
    check(unet, twin, *args, engine=True)
    for model in (unet, twin):
        SWITCHES[name](model)
    check(unet, twin, *args, engine=False)


def test_15_switching_freeu_off_again_gives_the_right_answer(bench: Bench, unet: Any) -> None:
    twin = eager_twin(unet)
    args = (noisy(1, 16, 16, 4), 5, text())
    bench.tune(unet, call(*args))
    for model in (unet, twin):
        model.enable_freeu(s1=0.9, s2=0.2, b1=1.4, b2=1.6)
    check(unet, twin, *args, engine=False)
    for model in (unet, twin):
        model.disable_freeu()
    check(unet, twin, *args)


@pytest.mark.parametrize("when", ["before", "after"])
def test_16_cpu_offload_before_and_after_tuning(bench: Bench, unet: Any, when: str) -> None:
    from accelerate import cpu_offload

    twin = eager_twin(unet)
    args = (noisy(1, 16, 16, 4), 5, text())
    if when == "before":
        cpu_offload(unet, execution_device=torch.device("cpu"))
    bench.tune(unet, call(*args))
    if when == "after":
        check(unet, twin, *args, engine=True)
        cpu_offload(unet, execution_device=torch.device("cpu"))
    for _ in range(2):
        check(unet, twin, *args)


@pytest.mark.parametrize("when", ["before", "after"])
def test_17_layerwise_casting_equals_the_cast_eager(bench: Bench, small_unet: Any, when: str) -> None:
    twin = eager_twin(small_unet)

    def cast(model: Any) -> None:
        model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)

    cast(twin)
    if when == "before":
        cast(small_unet)
    bench.tune(small_unet, call(noisy(), 3))
    if when == "after":
        cast(small_unet)
    for _ in range(2):
        check(small_unet, twin, noisy(), 3)


@pytest.mark.parametrize("when", ["before", "after"])
def test_17_group_offload_equals_eager(bench: Bench, small_unet: Any, when: str) -> None:
    from diffusers.hooks import apply_group_offloading

    twin = eager_twin(small_unet)

    def offload() -> None:
        device = torch.device("cpu")
        apply_group_offloading(small_unet, onload_device=device, offload_device=device, offload_type="leaf_level")

    if when == "before":
        offload()
    bench.tune(small_unet, call(noisy(), 3))
    if when == "after":
        offload()
    for _ in range(2):
        check(small_unet, twin, noisy(), 3)


def test_18_a_dispatched_model_keeps_its_hook(bench: Bench, bert: Any) -> None:
    from accelerate import dispatch_model

    twin = eager_twin(bert)
    dispatch_model(bert, device_map={"": "cpu"}, force_hooks=True)
    hook = bert._hf_hook
    calls: list[Any] = []
    inner = hook.pre_forward
    hook.pre_forward = lambda module, *args, **kwargs: calls.append(module) or inner(module, *args, **kwargs)
    bench.tune(bert, call(tokens()))
    calls.clear()
    for _ in range(3):
        check(bert, twin, tokens())
    assert bert._hf_hook is hook
    assert [one for one in calls if one is bert] == [bert] * 3


def test_20_decode_and_encode_reach_engines(bench: Bench, vae: Any) -> None:
    twin = eager_twin(vae)
    image, latent = noisy(1, 16, 16), noisy(1, 8, 8, 4)
    bench.tune(vae, lambda m: (m.encode(image), m.decode(latent)))
    before = stats(vae).engine_calls
    with torch.no_grad():
        assert_same(vae.decode(latent).sample, twin.decode(latent).sample)
        ours, theirs = vae.encode(image).latent_dist, twin.encode(image).latent_dist
    assert stats(vae).engine_calls == before + 2
    assert type(ours) is type(theirs)
    samples = [dist.sample(generator=torch.Generator().manual_seed(3)) for dist in (ours, theirs)]
    assert_same(*samples)


@pytest.mark.parametrize("switch", ["enable_tiling", "enable_slicing"])
def test_21_tiling_and_slicing_may_be_switched_after_tuning(bench: Bench, vae: Any, switch: str) -> None:
    twin = eager_twin(vae)
    latent = noisy(2, 32, 32, 4)
    bench.tune(vae, lambda m: (m.decode(latent), m(noisy(2, 32, 32))))
    for on in (True, False):
        for model in (vae, twin):
            getattr(model, switch if on else switch.replace("enable", "disable"))()
        with torch.no_grad():
            assert_same(vae.decode(latent).sample, twin.decode(latent).sample)
            image = noisy(2, 32, 32)
            assert_same(vae(image).sample, twin(image).sample)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, None, "autocast"])
def test_22_modes_unlike_those_at_tune_time(bench: Bench, bert: Any, context: Any) -> None:
    twin = eager_twin(bert)
    ids = tokens()
    bench.tune(bert, call(ids))
    if context is None:
        for model in (bert, twin):
            model(ids).last_hidden_state.square().sum().backward()
        grads = [[p.grad for p in model.parameters()] for model in (bert, twin)]
        assert_same(*grads)
        assert stats(bert).engine_calls == 0
        return
    with torch.autocast("cpu", dtype=torch.bfloat16) if context == "autocast" else context():
        assert_same(bert(ids), twin(ids)) if context != "autocast" else check(bert, twin, ids, engine=False)


def test_24_the_mode_is_restored_and_training_runs_eager(bench: Bench, bert: Any) -> None:
    bert.encoder.layer[0].train()
    modes = {name: module.training for name, module in bert.named_modules()}
    bench.tune(bert, call(tokens()))
    assert {name: module.training for name, module in bert.named_modules()} == modes
    bert.eval()
    other = copy.deepcopy(bert)
    bench.tune(bert, call(tokens()))
    check(bert, other, tokens(), engine=True)
    ids = tokens()
    for model in (bert, other):
        model.train()
    outputs = []
    for model in (bert, other):
        torch.manual_seed(1)
        with torch.no_grad():
            outputs.append(model(ids).last_hidden_state)
    assert_same(*outputs)
    assert state(bert) == "tuned"
    bert.eval()
    other.eval()
    check(bert, other, tokens(), engine=True)
