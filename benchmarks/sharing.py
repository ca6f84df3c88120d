"""One structure, one engine: what 2, 6, 12 and 24 equal blocks cost to tune, to keep and to run.

    python benchmarks/sharing.py [--json FILE] [--backends NAME ...]

Engines of AOTInductor read the modules' own weights, so that is what is measured unless other backends are named: those
of OpenVINO and ONNX Runtime share their files in the same way, but keep a packed copy of the weights in memory.

For each model and number of blocks, in fresh processes: engines built, seconds to build, bytes in the cache, speed
against eager (pairs in one run), peak memory against eager, and the time a second process needs beyond eager.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

COUNTS = (2, 6, 12, 24)


def dit(blocks: int, width: int = 256) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A stack of Diffusers transformer blocks, as in a DiT, on 64 tokens."""
    from diffusers.models.attention import BasicTransformerBlock

    class DiT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            heads = width // 32
            self.blocks = nn.ModuleList(BasicTransformerBlock(width, heads, 32) for _ in range(blocks))
            self.out = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    return DiT().eval(), (torch.randn(2, 64, width),)


def unet(blocks: int, width: int = 96) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A stack of Diffusers residual blocks between two convolutions, as on one level of a UNet."""
    from diffusers.models.resnet import ResnetBlock2D

    class Level(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(4, width, 3, padding=1)
            make = lambda: ResnetBlock2D(in_channels=width, out_channels=width, temb_channels=64, groups=8)  # noqa: E731
            self.blocks = nn.ModuleList(make() for _ in range(blocks))
            self.last = nn.Conv2d(width, 4, 3, padding=1)

        def forward(self, x: torch.Tensor, time_embedding: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x, time_embedding)
            return self.last(x)

    return Level().eval(), (torch.randn(2, 4, 16, 16), torch.randn(2, 64))


MODELS = {"dit": dit, "unet": unet}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def worker(kind: str, model: str, blocks: int, width: int | None, cache: str, backends: list[str]) -> dict[str, Any]:
    """One process: ``eager``, ``tune`` (builds) or ``warm`` (loads)."""
    import diffusers  # noqa: F401

    from aitune_hf import AITuneModel, TuneConfig, stats, tune

    torch.manual_seed(0)
    make = MODELS[model]
    net, args = make(blocks, width) if width else make(blocks)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    config = TuneConfig(cache_dir=Path(cache), granularity="blocks", progress=False, backends=backends)
    result: dict[str, Any] = {"weights_mb": weights / 1e6}
    with torch.no_grad():
        if kind == "tune":
            expected = net(*args)
            report = tune(net, [(args, {})], config)
            result |= {"builds": report.builds, "loads": report.loads, "tune_s": report.seconds}
            result["build_s"] = report.stats.seconds.get("build", 0.0)
            result["max_error"] = float((net(*args) - expected).abs().max())
            result["eager_calls"] = stats(net).eager_calls
        else:
            start = time.perf_counter()
            if kind == "warm":
                AITuneModel.from_model(net, config=config)
            net(*args)
            result["first_output_s"] = time.perf_counter() - start
            result["engine_calls"] = stats(net).engine_calls
            for _ in range(5):
                net(*args)
            result["peak_mb"] = peak_mb()
            if kind == "warm":
                result["builds"] = stats(net).builds
                result |= paired(net, make(blocks, width)[0] if width else make(blocks)[0], args)
    return result


def paired(tuned: nn.Module, eager: nn.Module, args: tuple[torch.Tensor, ...], pairs: int = 20) -> dict[str, float]:
    ratios = []
    for _ in range(3):
        eager(*args), tuned(*args)
    for _ in range(pairs):
        times = []
        for net in (eager, tuned):
            start = time.perf_counter()
            net(*args)
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"speedup": middle, "speedup_low": low, "speedup_high": high}


def run(kind: str, model: str, blocks: int, width: int | None, cache: str, backends: list[str]) -> dict[str, Any]:
    named = ["--backends", *backends]
    command = [sys.executable, __file__, "--worker", kind, model, str(blocks), str(width or 0), cache, *named]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(model: str, blocks: int, backends: list[str], width: int | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        cold = run("tune", model, blocks, width, cache, backends)
        size = sum(path.stat().st_size for path in Path(cache, "aitune", "v1").rglob("*") if path.is_file())
        warm = run("warm", model, blocks, width, cache, backends)
        eager = run("eager", model, blocks, width, cache, backends)
    return {
        "model": model,
        "blocks": blocks,
        **cold,
        "cache_mb": size / 1e6,
        "warm_builds": warm["builds"],
        "warm_extra_s": warm["first_output_s"] - eager["first_output_s"],
        "peak_ratio": warm["peak_mb"] / eager["peak_mb"],
        "engine_calls": warm["engine_calls"],
        **{key: warm[key] for key in ("speedup", "speedup_low", "speedup_high")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backends", nargs="+", default=["inductor"])
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, model, blocks, width, cache = arguments.worker
        print(json.dumps(worker(kind, model, int(blocks), int(width) or None, cache, arguments.backends)))
        return
    rows = [measure(model, blocks, arguments.backends) for model in MODELS for blocks in COUNTS]
    rows.append(measure("dit", 24, arguments.backends, 512))  # about 100 M parameters
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("model blocks  weights  builds  tune s  cache MB  cache/weights  speed-up (quartiles)  warm + s  peak/eager")
    for row in rows:
        print(
            f"{row['model']:5} {row['blocks']:6} {row['weights_mb']:7.1f}M {row['builds']:6} {row['tune_s']:7.1f} "
            f"{row['cache_mb']:9.2f} {row['cache_mb'] / row['weights_mb']:13.1%} {row['speedup']:9.2f}x "
            f"({row['speedup_low']:.2f} to {row['speedup_high']:.2f}) {row['warm_extra_s']:9.2f} {row['peak_ratio']:10.2f}"
        )
    for model in MODELS:
        seconds = {row["blocks"]: row["tune_s"] for row in rows if row["model"] == model and row["weights_mb"] < 200}
        print(f"{model}: tuning 24 blocks takes {seconds[24] / seconds[2]:.2f} times as long as tuning 2")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
