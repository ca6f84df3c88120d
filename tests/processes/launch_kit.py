"""Starts the processes of these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass
class Launch:
    """A folder for what ranks say, the cache they share, and what came of running them."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``command``, in an environment that knows of no other launch."""
        foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        inherited = {name: value for name, value in os.environ.items() if name not in foreign}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        )
        self.started.append(process)
        return process

    def worker(self, kind: str, *options: str) -> tuple[str, ...]:
        return (str(HERE / "worker.py"), str(self.out), str(self.cache), kind, *options)

    def run(self, *command: str, **environment: str) -> dict[int, dict[str, Any]]:
        """Run to the end, and return what each rank said."""
        process = self.start(*command, **environment)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return self.said()

    def said(self) -> dict[int, dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in sorted(self.out.glob("rank*.json"))]
        return {report["rank"]: report for report in found}

    def log(self) -> list[list[str]]:
        """Lines of ``began|built <part> <rank> <pid>``."""
        path = self.out / "log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
