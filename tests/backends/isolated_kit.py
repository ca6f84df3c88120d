"""Backends for builds in a child process, where only what can be imported exists."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.base import BuildRequest, BuildResult, LoadRequest, Recipe
from aitune_hf.backends.probes import values_of
from aitune_hf.errors import GraphBreakException


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("ids", torch.arange(8))
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale + self.table + self.ids


class Child:
    """The parts of a backend that do not matter here."""

    name = "child"
    native = True
    isolated = True

    def version(self) -> str:
        return "1"

    def available(self) -> str | None:
        return None

    def recipes(self, device: torch.device) -> Sequence[Recipe]:
        return [Recipe()]

    def supports(self, request: BuildRequest) -> str | None:
        return None

    def build(self, request: BuildRequest) -> BuildResult:
        raise NotImplementedError

    def load(self, request: LoadRequest) -> Any:
        raise NotImplementedError


class Writes(Child):
    """Writes what it sees of the program."""

    def build(self, request: BuildRequest) -> BuildResult:
        graph = request.capture()
        values = values_of(graph.program)
        torch.save({name: tensor.detach().clone() for name, tensor in values.items()}, request.workdir / "values.pt")
        with torch.no_grad():
            out = graph.program.module()(*request.example.inputs)
        engine = {"pid": os.getpid(), "finite": bool(torch.isfinite(out[0]).all()), "options": dict(request.options)}
        return BuildResult(files=["values.pt"], envelope=graph.envelope, engine=engine)


class Misbehaves(Child):
    """Does what the option ``how`` says."""

    def build(self, request: BuildRequest) -> BuildResult:
        how = request.options["how"]
        if how == "hang":
            time.sleep(600)
        if how == "exit":
            print("the compiler gives up", file=sys.stderr)
            os._exit(3)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "break":
            raise GraphBreakException("the forward does something odd")
        raise ZeroDivisionError("of its own")

    def load(self, request: LoadRequest) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)
