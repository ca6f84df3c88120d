"""Methods other than ``forward`` reach the engines of what they call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKLOutput
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from real_kit import Tuned, answers, assert_same, noise, tiny_vae


@pytest.fixture
def vae(drawing: Any, tune: Any) -> Tuned:
    """Its decoder's engine is that of the pipeline's."""
    del drawing
    vae: Tuned = tune(
        tiny_vae(), [lambda vae: vae.encode(noise(1, 3, 32, 32)), lambda vae: vae.decode(noise(1, 4, 16, 16))]
    )
    return vae


def test_encode_and_decode_reach_engines(vae: Tuned) -> None:
    with answers(vae.module) as seen:
        out = vae.same(call=lambda model: model.decode(noise(1, 4, 16, 16, seed=1)))
        assert type(out) is DecoderOutput
        assert vae.same(call=lambda model: model.decode(noise(1, 4, 16, 16), return_dict=False))[0].shape[-1] == 32
        vae.same(call=lambda model: model.encode(noise(1, 3, 32, 32, seed=1)).latent_dist.parameters)
    assert (seen.engines, seen.eager) == (3, {})


def test_the_encoded_distribution_is_one_and_follows_the_generator(vae: Tuned) -> None:
    pictures = noise(1, 3, 32, 32, seed=2)
    with torch.no_grad(), answers(vae.module) as seen:
        ours, theirs = vae.module.encode(pictures), vae.twin.encode(pictures)
    assert type(ours) is type(theirs) is AutoencoderKLOutput
    assert type(ours.latent_dist) is DiagonalGaussianDistribution
    assert (seen.engines, seen.eager) == (1, {})
    assert_same(ours.latent_dist.mode(), theirs.latent_dist.mode())
    draws = []
    for seed in (3, 3, 4):
        a, b = (out.latent_dist.sample(torch.Generator().manual_seed(seed)) for out in (ours, theirs))
        assert_same(a, b)
        draws.append(a)
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2], atol=1e-2)


def test_forward_of_the_whole_autoencoder_reaches_the_engines_within(vae: Tuned) -> None:
    pictures = noise(1, 3, 32, 32, seed=5)
    with answers(vae.module) as seen:
        vae.same(pictures)
        vae.same(call=lambda model: model(pictures, sample_posterior=True, generator=torch.Generator().manual_seed(1)))
    assert (seen.engines, seen.eager) == (4, {})
