"""Several processes of one machine pull at once: what they need is fetched once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hub_server import FakeHub
from sharing_kit import Machine, Many

REPO = "me/tuned"


def test_processes_fetch_each_engine_once(hub: FakeHub, machine: Callable[[str], Machine], tmp_path: Path) -> None:
    machine("mine").stock(Many(4))
    machine("mine").push(Many(4), REPO)
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(tmp_path / "theirs"), REPO]
    with hub.counted() as requests:
        started = [
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        try:
            for process in started:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            said = []
            for process in started:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            said = [process.communicate(timeout=60)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.communicate()
    assert said == ["4 True\n"] * 2
    engines = [str(each) for each in requests if each.path.endswith("model.bin")]
    manifests = [str(each) for each in requests if each.path.endswith("manifest.json")]
    assert (len(engines), len(manifests)) == (4, 4)
