"""Sizes, batches and lengths: those of the samples never compile again, all others are answered right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_kit import Tuned, answers, bert_call, noise, tiny_clip, tiny_unet, tiny_unet2d, unet_call


@pytest.mark.parametrize("size", [(48, 32), (32, 48), (64, 64)])
def test_sizes_of_the_samples_are_drawn_by_engines(drawing: Any, size: tuple[int, int]) -> None:
    with answers(drawing.pipe) as seen:
        picture = drawing.same(*size)
    assert picture.shape == (1, 3, *size)
    assert (seen.engines, seen.eager, seen.builds) == (5, {}, 0)


def test_sizes_between_those_of_the_samples_are_drawn_by_engines(drawing: Any) -> None:
    with answers(drawing.pipe) as seen:
        drawing.same(40, 56)
    assert (seen.engines, seen.eager, seen.builds) == (5, {}, 0)


def test_an_unseen_size_is_eager_said_once_and_builds_nothing(drawing: Any, caplog: pytest.LogCaptureFixture) -> None:
    with answers(drawing.pipe) as seen, caplog.at_level(logging.WARNING, "aitune_hf"):
        for _ in range(3):
            drawing.same(80, 80)
    assert seen.builds == 0
    assert seen.engines == 6, "the text encoder does not know about sizes"
    assert len(seen.eager) == 2, "one reason for the UNet, one for the decoder"
    assert all("outside the verified shapes" in reason for reason in seen.eager)
    said = [record.getMessage() for record in caplog.records if "runs eager" in record.getMessage()]
    assert sorted(line.split()[0] for line in said) == ["unet", "vae.decoder"]


def test_guidance_and_pictures_per_prompt_change_the_batch(drawing: Any) -> None:
    with answers(drawing.pipe) as seen:
        for guidance, count in ((5.0, 1), (1.0, 1), (5.0, 3), (5.0, 1)):
            assert drawing.same(32, 32, guidance, count).shape[0] == count
    assert (seen.eager, seen.builds) == ({}, 0)
    assert seen.engines == 5 + 4 + 5 + 5, "without guidance there is no negative prompt to encode"


def test_a_unet_gives_back_sizes_that_its_factor_does_not_divide(tune: Callable[..., Tuned]) -> None:
    unet = tune(tiny_unet(), [unet_call(1, 15, 17)])
    with answers(unet.module) as seen:
        (out,) = unet.same(**unet_call(1, 15, 17, seed=3))
    assert out.shape == (1, 4, 15, 17)
    assert (seen.engines, seen.eager) == (1, {})


@pytest.mark.parametrize("size", [(15, 17), (17, 16), (16, 17), (31, 31), (18, 30)])
def test_an_engine_for_even_sizes_is_not_given_odd_ones(drawing: Any, size: tuple[int, int]) -> None:
    unet = Tuned(drawing.pipe.unet, drawing.twin.unet, None)
    with answers(drawing.pipe) as seen:
        (out,) = unet.same(**unet_call(2, *size))
    assert out.shape == (2, 4, *size)
    assert seen.engines + sum(seen.eager.values()) == 1
    if size == (18, 30):
        assert seen.engines == 1
    elif seen.eager:
        assert "outside the verified shapes" in seen.reasons


def test_twelve_lengths_and_three_batches_need_one_build(bert: Tuned) -> None:
    lengths = (3, 4, 5, 8, 11, 13, 16, 17, 18, 33, 50, 64)
    with answers(bert.module) as seen:
        for batch in (1, 2, 3):
            for length in lengths:
                bert.same(**bert_call(batch, length, seed=length))
    assert bert.report.builds <= 1
    assert seen.builds == 0
    assert seen.engines == 3 * 8
    assert sum(seen.eager.values()) == 3 * 4
    assert "outside the verified shapes" in seen.reasons


def test_a_text_encoder_tuned_on_one_prompt_takes_four(tune: Callable[..., Tuned]) -> None:
    def prompts(count: int) -> dict[str, Any]:
        ids = torch.randint(3, 1000, (count, 16), generator=torch.Generator().manual_seed(count))
        ids[:, -1] = 2
        return {"input_ids": ids, "attention_mask": None}

    text = tune(tiny_clip(), [prompts(1)])
    with answers(text.module) as seen:
        text.same(**prompts(1))
        text.same(**prompts(4))
        text.same(**prompts(1))
    assert (seen.engines, sum(seen.eager.values()), seen.builds) == (2, 1, 0)
    assert "axis 0" in seen.reasons


def test_a_unet_tuned_on_one_picture_takes_three_and_tuned_on_both_uses_engines(tune: Callable[..., Tuned]) -> None:
    def call(batch: int) -> dict[str, Any]:
        return {"sample": noise(batch, 3, 8, 8, seed=batch), "timestep": torch.tensor(3)}

    one = tune(tiny_unet2d(), [call(1)])
    with answers(one.module) as seen:
        one.same(**call(1))
        one.same(**call(3))
    assert (seen.engines, sum(seen.eager.values()), seen.builds) == (1, 1, 0)
    assert "axis 0" in seen.reasons

    both = tune(tiny_unet2d(), [call(1), call(3)])
    with answers(both.module) as seen:
        for batch in (1, 2, 3):
            both.same(**call(batch))
    assert (seen.engines, seen.eager, seen.builds) == (3, {}, 0)
