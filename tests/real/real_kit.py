"""What the tests with real engines share: tiny models, comparison with the eager twin, and counting who answered.

The right answer is always that of the *eager twin*: a deep copy taken before tuning.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel, UNet2DModel
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import aitune_hf
from aitune_hf import TuneConfig
from aitune_hf.jit.dispatcher import FIRST_CALL

ATOL = 1e-4
Call = Mapping[str, Any]


def config_for(cache: Path, **settings: Any) -> TuneConfig:
    """Inductor alone, whose engines these tests are about; timing decides nothing."""
    known = {"backends": ("inductor",), "strategy": "first_working", "progress": False, "min_share": 0.0}
    return TuneConfig(cache_dir=cache, **{**known, **settings})


# -- models ------------------------------------------------------------------------------------------------------------


def tiny_unet2d() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    ).eval()


def tiny_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
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


def tiny_vae() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    ).eval()


def tiny_clip() -> CLIPTextModel:
    torch.manual_seed(0)
    config = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=1000,
        max_position_embeddings=16,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return CLIPTextModel(config).eval()


def tiny_bert(seed: int = 0) -> BertModel:
    torch.manual_seed(seed)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=99,
        max_position_embeddings=64,
        intermediate_size=64,
    )
    return BertModel(config).eval()


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def tiny_stable_diffusion(vocabulary: Path) -> StableDiffusionPipeline:
    letters = [chr(ord("a") + index) for index in range(26)]
    tokens = ["<|pad|>", "<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    (vocabulary / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (vocabulary / "merges.txt").write_text("#version: 0.2\n")
    pipe = StableDiffusionPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_clip(),
        tokenizer=CLIPTokenizer(str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"), model_max_length=16),
        unet=tiny_unet(),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Block(nn.Module):
    """A feed-forward block: the cheapest thing to compile that has weights of every rank."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))
        return y


# -- calls -------------------------------------------------------------------------------------------------------------


def bert_call(batch: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a tokenizer gives, with some padding in the first row."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 + 1 :] = 0
    return {
        "input_ids": torch.randint(3, 99, (batch, length), generator=draw),
        "token_type_ids": torch.zeros(batch, length, dtype=torch.long),
        "attention_mask": mask,
    }


#: Lengths 1 to 17 at batches 1 to 3: one engine.
BERT_SAMPLES = [bert_call(1, 5), bert_call(3, 17)]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unet_call(batch: int, height: int, width: int, seed: int = 0) -> dict[str, Any]:
    """The form in which the pipeline calls its UNet."""
    return {
        "sample": noise(batch, 4, height, width, seed=seed),
        "timestep": torch.tensor(501),
        "encoder_hidden_states": noise(batch, 16, 32, seed=seed + 1),
        "timestep_cond": None,
        "cross_attention_kwargs": None,
        "added_cond_kwargs": None,
        "return_dict": False,
    }


# -- comparison --------------------------------------------------------------------------------------------------------


def assert_same(ours: Any, theirs: Any, atol: float = ATOL, where: str = "output") -> None:
    """Equal class, structure, shape and dtype, and values as close as asked."""
    assert type(ours) is type(theirs), f"{where}: {type(ours).__name__}, eager gives {type(theirs).__name__}"
    if isinstance(theirs, torch.Tensor):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), where
        assert ours.requires_grad == theirs.requires_grad, where
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0.0, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], atol, f"{where}.{key}")
            if isinstance(key, str) and hasattr(theirs, key):
                assert getattr(ours, key) is ours[key], f"{where}.{key}"
    elif isinstance(theirs, Sequence) and not isinstance(theirs, str):
        assert len(ours) == len(theirs), where
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, atol, f"{where}[{index}]")
    else:
        assert ours == theirs, where


@dataclass
class Answers:
    """Who answered the calls of a block: calls by engines, calls by eager with their reasons, engines built."""

    engines: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    builds: int = 0

    @property
    def reasons(self) -> str:
        return "; ".join(self.eager)


@contextmanager
def answers(target: Any, module: str | None = None) -> Iterator[Answers]:
    """Count within the block, over the whole target or one of its modules.

    The check of an engine's first call after it came from a cache is no reason of its own and is left out.
    """

    def read() -> Any:
        found = aitune_hf.stats(target)
        return found if module is None else found.modules[module]

    def eager_calls() -> dict[str, int]:
        return {reason: count for reason, count in read().eager_calls.items() if reason != FIRST_CALL}

    before, eager = copy.deepcopy((read().engine_calls, read().builds)), eager_calls()
    seen = Answers()
    yield seen
    seen.engines, seen.builds = read().engine_calls - before[0], read().builds - before[1]
    new = {reason: count - eager.get(reason, 0) for reason, count in eager_calls().items()}
    seen.eager = {reason: count for reason, count in new.items() if count}


def _plain_call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@dataclass
class Tuned:
    """A tuned module and its eager twin."""

    module: Any
    twin: Any
    report: Any

    def same(self, *args: Any, **kwargs: Any) -> Any:
        """Call both, compare, and return the tuned module's answer.

        Of the keyword arguments ``call`` runs the model that it is given, and ``atol`` is for the comparison.
        """
        atol, run = kwargs.pop("atol", ATOL), kwargs.pop("call", None) or _plain_call
        with torch.no_grad():
            ours, theirs = run(self.module, *args, **kwargs), run(self.twin, *args, **kwargs)
        assert_same(ours, theirs, atol)
        return ours

    def on_both(self, change: Callable[[Any], object]) -> None:
        change(self.module)
        change(self.twin)


def tuned_with_twin(module: nn.Module, samples: Any, config: TuneConfig) -> Tuned:
    twin = copy.deepcopy(module)
    report = aitune_hf.tune(module, samples, config)
    return Tuned(module, twin, report)


class Drawing:
    """A tuned pipeline and its eager twin."""

    #: Height, width, guidance and pictures per prompt: all of them make one engine of each module.
    CALLS = ((48, 32, 5.0, 1), (32, 48, 1.0, 1), (64, 64, 5.0, 1), (32, 32, 5.0, 3))

    def __init__(self, pipe: Any, twin: Any) -> None:
        self.pipe, self.twin = pipe, twin

    @staticmethod
    def arguments(height: int, width: int, guidance: float = 5.0, count: int = 1) -> dict[str, Any]:
        return {
            "prompt": "a fox",
            "height": height,
            "width": width,
            "guidance_scale": guidance,
            "num_images_per_prompt": count,
            "num_inference_steps": 2,
            "output_type": "pt",
        }

    @classmethod
    def draw(cls, pipe: Any, *call: Any, seed: int = 0) -> torch.Tensor:
        pictures: torch.Tensor = pipe(**cls.arguments(*call), generator=torch.Generator().manual_seed(seed)).images
        return pictures

    def same(self, *call: Any, seed: int = 0) -> torch.Tensor:
        """Draw with both and compare."""
        ours, theirs = self.draw(self.pipe, *call, seed=seed), self.draw(self.twin, *call, seed=seed)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0.0)
        return ours
