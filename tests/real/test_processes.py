"""Other processes: they find what was built, and one that builds ends cleanly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from real_kit import Tuned

SECOND = """
import copy, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from real_kit import BERT_SAMPLES, answers, assert_same, bert_call, config_for, tiny_bert, tuned_with_twin
import torch, aitune_hf
config = config_for(Path(sys.argv[2]))
tuned = tuned_with_twin(tiny_bert(seed=31), BERT_SAMPLES, config)
with answers(tuned.module) as seen:
    for length in (3, 17):
        tuned.same(**bert_call(2, length))
restored = aitune_hf.AITuneModel.from_model(tiny_bert(seed=32), config=config)
twin = tiny_bert(seed=32)
with torch.no_grad():
    for length in (3, 17, 9):
        assert_same(dict(restored(**bert_call(2, length))), dict(twin(**bert_call(2, length))))
print(json.dumps({
    "builds": tuned.report.builds, "loads": tuned.report.loads, "engines": seen.engines, "eager": seen.eager,
    "restored": [restored.tuning_stats().loads, restored.tuning_stats().engine_calls],
    "export": "torch._inductor.compile_fx" in sys.modules,
}))
"""


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_another_process_builds_nothing_and_leaves_no_new_files(
    bert: Tuned, engine_cache: Path, tmp_path: Path
) -> None:
    assert bert.report.rows[0].backend == "inductor"
    before = files(engine_cache)
    work, temp = tmp_path / "elsewhere", tmp_path / "temp"
    work.mkdir()
    temp.mkdir()
    env = {**os.environ, "PYTHONHASHSEED": "12345", "TMPDIR": str(temp), "PATH": "/nonexistent"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", SECOND, str(Path(__file__).parent), str(engine_cache)]
    done = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "builds": 0,
        "loads": 1,
        "engines": 2,
        "eager": {},
        "restored": [1, 2],
        "export": False,
    }
    assert files(engine_cache) == before
    assert not list(work.iterdir())
    assert not list(temp.iterdir())


BUILDING = """
import copy, multiprocessing
from pathlib import Path
import torch


def build(width):
    import aitune_hf
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()).eval()
    twin, x = copy.deepcopy(model), torch.randn(3, width)
    settings = {"backends": ["inductor"], "strategy": "first_working", "progress": False}
    config = aitune_hf.TuneConfig(cache_dir=Path.cwd() / "cache", **settings)
    report = aitune_hf.tune(model, [x], config)
    assert report.builds == 1, str(report)
    with torch.no_grad():
        assert torch.allclose(model(x + 1), twin(x + 1), atol=1e-5)
    assert (aitune_hf.stats(model).engine_calls, aitune_hf.stats(model).eager_calls) == (1, {})


if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=build, args=(4,), daemon=True)
    worker.start()
    build(12)
    worker.join()
    assert worker.exitcode == 0, worker.exitcode
    print("done")
"""


def processes_of(session: int) -> dict[str, str]:
    """The processes of a session that still run: number → command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found[entry.name] = command
    return found


def left_behind(session: int, seconds: float = 10.0) -> dict[str, str]:
    """Processes of a session that do not end by themselves.

    Any use of ``spawn`` starts a tracker of resources, which ends only when it sees that its parent has.
    """
    end = time.monotonic() + seconds
    while (left := processes_of(session)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def test_a_script_that_builds_ends_cleanly_also_inside_spawn(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BUILDING)
    command = [sys.executable, str(script)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out.strip()) == (0, "done"), err
    assert "Traceback" not in err
    assert left_behind(process.pid) == {}
