"""Train a small latent diffusion pipeline that writes digits: "a handwritten seven" draws a seven.

The result is an ordinary :class:`diffusers.StableDiffusionPipeline` (``CLIPTextModel``, ``CLIPTokenizer``,
``AutoencoderKL``, ``UNet2DConditionModel``, ``DDIMScheduler``), only small: under 4 MB of float32 weights.

The steps, one function each:

1. *data*: the generator part of scikit-learn's digits (see ``judge.py``), drawn as 64x64 strokes, lightly
   moved;
2. *tokenizer*: byte-pair encoding over the words of the captions, with all bytes as a fallback;
3. *VAE*: reconstruction plus a small KL term, then the scaling factor of its latents;
4. *text encoder and UNet*: trained jointly on v-prediction, with dropped captions and averaged weights;
5. *save* and *judge*.

Command line::

    python examples/digits/train.py --output-dir examples/digits/model
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import string
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from judge import (
    IMAGE_SIZE,
    WORDS,
    accuracy,
    generate,
    load_pipeline,
    load_split,
    random_transforms,
    real_accuracy,
    render,
    save_grid,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

HERE = Path(__file__).resolve().parent
MODEL_CARD = HERE.parents[1] / "model_cards" / "digits.md"
LATENT_SIZE = 8
MAX_TOKENS = 32
TEXT_WIDTH = 48
BOS, EOS = "<|startoftext|>", "<|endoftext|>"

TEMPLATES = (
    "a handwritten {}",
    "a handwritten {}",
    "a handwritten {}",
    "handwritten {}",
    "a handwritten digit {}",
    "the handwritten digit {}",
    "a handwritten number {}",
    "the digit {}",
    "the number {}",
    "a hand drawn {}",
    "a drawing of a {}",
    "a drawing of the digit {}",
    "a picture of a {}",
    "a picture of the number {}",
    "a photo of a {}",
    "an image of the digit {}",
    "a {} written by hand",
    "please draw a {}",
    "write the number {}",
    "digit: {}",
    "a {}",
    "{}",
    "{}",
)


def log(message: str, start: float) -> None:
    """Print one line of progress with the seconds since ``start``."""
    print(f"[{time.perf_counter() - start:6.0f} s] {message}", flush=True)


# ---------- captions ----------


def caption(label: int, rng: random.Random) -> str:
    """Write a caption for a digit: a template, the digit as word or numeral, at times a meaningless word."""
    name = WORDS[label] if rng.random() < 0.7 else str(label)
    text = rng.choice(TEMPLATES).format(name)
    if rng.random() < 0.15:
        # Words outside the vocabulary are split into pieces; the model learns here to look past them.
        words = text.split()
        filler = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8)))
        words.insert(rng.randint(0, len(words)), filler)
        text = " ".join(words)
    return text


# ---------- tokenizer ----------


def learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Learn byte-pair merges until each of the words is a single token.

    This is the usual greedy rule: merge the most frequent neighbouring pair (ties: alphabetical order).  As
    in CLIP, the last symbol of a word carries ``</w>``.
    """
    counts = Counter((*word[:-1], word[-1] + "</w>") for word in words)
    merges: list[tuple[str, str]] = []
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for symbols, count in counts.items():
            for pair in pairwise(symbols):
                pairs[pair] += count
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        counts = Counter({_merge(symbols, best): count for symbols, count in counts.items()})


def _merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """Join every occurrence of ``pair`` in ``symbols``."""
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def build_tokenizer() -> CLIPTokenizer:
    """Build a CLIP tokenizer for the caption words.

    The vocabulary has the layout of CLIP's own: the 256 byte symbols, the same 256 with ``</w>``, one token
    per merge, then the start and end tokens.  Text is lower-cased.  Every caption word is one token; any
    other word falls apart into pieces, in the worst case bytes, so no prompt is out of vocabulary.
    """
    words: list[str] = []
    for template in TEMPLATES:
        for word in WORDS:
            words += template.replace(":", " ").format(word).split()
    merges = learn_merges(words)
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*alphabet, *(symbol + "</w>" for symbol in alphabet)]
    tokens += [*("".join(pair) for pair in merges), BOS, EOS]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS)


