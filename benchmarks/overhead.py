"""What this package costs beside the engines: dispatch, recording and import.

Prints medians with quartiles, as microseconds and ratios, and says which of them miss their limit:

- *dispatch*: a call of a tuned module less a call of its engine, for 1, 5 and 30 tensors and for nested keyword
  arguments, each with 1, 10 and 100 graphs installed. Limit: 15 µs for 5 tensors.
- *recording*: a recorded call over an eager one, on an input of 64 MB; runs are paired. Limit: 1.3.
- *import*: ``torch + transformers + diffusers`` with this package over the same without. Limit: 1.2.

Run it on an idle machine: ``python benchmarks/overhead.py``.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.sample_metadata import SampleMetadata
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.graph.structure import flatten
from aitune_hf.jit.dispatcher import InstalledEngine
from aitune_hf.jit.patched_module import PatchedModule
from aitune_hf.jit.recorder import bind_call
from aitune_hf.jit.session import TuningSession

LIMIT_US, LIMIT_RECORDING, LIMIT_IMPORT = 15.0, 1.3, 1.2


class Sink(nn.Module):
    """Takes anything and returns one tensor; its weights are there to be guarded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(2, 8)


class TrivialEngine:
    """An engine that costs nothing, so that what remains is the way to it."""

    def __init__(self) -> None:
        self.outputs = [torch.empty(2, 8)]

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.outputs

    def rebind(self) -> None: ...

    def close(self) -> None: ...


def installed_on(patched: PatchedModule, module: nn.Module, args: Any, kwargs: Any) -> InstalledEngine:
    """A trivial engine for the graph of one call."""
    call = bind_call(module, patched.signature, args, kwargs)
    node, leaves = flatten(torch.empty(2, 8))
    outputs = SampleMetadata.of_leaves(node, leaves)
    spec = GraphSpec("graph", call.inputs, outputs, patched.signature, context=call.context)
    envelope = ShapeEnvelope.fixed([leaf.shape for leaf in call.leaves])
    return InstalledEngine(graph=spec, envelope=envelope, engine=TrivialEngine(), backend="trivial", trusted=True)


def per_call(function: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Microseconds per call."""
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls * 1e6


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


def dispatch(args: tuple[Any, ...], kwargs: dict[str, Any], graphs: int, rounds: int, calls: int) -> list[float]:
    """Microseconds over calling the bare engine, one number per round."""
    module = Sink()
    patched = PatchedModule(module, TuningSession())
    with torch.no_grad():
        engines = [installed_on(patched, module, (*args, float(index)), kwargs) for index in range(graphs)]
        patched._install(engines, {})
        for index in range(graphs):
            module(*args, float(index), **kwargs)  # Makes the plan of each graph.
        last = (*args, float(graphs - 1))
        plain = Sink()
        engine = engines[-1].engine
        inputs = flatten((last, kwargs))[1]
        plain.forward = lambda *a, **k: engine(inputs)[0]  # type: ignore[method-assign]
        before = patched.stats.engine_calls
        spent = []
        for _ in range(rounds):
            # Dispatch is work of this thread alone; its own clock leaves out what else the machine does.
            bare = per_call(lambda: plain(*last, **kwargs), calls, time.thread_time)
            spent.append(per_call(lambda: module(*last, **kwargs), calls, time.thread_time) - bare)
        assert patched.stats.engine_calls == before + rounds * calls, "the engine did not answer"
    return spent


def report_dispatch(rounds: int, calls: int) -> bool:
    def rows(count: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(2, 8) for _ in range(count))

    nested = {
        "sample": torch.randn(2, 8),
        "added": {"text_embeds": torch.randn(2, 8), "time_ids": torch.randn(2, 6)},
        "residuals": (*rows(4), {"mid": torch.randn(2, 8)}),
        "return_dict": False,
    }
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("1 tensor", rows(1), {}),
        ("5 tensors", rows(5), {}),
        ("30 tensors", rows(30), {}),
        ("nested keywords, 8 tensors", (), nested),
    ]
    good = True
    print(f"{'dispatch over the bare engine':34}{'graphs':>7}{'median µs':>12}{'quartiles':>16}{'over 1 graph':>14}")
    for name, args, kwargs in cases:
        one = 0.0
        for graphs in (1, 10, 100):
            median, low, high = quartiles(dispatch(args, kwargs, graphs, rounds, calls))
            one = one or median
            missed = name == "5 tensors" and median > LIMIT_US
            good = good and not missed
            note = f"   over the limit of {LIMIT_US:.0f} µs" if missed else ""
            print(f"{name:34}{graphs:7}{median:12.2f}{f'{low:.2f} to {high:.2f}':>16}{median / one:14.2f}{note}")
    return good


class Large(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1


def report_recording(pairs: int) -> bool:
    x = torch.randn(16, 1024, 1024)  # 64 MB
    recorded, plain = Large(), Large()
    PatchedModule(recorded, TuningSession())
    ratios, kept = [], []
    with torch.no_grad():
        plain(x)
        for index in range(pairs):
            eager = per_call(lambda: plain(x), 1)
            ratio = per_call(lambda: recorded(x), 1) / eager
            # A few calls are kept as samples, and copied for that; all others cost next to nothing.
            (kept if index + 1 in (1, 4, 16) else ratios).append(ratio)
    everything = sorted(ratios + kept)
    median, low, high = quartiles(everything)
    missed = median > LIMIT_RECORDING
    print(f"\nrecording over eager, 64 MB: {median:.2f} ({low:.2f} to {high:.2f}), {pairs} pairs", end="")
    print(f"; the {len(kept)} calls kept as samples: {', '.join(f'{ratio:.1f}' for ratio in kept)}", end="")
    print(f"   over the limit of {LIMIT_RECORDING}" if missed else "")
    return not missed


def import_seconds(package: str) -> float:
    """Processor time of a process that imports the libraries, and then ``package``."""
    script = f"import time\nimport torch, transformers, diffusers\n{package}\nprint(time.process_time())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(run.stdout)


def report_import(pairs: int) -> bool:
    ratios, alone = [], []
    for _ in range(pairs):
        alone.append(import_seconds(""))
        ratios.append(import_seconds("import aitune_hf.pipeline, aitune_hf.tuning.enable") / alone[-1])
    median = statistics.median(ratios)
    missed = median > LIMIT_IMPORT
    print(
        f"import over torch + transformers + diffusers: {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), ", end=""
    )
    print(f"{pairs} pairs, {statistics.median(alone):.2f} s without", end="")
    print(f"   over the limit of {LIMIT_IMPORT}" if missed else "")
    return not missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds per case of dispatch")
    parser.add_argument("--calls", type=int, default=400, help="calls per round")
    parser.add_argument("--pairs", type=int, default=21, help="pairs of recorded and eager calls")
    parser.add_argument("--imports", type=int, default=3, help="pairs of imports; 0 leaves them out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, 1 thread\n")
    gc.disable()
    good = report_dispatch(options.rounds, options.calls)
    gc.enable()
    good = report_recording(options.pairs) and good
    if options.imports:
        good = report_import(options.imports) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
