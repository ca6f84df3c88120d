"""A target of several modules, and a backend without a compiler that writes down what it builds.

Imported by the tests and, under the same name, by the processes they start: both must see the same structures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_hf import TuneConfig
from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest
from aitune_hf.backends.testing import FakeBackend, FakeEngine
from aitune_hf.tuning.drive import restore_modules, tune_modules
from aitune_hf.tuning.ranks import Rank
from aitune_hf.tuning.report import TuningReport

#: Set while an engine runs: engines skip what makes a module slow in eager.
_hurry = False


class Part(nn.Module):
    """Each width is a structure of its own. Its engines are faster than eager, or not."""

    def __init__(self, width: int, quick: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.quick = quick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (_hurry and self.quick):
            time.sleep(0.002)
        return torch.tanh(self.linear(x))


class Plain(nn.Module):
    """A small module for a real compiler. The tensor made in its forward becomes a file of the entry beside the code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.scale = float(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * torch.tensor([0.5, self.scale]).sum()


def make_parts(widths: Iterable[int] = (16, 15, 14), slow_width: int | None = None) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {f"part{width}": Part(width) for width in widths}
    if slow_width is not None:
        parts[f"part{slow_width}"] = Part(slow_width, quick=False)
    return {name: part.eval() for name, part in parts.items()}


def make_plain(widths: Iterable[int] = (12, 8)) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {f"plain{width}": Plain(width).eval() for width in widths}


class LoggingBackend(FakeBackend):
    """Takes ``seconds`` to build, and writes ``began|built <path> <rank> <pid>`` to ``log``."""

    def __init__(self, log: Path, seconds: float = 0.0, rank: int = 0) -> None:
        super().__init__("logging")
        self.log, self.seconds, self.rank = log, seconds, rank

    def build(self, request: BuildRequest) -> BuildResult:
        self._write("began", request.path)
        (request.workdir / "half.bin").write_bytes(b"half")
        time.sleep(self.seconds)
        result = super().build(request)
        self._write("built", request.path)
        return result

    def load(self, request: LoadRequest) -> FakeEngine:
        engine: Any = super().load(request)
        run = engine.__call__

        def hurried(inputs: list[torch.Tensor]) -> Any:
            global _hurry
            _hurry = True
            try:
                return run(inputs)
            finally:
                _hurry = False

        return _Hurried(hurried, engine)

    def _write(self, event: str, path: str) -> None:
        with self.log.open("a") as file:  # One write of one line: whole, whoever else writes.
            file.write(f"{event} {path} {self.rank} {os.getpid()}\n")


class _Hurried:
    def __init__(self, run: Any, engine: FakeEngine) -> None:
        self._run, self.rebind, self.close = run, engine.rebind, engine.close

    def __call__(self, inputs: list[torch.Tensor]) -> Any:
        return self._run(inputs)


def settings(cache: Path, backend: Any, **changes: Any) -> TuneConfig:
    return TuneConfig(cache_dir=cache, backends=(backend,), progress=False, timing_pairs=5, min_share=0.0, **changes)


def sample_for(part: nn.Module) -> torch.Tensor:
    width = next(part.parameters()).shape[1]
    return torch.linspace(-1, 1, 2 * width).reshape(2, width)


def run(parts: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {name: part(sample_for(part)) for name, part in parts.items()}


def tune_parts(parts: Mapping[str, nn.Module], config: TuneConfig, rank: Rank | None = None) -> TuningReport:
    return tune_modules(parts, lambda _: run(parts), [None], config, rank)


def restore_parts(parts: Mapping[str, nn.Module], config: TuneConfig) -> int:
    return restore_modules(parts, config)


def is_right(parts: Mapping[str, nn.Module], expected: Mapping[str, torch.Tensor], calls: int = 2) -> bool:
    """Whether each of several calls gives eager's answer: the first of a loaded engine is eager's own."""
    return all(
        torch.allclose(answer, expected[name], atol=1e-5, rtol=0)
        for _ in range(calls)
        for name, answer in run(parts).items()
    )


def decisions(report: TuningReport) -> dict[str, Any]:
    """Module → who answers and the speed-up that was measured: equal only where one process measured it."""
    found: dict[str, Any] = {}
    for result in report.results:
        timing = result.winner.timing if result.winner else None
        backend = result.winner.backend if result.winner else "eager"
        found[result.path] = [backend, timing.speedup if timing else result.reason]
    return found