def encode_text(tokenizer: CLIPTokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Tokenize as the pipeline does: padded and cut to ``MAX_TOKENS``."""
    options = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True}
    return tokenizer(list(texts), return_tensors="pt", **options).input_ids


# ---------- models ----------


def build_vae() -> AutoencoderKL:
    """Build the autoencoder: 64x64 RGB to 8x8x4 and back."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 24, 24),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=IMAGE_SIZE,
    )


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Build the text encoder."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_unet() -> UNet2DConditionModel:
    """Build the denoiser."""
    return UNet2DConditionModel(
        sample_size=LATENT_SIZE,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 56),
        layers_per_block=1,
        attention_head_dim=4,
        norm_num_groups=8,
        cross_attention_dim=TEXT_WIDTH,
    )


def build_scheduler() -> DDIMScheduler:
    """Build the noise schedule; it ends in (almost) pure noise, hence v-prediction and trailing steps."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )


# ---------- training ----------


def learning_rate(peak: float, steps: int, warmup: int = 100) -> Callable[[int], float]:
    """Return a schedule: linear warm-up, then a half cosine down to 2 % of the peak."""

    def at(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))

    return at


def draw_batch(pictures: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a random batch of lightly moved RGB pictures."""
    chosen = torch.randint(len(pictures), (size,), generator=generator)
    return render(pictures[chosen], random_transforms(size, generator)).expand(-1, 3, -1, -1)


def train_vae(
    vae: AutoencoderKL,
    pictures: torch.Tensor,
    steps: int,
    batch_size: int,
    generator: torch.Generator,
    start: float,
) -> None:
    """Train the autoencoder on squared error and a small KL term; keep averaged weights."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=0.0, weight_decay=1e-4)
    schedule = learning_rate(3e-3, steps)
    ema = EMAModel(vae.parameters(), decay=0.99)
    vae.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = schedule(step)
        images = draw_batch(pictures, batch_size, generator)
        posterior = vae.encode(images).latent_dist
        error = F.mse_loss(vae.decode(posterior.sample(generator)).sample, images)
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        loss = error + 1e-4 * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        ema.step(vae.parameters())
        if step % 100 == 0 or step == steps - 1:
            log(f"vae {step:5d}/{steps}  error {error.item():.5f}  kl {divergence.item():.3f}", start)
    ema.copy_to(vae.parameters())
    vae.eval().requires_grad_(False)


@torch.no_grad()
def cache_latents(
    vae: AutoencoderKL, pictures: torch.Tensor, labels: torch.Tensor, copies: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode ``copies`` lightly moved versions of all pictures: means, standard deviations and labels."""
    means, deviations = [], []
    for _ in range(copies):
        images = render(pictures, random_transforms(len(pictures), generator)).expand(-1, 3, -1, -1)
        for chunk in images.split(128):
            posterior = vae.encode(chunk).latent_dist
            means.append(posterior.mean)
            deviations.append(posterior.std)
    return torch.cat(means), torch.cat(deviations), labels.repeat(copies)


def set_scaling_factor(vae: AutoencoderKL, means: torch.Tensor, deviations: torch.Tensor) -> float:
    """Store in the VAE's config the factor that gives its latents unit variance, and return it."""
    sample = means + deviations * torch.randn(means.shape, generator=torch.Generator().manual_seed(0))
    factor = round(1.0 / sample.std().item(), 5)
    vae.register_to_config(scaling_factor=factor)
    return factor


