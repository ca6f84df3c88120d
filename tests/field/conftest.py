"""The small fixtures of the field cases, and the kit of ``tests/jit``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "jit"))

from jit_kit import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Tunes things into ``tmp_path`` with engines that are frozen as compiled ones are."""
    return Bench(tmp_path / "engines")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Equal numbers in every run, and one thread: these models are too small for more."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reinitialised(model: Any) -> Any:
    """Random weights everywhere: layers that start at zero would hide what is behind them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


@pytest.fixture
def small_unet() -> Any:
    from diffusers import UNet2DModel

    return reinitialised(
        UNet2DModel(
            sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8,), layers_per_block=1,
            norm_num_groups=4, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        )
    )  # fmt: skip


@pytest.fixture
def unet() -> Any:
    from diffusers import UNet2DConditionModel

    return reinitialised(
        UNet2DConditionModel(
            sample_size=32, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32, norm_num_groups=8, attention_head_dim=8,
        )
    )  # fmt: skip


@pytest.fixture
def vae() -> Any:
    from diffusers import AutoencoderKL

    return reinitialised(
        AutoencoderKL(
            block_out_channels=[32, 64], down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=4, norm_num_groups=8, sample_size=32,
        )
    )  # fmt: skip


@pytest.fixture
def text_encoder() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            hidden_size=32, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4, vocab_size=1000,
            max_position_embeddings=77, bos_token_id=0, eos_token_id=2, pad_token_id=1,
        )
    ).eval()  # fmt: skip


@pytest.fixture
def bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99,
            max_position_embeddings=64,
        )
    ).eval()  # fmt: skip


def tokenizer(folder: Path) -> Any:
    import json

    from transformers import CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "!", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16, pad_token="!",
    )  # fmt: skip


@pytest.fixture
def sd(unet: Any, vae: Any, text_encoder: Any, tmp_path: Path) -> Any:
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer(tmp_path / "tokenizer"),
        unet=unet,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
