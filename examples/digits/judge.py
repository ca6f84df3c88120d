"""Real digits, their rendering, and a held-out judge that reads generated digits.

The pictures come from :func:`sklearn.datasets.load_digits` (1797 grey 8x8 digits).  They are split once,
stratified and with a fixed seed: 60 % are the *generator* part (everything ``train.py`` learns from) and 40 %
are the *judge* part.  The judge is a support vector machine trained only on the judge part: it has never seen
a picture that the generator was trained on.  It trains itself in about a second; nothing is stored on disk.

Command line::

    python examples/digits/judge.py --model examples/digits/model --count 200 --steps 20
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

IMAGE_SIZE = 64
GENERATOR_SHARE = 0.6
SPLIT_SEED = 0
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DEFAULT_MODEL = Path(__file__).resolve().parent / "model"
DEFAULT_STEPS = 20
DEFAULT_GUIDANCE = 4.0

# The 8x8 digits fill their frame from top to bottom; the rendered picture gets a margin around them.
_FRAME = 0.84
_CONTRAST = 9.0
_THRESHOLD = 0.42


def load_split(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(pictures, labels)`` of the ``"generator"`` or the ``"judge"`` part.

    Pictures are float32 of shape (N, 8, 8), 0 = no ink and 1 = full ink.
    """
    pictures, labels = load_digits(return_X_y=True)
    pictures = (pictures / 16.0).astype(np.float32).reshape(-1, 8, 8)
    options = {"train_size": GENERATOR_SHARE, "random_state": SPLIT_SEED, "stratify": labels}
    split = train_test_split(pictures, labels, **options)
    if part == "generator":
        return split[0], split[2]
    if part == "judge":
        return split[1], split[3]
    raise ValueError(f"part must be 'generator' or 'judge', not {part!r}")


def random_transforms(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw light augmentations, (count, 4): shift x, shift y (in 8x8 pixels), rotation (radians), scale."""
    uniform = torch.rand(count, 4, generator=generator) * 2 - 1
    return uniform * torch.tensor([0.6, 0.35, math.radians(8.0), 0.06]) + torch.tensor([0.0, 0.0, 0.0, 1.0])


def render(pictures: np.ndarray | torch.Tensor, transforms: torch.Tensor | None = None) -> torch.Tensor:
    """Draw 8x8 digits as smooth dark strokes on white paper: (N, 1, 64, 64) in [-1, 1], white = 1."""
    ink = torch.as_tensor(pictures, dtype=torch.float32)[:, None]
    if transforms is None:
        transforms = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(len(ink), 4)
    shift_x, shift_y, angle, scale = transforms.unbind(1)
    zoom = 1.0 / (_FRAME * scale)
    cos, sin = torch.cos(angle) * zoom, torch.sin(angle) * zoom
    theta = torch.stack(
        [torch.stack([cos, -sin, -shift_x / 4], dim=1), torch.stack([sin, cos, -shift_y / 4], dim=1)], dim=1
    )
    grid = F.affine_grid(theta, [len(ink), 1, IMAGE_SIZE, IMAGE_SIZE], align_corners=False)
    smooth = F.grid_sample(ink, grid, mode="bicubic", padding_mode="zeros", align_corners=False)
    # A soft threshold turns the blurred blobs into strokes with smooth edges.
    strokes = torch.sigmoid(_CONTRAST * (smooth - _THRESHOLD))
    low, high = (1 / (1 + math.exp(-_CONTRAST * (edge - _THRESHOLD))) for edge in (0.0, 1.0))
    return 1.0 - 2.0 * ((strokes - low) / (high - low)).clamp(0.0, 1.0)


def to_images(rendered: torch.Tensor) -> list[Image.Image]:
    """Convert (N, 1 or 3, H, W) tensors in [-1, 1] to RGB pictures."""
    bytes_ = ((rendered.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    if bytes_.shape[1] == 1:
        bytes_ = bytes_.expand(-1, 3, -1, -1)
    return [Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy(), "RGB") for picture in bytes_]


def features(images: Sequence[Image.Image]) -> np.ndarray:
    """Reduce pictures of any size to what the judge sees: 8x8 mean ink, flattened to (N, 64)."""
    rows = [np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX)) for image in images]
    return 1.0 - np.stack(rows).reshape(len(rows), 64).astype(np.float32) / 255.0


class Judge:
    """A classifier of digit pictures that was trained on the judge part only."""

    def __init__(self, copies: int = 6, seed: int = 0) -> None:
        pictures, labels = load_split("judge")
        generator = torch.Generator().manual_seed(seed)
        batches = [features(to_images(render(pictures)))]
        for _ in range(copies):
            batches.append(features(to_images(render(pictures, random_transforms(len(pictures), generator)))))
        self._classifier = SVC(C=10.0, gamma=0.25)
        self._classifier.fit(np.concatenate(batches), np.tile(labels, copies + 1))

    def read(self, images: Sequence[Image.Image]) -> list[int]:
        """Return the digit read in every picture."""
        if not images:
            return []
        return [int(label) for label in self._classifier.predict(features(images))]


@functools.lru_cache(maxsize=1)
def load_judge() -> Judge:
    """Train the judge (once per process) and return it."""
    return Judge()


def accuracy(images: Sequence[Image.Image], labels: Sequence[int]) -> float:
    """Return the share of pictures that the judge reads as their label."""
    if not images or len(images) != len(labels):
        raise ValueError("need one label per picture, and at least one picture")
    read = load_judge().read(images)
    return sum(int(a == b) for a, b in zip(read, labels, strict=True)) / len(read)


def real_accuracy() -> float:
    """Return the judge's accuracy on the real, rendered pictures of the generator part."""
    pictures, labels = load_split("generator")
    return accuracy(to_images(render(pictures)), labels.tolist())


def generate(
    pipe: Any,
    count: int = 200,
    steps: int = DEFAULT_STEPS,
    guidance: float = DEFAULT_GUIDANCE,
    seed: int = 0,
    template: str = "a handwritten {}",
    batch_size: int = 50,
) -> tuple[list[Image.Image], list[int]]:
    """Draw ``count`` digits, 0 to 9 in turn.  Picture i always starts from the noise of seed ``seed + i``."""
    labels = [i % 10 for i in range(count)]
    images: list[Image.Image] = []
    for start in range(0, count, batch_size):
        chunk = labels[start : start + batch_size]
        images += pipe(
            [template.format(WORDS[label]) for label in chunk],
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(chunk))],
        ).images
    return images, labels


