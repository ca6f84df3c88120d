"""What is switched on a live model after tuning: the answer follows the eager twin, whoever gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor
from real_kit import Block, Drawing, Tuned, answers, assert_same, bert_call, noise
from torch import nn

ENGINE: tuple[int, dict[str, int]] = (1, {})


@contextmanager
def switched(drawing: Drawing, on: Callable[[Any], object], off: Callable[[Any], object]) -> Iterator[Drawing]:
    for pipe in (drawing.pipe, drawing.twin):
        on(pipe)
    try:
        yield drawing
    finally:
        for pipe in (drawing.pipe, drawing.twin):
            off(pipe)


class LouderAttention(AttnProcessor):  # type: ignore[misc]
    """Another answer than the standard processor's, so that a switch that is missed shows."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        louder: torch.Tensor = 1.5 * super().__call__(*args, **kwargs)
        return louder


def test_another_attention_processor_counts_at_once(drawing: Drawing) -> None:
    standard = dict(drawing.pipe.unet.attn_processors)
    before = drawing.same(32, 32)

    def off(pipe: Any) -> None:
        pipe.unet.set_attn_processor(dict(standard))

    with switched(drawing, lambda pipe: pipe.unet.set_attn_processor(LouderAttention()), off):
        with answers(drawing.pipe) as seen:
            changed = drawing.same(32, 32)
        assert not torch.allclose(changed, before, atol=1e-3)
        assert seen.engines == 3
        assert sum(seen.eager.values()) == 2
        assert "processor" in seen.reasons
    assert_same(drawing.same(32, 32), before)


def test_freeu_counts_at_once(own_drawing: Drawing) -> None:
    before = own_drawing.same(32, 32)
    for pipe in (own_drawing.pipe, own_drawing.twin):
        pipe.enable_freeu(s1=0.5, s2=0.3, b1=1.7, b2=1.9)
    with answers(own_drawing.pipe) as seen:
        own_drawing.same(32, 32)
    assert (seen.engines, sum(seen.eager.values())) == (3, 2)
    for pipe in (own_drawing.pipe, own_drawing.twin):
        pipe.disable_freeu()
    assert_same(own_drawing.same(32, 32), before)


def test_fused_projections_give_the_same_picture(own_drawing: Drawing) -> None:
    before = own_drawing.same(32, 32)
    for pipe in (own_drawing.pipe, own_drawing.twin):
        pipe.fuse_qkv_projections()
    with answers(own_drawing.pipe) as seen:
        assert_same(own_drawing.same(32, 32), before)
    assert (seen.engines, sum(seen.eager.values())) == (2, 3), "only the text encoder is as it was"
    for pipe in (own_drawing.pipe, own_drawing.twin):
        pipe.unfuse_qkv_projections()
    assert_same(own_drawing.same(32, 32), before)


def test_tiling_and_slicing_after_tuning(drawing: Drawing) -> None:
    latents = noise(2, 4, 24, 24)

    def decode(pipe: Any) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = pipe.vae.decode(latents, return_dict=False)[0]
        return out

    whole = decode(drawing.pipe)
    assert_same(whole, decode(drawing.twin))
    with (
        switched(drawing, lambda pipe: pipe.vae.enable_tiling(), lambda pipe: pipe.vae.disable_tiling()),
        answers(drawing.pipe, "vae.decoder") as seen,
    ):
        tiled = decode(drawing.pipe)
        assert_same(tiled, decode(drawing.twin))
    assert not torch.allclose(tiled, whole, atol=1e-3), "tiles change the picture, or this shows nothing"
    assert seen.engines + sum(seen.eager.values()) == 4
    with (
        switched(drawing, lambda pipe: pipe.vae.enable_slicing(), lambda pipe: pipe.vae.disable_slicing()),
        answers(drawing.pipe, "vae.decoder") as seen,
    ):
        assert_same(decode(drawing.pipe), decode(drawing.twin))
    assert (seen.engines, seen.eager) == (2, {})


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer, as PEFT puts one there."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features, generator=draw))
        self.b = nn.Parameter(torch.randn(base.out_features, rank, generator=draw))  # Not zero, as a fresh one is.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return y

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += self.b @ self.a
        return self.base


def test_an_adapter_added_after_tuning_counts_and_merged_weights_are_taken_up(bert: Tuned) -> None:
    call = bert_call(2, 9)
    plain = bert.same(**call)["last_hidden_state"]

    def attention(model: Any) -> Any:
        return model.encoder.layer[0].attention.self

    def add(model: Any) -> None:
        attention(model).query = Adapter(attention(model).query)

    def merge(model: Any) -> None:
        attention(model).query = attention(model).query.merged()

    bert.on_both(add)
    with answers(bert.module) as seen:
        adapted = bert.same(**call)["last_hidden_state"]
    assert not torch.allclose(adapted, plain, atol=1e-2)
    assert (seen.engines, sum(seen.eager.values())) == (0, 1)
    assert "query changed after tuning" in seen.reasons

    bert.on_both(merge)
    with answers(bert.module) as seen:
        assert_same(bert.same(**call)["last_hidden_state"], adapted)
    assert (seen.engines, seen.eager) == ENGINE


