"""The command line, in this process and as people call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from aitune_hf import TuneConfig, __version__, tune
from aitune_hf.backends.testing import FakeBackend
from aitune_hf.cli import main


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    config = TuneConfig(backends=(FakeBackend(),), strategy="first_working", cache_dir=tmp_path, progress=False)
    tune(Net().eval(), [torch.ones(1, 2)], config)
    return tmp_path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


def test_cache_info_lists_engines(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info", "--dir", str(cache)]) == 0
    shown = capsys.readouterr().out
    assert "1 engines" in shown
    assert "fake" in shown


def test_cache_verify_tells_damage_by_its_exit_status(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", "--dir", str(cache)]) == 0
    next(cache.rglob("engine.json")).write_text("damaged")
    assert main(["cache", "verify", "--dir", str(cache)]) == 1
    assert "1 problems" in capsys.readouterr().out


def test_cache_gc_and_clear_make_room(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "gc", "--dir", str(cache)]) == 2
    assert "--max-mb" in capsys.readouterr().err
    assert main(["cache", "gc", "--dir", str(cache), "--max-mb", "0"]) == 0
    assert "removed 1 engines" in capsys.readouterr().out
    assert main(["cache", "clear", "--dir", str(cache)]) == 0
    assert not list(cache.rglob("manifest.json"))


def test_backends_says_what_can_be_used_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    from aitune_hf.backends.registry import backend_names, get_backend

    assert main(["backends"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert sorted(lines) == backend_names()
    for name, text in lines.items():
        reason = get_backend(name).available()
        assert text == (f"not here: {reason}" if reason else f"{get_backend(name).version()}, ready")


def test_run_tunes_a_script_that_knows_nothing_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 2)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
        "net = Net().eval()\n"
        "with torch.no_grad():\n"
        "    print('result', [float(net(torch.ones(1, 2)).sum()) for _ in range(3)], sys.argv[1:])\n"
    )
    env = {**os.environ, "AITUNE_HF_CACHE": str(tmp_path / "cache"), "AITUNE_HF_DRY_RUN": "1"}
    command = [sys.executable, "-m", "aitune_hf", "run", str(script), "--one", "two"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "['--one', 'two']" in done.stdout
    assert "Net" in done.stderr


def test_run_without_a_script_or_with_a_wrong_setting_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tmp_path / "missing.py")]) == 2
    assert "there is no script" in capsys.readouterr().err


def test_a_wrong_setting_in_the_environment_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('never')")
    monkeypatch.setenv("AITUNE_HF_MIN_SAMPLES", "many")
    assert main(["run", str(script)]) == 2
    shown = capsys.readouterr()
    assert "AITUNE_HF_MIN_SAMPLES='many'" in shown.err
    assert "never" not in shown.out
