"""Runs on a machine with a GPU, within minutes and without a network, and writes down what was measured there.

    python scripts/gpu_check.py [--device cuda|cpu] [--tiny] [--seconds 460] [--out FILE] [--steps NAME,NAME]

Each step runs in a process of its own with a time limit, and may fail: its error is written down then. Latencies are of
paired runs, eager and the other one in turns in one process, by CUDA events on a GPU. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process: at most ``seconds``, and not at all where less than a quarter of that is left."""

    name: str
    seconds: float


#: In the order of what is worth most, should time run out.
STEPS = (
    Step(name="tests", seconds=110),
    Step(name="flux:blocks", seconds=100),
    Step(name="flux:blocks:warm", seconds=45),
    Step(name="unet:whole", seconds=170),
    Step(name="unet:whole:warm", seconds=45),
    Step(name="flux:compile", seconds=90),
    Step(name="unet:blocks", seconds=120),
    Step(name="flux:graphs", seconds=100),
    Step(name="unet:compile", seconds=170),
    Step(name="flux:whole", seconds=150),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small networks in float32, to try the script itself out")
    parser.add_argument("--seconds", type=float, default=460, help="for all steps together")
    parser.add_argument("--out", type=Path, help="default: a file in benchmarks/results")
    parser.add_argument("--steps", help=f"of {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(arguments)), flush=True)
        return 0
    wanted = arguments.steps.split(",") if arguments.steps else [step.name for step in STEPS]
    unknown = sorted(set(wanted) - {step.name for step in STEPS})
    if unknown:
        parser.error(f"no step {', '.join(unknown)}")
    here = machine()
    out = arguments.out or ROOT / "benchmarks" / "results" / f"gpu-{here.get('sm', 'none')}.json"
    done = run_steps([step for step in STEPS if step.name in wanted], arguments, here, out)
    print(f"written: {out}")
    return 0 if all(step["status"] == "ok" for step in done) else 1


# -- the steps, one process each ---------------------------------------------------------------------------------------


def run_steps(
    steps: list[Step], arguments: argparse.Namespace, here: dict[str, Any], out: Path
) -> list[dict[str, Any]]:
    """Run them in turn; what is known is in the file after each, whatever happens to this process."""
    start, done = time.monotonic(), []
    facts = {"command": " ".join(["python", *sys.argv]), "machine": here, "commit": commit()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="aitune-gpu-") as cache:
        for step in steps:
            left = arguments.seconds - (time.monotonic() - start)
            if left < step.seconds / 4:
                done.append({"name": step.name, "status": "skipped", "error": f"{left:.0f} s were left"})
            else:
                done.append(run_step(step, min(left, step.seconds), arguments, cache))
            print(tell(done[-1]), flush=True)
            found = {**facts, "seconds": round(time.monotonic() - start, 1), "steps": done}
            out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return done


def run_step(step: Step, seconds: float, arguments: argparse.Namespace, cache: str) -> dict[str, Any]:
    start = time.monotonic()
    command = [sys.executable, __file__, "--worker", step.name, "--cache", cache, "--device", arguments.device]
    command += ["--pairs", str(arguments.pairs), *(["--tiny"] if arguments.tiny else [])]
    if step.name == "tests":
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu"]
        command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
    result: dict[str, Any] = {"name": step.name}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        result |= {"status": "timeout", "error": f"not done after {seconds:.0f} s"}
    else:
        lines = run.stdout.strip().splitlines()
        if step.name == "tests":
            # 5: there is nothing to run here.
            result |= {"status": "ok" if run.returncode in (0, 5) else "failed", "result": lines[-30:]}
        elif run.returncode == 0 and lines:
            result |= {"status": "ok", "result": json.loads(lines[-1])}
        else:
            result |= {"status": "failed", "error": "\n".join((run.stderr.strip() or run.stdout).splitlines()[-15:])}
    return result | {"seconds": round(time.monotonic() - start, 1)}


def tell(step: dict[str, Any]) -> str:
    result = step.get("result")
    facts = ""
    if isinstance(result, dict) and "speedup" in result:
        one = result["speedup"]
        facts = f"{one['median']:.3f}x ({one['low']:.3f} to {one['high']:.3f})"
    elif isinstance(result, list) and result:
        facts = result[-1]
    error = str(step.get("error", "")).strip().splitlines()
    return f"{step['name']:<20} {step['status']:<8} {step.get('seconds', 0):6.1f} s  {facts or (error[-1] if error else '')}"


def work(arguments: argparse.Namespace) -> dict[str, Any]:
    """One measurement, in this process."""
    import torch
    from gpu_models import models

    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    name, how, *warm = arguments.worker.split(":")
    chosen = models(device, dtype, arguments.tiny)[name]
    module, inputs = chosen.make(), chosen.inputs()
    facts: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "dtype": str(dtype),
        "inputs": [list(leaf.shape) for leaf in inputs],
    }
    with torch.no_grad():
        if how == "compile":
            return facts | compare_compiled(module, inputs, arguments.pairs)
        return facts | compare_tuned(module, inputs, how, bool(warm), arguments)


def compare_compiled(module: Any, inputs: Any, pairs: int) -> dict[str, Any]:
    import torch

    compiled = torch.compile(module)
    start = time.perf_counter()
    compiled(*inputs)
    settle(inputs)
    return {"build_s": time.perf_counter() - start} | compared(module, compiled, inputs, pairs)


def compare_tuned(module: Any, inputs: Any, how: str, warm: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tune (or take from the cache of an earlier process) and compare with an eager twin on the same weights."""
    import copy

    import aitune_hf
    from aitune_hf.backends.base import Recipe
    from aitune_hf.backends.inductor import InductorBackend
    from aitune_hf.tuning.drive import restore_modules

    class Graphs(InductorBackend):
        """The same as CUDA graphs only."""

        def recipes(self, device: Any) -> list[Recipe]:
            return [Recipe(options={"cuda_graphs": True}, weights="bound", effort="fast")]

    twin = copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    config = aitune_hf.TuneConfig(
        cache_dir=Path(arguments.cache) / how,
        backends=(Graphs() if how == "graphs" else InductorBackend(),),
        granularity="whole" if how == "whole" else "blocks",
        strategy="first_working",
        effort="fast",
        progress=False,
    )
    start = time.perf_counter()
    if warm:
        taken = restore_modules({"": module}, config)
        facts: dict[str, Any] = {"load_s": time.perf_counter() - start, "engines": taken}
        module(*inputs)  # The call that is checked against eager.
    else:
        report = aitune_hf.tune(module, [(inputs, {})], config)
        results = [one.to_dict() for one in report.results]
        candidates = [candidate for one in results for candidate in one["candidates"]]
        facts = {
            "tune_s": time.perf_counter() - start,
            "build_s": sum(one["build_s"] for one in candidates),
            "engines": len({one["winner"]["engine"] for one in results if one["winner"]}),
            "engine_bytes": report.engine_bytes,
            "max_error": max((one["max_error"] or 0.0 for one in candidates), default=None),
            "reasons": sorted({one["reason"] for one in (*results, *candidates) if one["reason"]}),
        }
    if not facts["engines"]:
        raise SystemExit(f"no engine was had: {facts}")
    before = aitune_hf.stats(module).engine_calls
    facts |= compared(twin, module, inputs, arguments.pairs)
    return facts | {"engine_calls": aitune_hf.stats(module).engine_calls - before}


# -- measuring ---------------------------------------------------------------------------------------------------------


def compared(eager: Any, other: Any, inputs: Any, pairs: int) -> dict[str, Any]:
    """Paired latencies, the difference of the outputs, and the memory at work."""
    import torch

    on_gpu = inputs[0].device.type == "cuda"
    for _ in range(2):
        expected, got = eager(*inputs), other(*inputs)
    error = float((expected.float() - got.float()).abs().max())
    scale = float(expected.float().abs().max())
    del expected, got
    times = [(timed(lambda: eager(*inputs), on_gpu), timed(lambda: other(*inputs), on_gpu)) for _ in range(pairs)]
    found = {
        "eager_ms": quartiles([first for first, _ in times]),
        "ms": quartiles([second for _, second in times]),
        "speedup": quartiles([first / second for first, second in times]),
        "pairs": pairs,
        "error": error,
        "largest_output": scale,
    }
    if on_gpu:
        for name, call in (("eager", eager), ("other", other)):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            call(*inputs)
            settle(inputs)
            found[f"peak_{name}_mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
        found["weights_mb"] = round(torch.cuda.memory_allocated() / 2**20)
    return found


def timed(call: Callable[[], object], on_gpu: bool) -> float:
    """Milliseconds of one call."""
    import torch

    if not on_gpu:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def settle(inputs: Any) -> None:
    import torch

    if inputs[0].device.type == "cuda":
        torch.cuda.synchronize()


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def machine() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "sm": "sm" + "".join(map(str, torch.cuda.get_device_capability())),
            "memory_gb": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        }
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        facts["driver"] = _output(query)
    return facts


def commit() -> str:
    return _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())