def test_autocast_is_another_graph(bert: Tuned) -> None:
    call = bert_call(2, 9)

    def under_autocast(model: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**call)

    with answers(bert.module) as seen:
        out = bert.same(call=under_autocast, atol=1e-6)
    assert out.pooler_output.dtype == torch.bfloat16
    assert seen.engines == 0
    assert seen.reasons == "a form of call that was not seen in tuning"
    with answers(bert.module) as seen:
        bert.same(**call)
    assert (seen.engines, seen.eager) == ENGINE


def test_inference_mode_uses_the_engine(bert: Tuned) -> None:
    call = bert_call(2, 9)
    with answers(bert.module) as seen, torch.inference_mode():
        ours, theirs = bert.module(**call), bert.twin(**call)
        assert_same(ours, theirs)
        assert ours.last_hidden_state.is_inference() == theirs.last_hidden_state.is_inference()
    assert (seen.engines, seen.eager) == ENGINE


def test_gradients_come_from_eager_and_are_equal(bert: Tuned) -> None:
    call = bert_call(2, 9)
    with answers(bert.module) as seen:
        for model in (bert.module, bert.twin):
            model(**call).last_hidden_state.square().mean().backward()
    assert (seen.engines, seen.reasons) == (0, "gradients are wanted")
    for (name, ours), theirs in zip(bert.module.named_parameters(), bert.twin.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            assert_same(ours.grad, theirs.grad, where=name)

    bert.on_both(lambda model: model.requires_grad_(False))
    with answers(bert.module) as seen:
        assert_same(bert.module(**call), bert.twin(**call))
    assert (seen.engines, seen.eager) == ENGINE, "with nothing to differentiate, grad mode does not matter"


def test_gradients_of_the_input_come_from_eager(tune: Callable[..., Tuned]) -> None:
    block = tune(Block().eval().requires_grad_(False), [noise(3, 8)])
    gradients = []
    with answers(block.module) as seen:
        for model in (block.module, block.twin):
            x = noise(3, 8, seed=1).requires_grad_()
            model(x).sum().backward()
            gradients.append(x.grad)
        block.same(noise(3, 8, seed=2))
    assert_same(gradients[0], gradients[1])
    assert (seen.engines, seen.eager) == (1, {"gradients are wanted": 1})


def test_training_mode_runs_eager_with_its_dropout_and_eval_comes_back(bert: Tuned) -> None:
    call = bert_call(2, 9)
    plain = bert.same(**call)["last_hidden_state"]
    bert.on_both(lambda model: model.train())

    def seeded(model: Any) -> Any:
        torch.manual_seed(5)
        return model(**call)

    with answers(bert.module) as seen:
        dropped = bert.same(call=seeded)["last_hidden_state"]
    assert not torch.allclose(dropped, plain, atol=1e-2)
    assert (seen.engines, sum(seen.eager.values())) == (0, 1)

    bert.on_both(lambda model: model.eval())
    bert.on_both(lambda model: model.encoder.layer[0].train())
    with answers(bert.module) as seen:
        bert.same(call=seeded)
    assert (seen.engines, sum(seen.eager.values())) == (0, 1), "one block in training mode is enough"

    bert.on_both(lambda model: model.eval())
    with answers(bert.module) as seen:
        bert.same(**call)
    assert (seen.engines, seen.eager) == ENGINE


def test_tuning_leaves_the_modes_as_found(tune: Callable[..., Tuned]) -> None:
    model = nn.Sequential(Block(), Block(dropout=0.5)).eval()
    model[1].train()
    blocks = tune(model, [noise(3, 8)])
    assert [part.training for part in blocks.module.modules()] == [part.training for part in blocks.twin.modules()]

    def seeded(model: Any) -> Any:
        torch.manual_seed(3)
        return model(noise(3, 8))

    blocks.same(call=seeded)
    assert blocks.report.rows[0].backend == "eager"


def test_seeds_are_followed_and_tuning_moves_nothing_random(own_drawing: Drawing) -> None:
    drawing, pipe = own_drawing, own_drawing.pipe
    first, again, other = drawing.same(32, 32, seed=1), drawing.same(32, 32, seed=1), drawing.same(32, 32, seed=2)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=1e-3)

    generator = torch.Generator().manual_seed(4)
    global_state, own_state = torch.get_rng_state(), generator.get_state()
    scheduler = str(vars(pipe.scheduler))
    report = pipe.tune([Drawing.arguments(*call) for call in Drawing.CALLS], generator=generator)
    assert (report.builds, report.loads) == (0, 3)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert torch.equal(generator.get_state(), own_state)
    assert str(vars(pipe.scheduler)) == scheduler
    with answers(pipe) as seen:
        assert torch.equal(drawing.same(32, 32, seed=1), first)
    assert (seen.engines, seen.eager) == (5, {})
