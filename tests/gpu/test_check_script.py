"""The check that runs on a GPU machine, tried out without one: the same steps, small and on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def check(out: Path, *arguments: str, timeout: float = 300) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--device", "cpu", "--tiny", "--pairs", "3"]
    run = subprocess.run([*command, "--out", str(out), *arguments], capture_output=True, text=True, timeout=timeout)
    assert out.exists(), run.stdout + run.stderr
    return run.returncode, json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_it_tunes_measures_and_loads_in_another_process(tmp_path: Path) -> None:
    code, found = check(tmp_path / "out.json", "--steps", "flux:blocks,flux:blocks:warm,flux:compile")
    cold, warm, compiled = found["steps"]
    assert code == 0, found
    assert [step["status"] for step in found["steps"]] == ["ok"] * 3
    assert cold["result"]["engines"] == 2, "two structures of blocks"
    assert warm["result"]["engines"] == 4, "in four places"
    assert cold["result"]["build_s"] > warm["result"]["load_s"] > 0
    for step in found["steps"]:
        result = step["result"]
        assert result["error"] < 1e-4
        assert result["speedup"]["low"] <= result["speedup"]["median"] <= result["speedup"]["high"]
    assert warm["result"]["engine_calls"] == (2 + 3) * 4
    assert compiled["result"]["build_s"] > 0
    assert found["machine"]["torch"] == torch.__version__


def test_a_step_that_fails_or_has_no_time_is_written_down(tmp_path: Path) -> None:
    code, found = check(tmp_path / "out.json", "--steps", "flux:blocks:warm,unet:compile", "--seconds", "40")
    warm, late = found["steps"]
    assert code == 1
    assert (warm["status"], late["status"]) == ("failed", "skipped")
    assert "no engine was had" in warm["error"], "nothing is in the cache"
    assert "s were left" in late["error"]


def test_the_networks_have_the_sizes_they_are_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_models  # type: ignore[import-not-found]

    made = gpu_models.models(torch.device("meta"), torch.bfloat16, False)
    sizes = {name: sum(p.numel() for p in model.make().parameters()) for name, model in made.items()}
    assert 2.4e9 < sizes["unet"] < 2.7e9, "Stable Diffusion XL's UNet has 2.57 billion"
    assert 4e9 < sizes["flux"] < 6e9
    for model in made.values():
        module, inputs = model.make(), model.inputs()
        assert module(*inputs).shape == inputs[0].shape
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_the_shell_script_uses_wheels_from_a_folder(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "not_there_before-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("not_there_before.py", "found = True\n")
    python = tmp_path / "python"
    # Everything but the check itself is passed on; in its place it is seen whether the wheel can be imported.
    python.write_text(
        f'#!/bin/sh\n[ "$1" = scripts/gpu_check.py ] && shift && set -- -c "import not_there_before, sys; '
        f'print(sys.argv[1:], not_there_before.found)" "$@"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    run = subprocess.run(
        ["bash", str(SCRIPTS / "gpu_check.sh"), str(tmp_path), "--tiny"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHON": str(python)},
    )
    assert run.returncode == 0, run.stderr
    assert "['--tiny'] True" in run.stdout


def test_the_shell_script_says_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    script = str(SCRIPTS / "gpu_check.sh")
    for folder, words in ((tmp_path / "none", "there is no folder"), (tmp_path, "no pure Python wheels")):
        run = subprocess.run(["bash", script, str(folder)], capture_output=True, text=True, timeout=60)
        assert run.returncode == 2
        assert words in run.stderr