def save_grid(images: Sequence[Image.Image], path: Path, columns: int = 10) -> None:
    """Save pictures as one sheet, row by row."""
    width, height = images[0].size
    sheet = Image.new("RGB", (columns * width, math.ceil(len(images) / columns) * height), "white")
    for i, image in enumerate(images):
        sheet.paste(image, ((i % columns) * width, (i // columns) * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def load_pipeline(model: Path | str) -> Any:
    """Load a local pipeline folder with a quiet progress bar."""
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(str(model), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main(argv: Sequence[str] | None = None) -> float:
    """Generate digits with a saved pipeline and print how many the judge reads correctly."""
    parser = argparse.ArgumentParser(description="Measure how readable the generated digits are.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the saved pipeline")
    parser.add_argument("--count", type=int, default=200, help="number of pictures, 0 to 9 in turn")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="inference steps")
    parser.add_argument("--guidance", type=float, default=DEFAULT_GUIDANCE, help="guidance scale")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first picture")
    parser.add_argument("--template", default="a handwritten {}", help="prompt; {} becomes the digit's name")
    parser.add_argument("--grid", type=Path, help="also save the pictures as one sheet (PNG)")
    args = parser.parse_args(argv)

    print(f"judge on {len(load_split('generator')[0])} real pictures it never saw: {real_accuracy():.4f}")
    pipe = load_pipeline(args.model)
    start = time.perf_counter()
    images, labels = generate(pipe, args.count, args.steps, args.guidance, args.seed, args.template)
    seconds = time.perf_counter() - start
    read = load_judge().read(images)
    for digit in range(10):
        mine = [r for r, label in zip(read, labels, strict=True) if label == digit]
        if mine:
            wrong = [r for r in mine if r != digit]
            note = f"  (others read as {wrong})" if wrong else ""
            print(f"  {WORDS[digit]:<6} {len(mine) - len(wrong)}/{len(mine)}{note}")
    score = accuracy(images, labels)
    print(
        f"accuracy on {len(images)} generated digits: {score:.4f} "
        f"({args.steps} steps, guidance {args.guidance:g}, {seconds / len(images) * 1000:.0f} ms per picture)"
    )
    if args.grid:
        save_grid(images, args.grid)
        print(f"saved {args.grid}")
    return score


if __name__ == "__main__":
    main()