def train_denoiser(
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    scheduler: DDIMScheduler,
    latents: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scaling_factor: float,
    steps: int,
    batch_size: int,
    generator: torch.Generator,
    rng: random.Random,
    start: float,
    drop: float = 0.1,
) -> None:
    """Train UNet and text encoder jointly on v-prediction; keep averaged weights."""
    means, deviations, labels = latents
    parameters = [*unet.parameters(), *text_encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=1e-3, betas=(0.9, 0.99))
    schedule = learning_rate(2e-3, steps)
    ema = EMAModel(parameters, decay=0.998)
    unet.train()
    text_encoder.train()
    running = 0.0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = schedule(step)
        chosen = torch.randint(len(means), (batch_size,), generator=generator)
        noise = torch.randn(2, batch_size, *means.shape[1:], generator=generator)
        clean = (means[chosen] + deviations[chosen] * noise[0]) * scaling_factor
        # One timestep per equal slice of the range: every batch sees all noise levels.
        slots = (torch.arange(batch_size) + torch.rand(batch_size, generator=generator)) / batch_size
        timesteps = (slots * scheduler.config.num_train_timesteps).long()
        texts = ["" if rng.random() < drop else caption(int(label), rng) for label in labels[chosen]]
        context = text_encoder(encode_text(tokenizer, texts)).last_hidden_state
        noisy = scheduler.add_noise(clean, noise[1], timesteps)
        target = scheduler.get_velocity(clean, noise[1], timesteps)
        loss = F.mse_loss(unet(noisy, timesteps, context).sample, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        ema.step(parameters)
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0 or step == steps - 1:
            log(f"denoiser {step:5d}/{steps}  loss {running:.4f}", start)
    ema.copy_to(parameters)
    unet.eval()
    text_encoder.eval()


# ---------- the whole run ----------


def save(pipe: StableDiffusionPipeline, output_dir: Path) -> int:
    """Save the pipeline and its model card; return the size of the folder in bytes."""
    if output_dir.exists():
        shutil.rmtree(output_dir)
    # Tokenizing with padding leaves that setting in tokenizer.json; store the tokenizer without it.
    pipe.tokenizer.backend_tokenizer.no_padding()
    pipe.tokenizer.backend_tokenizer.no_truncation()
    pipe.save_pretrained(output_dir, safe_serialization=True)
    save_plain_vocabulary(pipe.tokenizer, output_dir / "tokenizer")
    if MODEL_CARD.exists():
        shutil.copyfile(MODEL_CARD, output_dir / "README.md")
    return sum(path.stat().st_size for path in output_dir.rglob("*") if path.is_file())


def save_plain_vocabulary(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Add ``vocab.json`` and ``merges.txt``, which transformers before 5.0 expects of a CLIP tokenizer."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    lines = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n", encoding="utf-8")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the digits pipeline.")
    parser.add_argument("--output-dir", type=Path, default=HERE / "model", help="folder to write (replaced)")
    parser.add_argument("--steps", type=int, default=3000, help="steps of text encoder and UNet")
    parser.add_argument("--vae-steps", type=int, default=500, help="steps of the VAE")
    parser.add_argument("--batch-size", type=int, default=64, help="batch of text encoder and UNet")
    parser.add_argument("--vae-batch-size", type=int, default=32, help="batch of the VAE")
    parser.add_argument("--copies", type=int, default=16, help="moved versions of each picture for the UNet")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data order and noise")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--judge-count", type=int, default=200, help="pictures to judge at the end (0: none)")
    parser.add_argument("--grid", type=Path, help="also save the judged pictures as one sheet (PNG)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save and judge."""
    args = parse_args(argv)
    start = time.perf_counter()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    rng = random.Random(args.seed)

    drawn, digits = load_split("generator")
    pictures, labels = torch.from_numpy(drawn), torch.from_numpy(digits)
    tokenizer = build_tokenizer()
    vae, text_encoder, unet = build_vae(), build_text_encoder(tokenizer), build_unet()
    scheduler = build_scheduler()
    for name, model in (("vae", vae), ("text encoder", text_encoder), ("unet", unet)):
        log(f"{name}: {sum(p.numel() for p in model.parameters())} parameters", start)

    train_vae(vae, pictures, args.vae_steps, args.vae_batch_size, generator, start)
    latents = cache_latents(vae, pictures, labels, args.copies, generator)
    factor = set_scaling_factor(vae, latents[0], latents[1])
    log(f"scaling factor {factor}, {len(latents[0])} latents", start)
    train_denoiser(
        unet,
        text_encoder,
        tokenizer,
        scheduler,
        latents,
        factor,
        args.steps,
        args.batch_size,
        generator,
        rng,
        start,
    )

    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    size = save(pipe, args.output_dir)
    log(f"saved {args.output_dir}: {size} bytes", start)

    if args.judge_count:
        images, wanted = generate(load_pipeline(args.output_dir), args.judge_count)
        log(f"judge on unseen real pictures: {real_accuracy():.4f}", start)
        log(f"judge on {len(images)} generated pictures: {accuracy(images, wanted):.4f}", start)
        if args.grid:
            save_grid(images, args.grid)


if __name__ == "__main__":
    main()
