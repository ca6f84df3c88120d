"""Builds in a child process: the same files, and a parent that survives whatever happens there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf.backends.base import AxisRange, BuildRequest
from aitune_hf.backends.build_message import pack_request, unpack_request
from aitune_hf.backends.isolation import IsolatedBuilder
from aitune_hf.backends.probes import pinned_constants, values_of, with_probes, without_weights
from aitune_hf.errors import BuildError, EngineLoadError, GraphBreakException
from aitune_hf.graph.shape_envelope import ShapeEnvelope

# What runs in a child must be importable there.
sys.path.insert(0, str(Path(__file__).parent))

from isolated_kit import Misbehaves, Net, Writes
from recorded import request_for


@pytest.fixture(scope="module")
def builder() -> Any:
    with IsolatedBuilder(timeout_s=120) as one:
        yield one


def request(tmp_path: Path, module: nn.Module | None = None, **options: Any) -> BuildRequest:
    ranges = {("x", 0): AxisRange(min=2, max=16)}
    module = Net().eval() if module is None else module
    return request_for(module, [{"x": torch.randn(4, 8)}], tmp_path / "work", ranges, **options)


def test_weights_stay_behind_and_structure_travels(builder: IsolatedBuilder, tmp_path: Path) -> None:
    asked = request(tmp_path, how="any")
    result = builder.build(Writes(), asked)
    assert result.engine["pid"] != os.getpid()
    assert result.engine["finite"]
    assert result.engine["options"] == {"how": "any"}
    assert result.envelope == asked.capture().envelope
    seen = torch.load(asked.workdir / "values.pt")
    module: Any = asked.module
    assert torch.equal(seen["table"], module.table)
    assert torch.equal(seen["ids"], module.ids)
    for name in ("linear.weight", "linear.bias", "norm.weight", "norm.bias", "scale"):
        live = asked.module.get_parameter(name) if name != "scale" else module.scale
        assert seen[name].shape == live.shape
        assert not torch.equal(seen[name], live)


def test_weights_travel_where_they_are_baked(builder: IsolatedBuilder, tmp_path: Path) -> None:
    from dataclasses import replace

    asked = replace(request(tmp_path), weights="baked")
    builder.build(Writes(), asked)
    seen = torch.load(asked.workdir / "values.pt")
    assert torch.equal(seen["linear.weight"], asked.module.get_parameter("linear.weight"))


def test_a_packed_request_is_small_and_whole(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).eval()
    asked = request_for(module, [{"input": torch.randn(4, 512)}], tmp_path / "work")
    data = pack_request(asked)
    assert len(data) < 200_000 < 2 * 512 * 512 * 4
    back = unpack_request(data)
    assert back.axes == asked.axes
    assert back.graph == asked.graph
    assert all(torch.equal(a, b) for a, b in zip(back.example.inputs, asked.example.inputs, strict=True))
    with pytest.raises(BuildError, match="stays in the parent"):
        back.forward()


def test_probes_differ_by_seed_and_leave_the_program_alone(tmp_path: Path) -> None:
    asked = request(tmp_path)
    graph = asked.capture()
    before = {name: tensor.clone() for name, tensor in values_of(graph.program).items()}
    first, again, second = with_probes(graph, 1), with_probes(graph, 1), with_probes(graph, 2)
    pinned = pinned_constants(graph)
    assert pinned == {"table", "ids"}
    for name in before:
        a, b, c = (values_of(one.program)[name] for one in (first, again, second))
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (name in pinned)
        assert torch.equal(before[name], values_of(graph.program)[name])
    assert sum(tensor.numel() for tensor in values_of(without_weights(graph).program).values()) == 16
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.isfinite(first.program.module()(x)[0]).all()
        assert torch.equal(graph.program.module()(x)[0], asked.module(x))


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("exit", BuildError, "exit code 3; its last words: the compiler gives up"),
        ("crash", BuildError, "killed by SIGSEGV"),
        ("raise", BuildError, "ZeroDivisionError: of its own"),
        ("break", GraphBreakException, "the forward does something odd"),
    ],
)
def test_a_build_that_ends_badly_is_an_error_here(
    builder: IsolatedBuilder, tmp_path: Path, how: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        builder.build(Misbehaves(), request(tmp_path, how=how))
    assert builder.build(Writes(), request(tmp_path)).files == ["values.pt"]  # The next one gets a new child.


def test_a_build_that_hangs_is_stopped(tmp_path: Path) -> None:
    with IsolatedBuilder(timeout_s=15) as builder:
        builder.build(Writes(), request(tmp_path))
        builder.timeout_s = 1
        with pytest.raises(BuildError, match="longer than 1 s"):
            builder.build(Misbehaves(), request(tmp_path, how="hang"))
        assert builder._child is None


def test_a_child_that_never_reads_is_stopped_while_a_large_task_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitune_hf.backends.isolation._START", "import time; time.sleep(600)")
    large = {"unused": b"0" * 5_000_000}  # More than a pipe holds.
    with IsolatedBuilder(timeout_s=1) as builder:
        with pytest.raises(BuildError, match="longer than 1 s"):
            builder.build(Writes(), request(tmp_path, **large))
        assert not builder.is_running


def test_a_path_entry_of_any_type_starts_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd: list[Any] = [tmp_path, os.fsencode(tmp_path), None]
    monkeypatch.setattr(sys, "path", [*sys.path, *odd])
    with IsolatedBuilder(timeout_s=120) as builder:
        assert builder.build(Writes(), request(tmp_path)).files == ["values.pt"]


@pytest.mark.parametrize("what", ["tempfile.TemporaryFile", "subprocess.Popen"])
def test_a_child_that_cannot_be_started_is_a_build_error_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    asked = request(tmp_path)
    pack_request(asked)  # What is captured stays with the request; all that is opened from here on is the child's.
    with IsolatedBuilder() as builder:
        monkeypatch.setattr(f"aitune_hf.backends.isolation.{what}", refuses)
        before = sorted(Path("/proc/self/fd").iterdir())
        with pytest.raises(BuildError, match=r"build process cannot be started: .*Cannot allocate memory; free some"):
            builder.start()
        with pytest.raises(BuildError, match="build process cannot be started"):
            builder.build(Writes(), asked)
        assert sorted(Path("/proc/self/fd").iterdir()) == before
        assert not builder.is_running
        monkeypatch.undo()
        assert builder.build(Writes(), asked).files == ["values.pt"]


def test_an_interrupt_stops_the_child(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A job in the background ignores interrupts.
    try:
        _interrupted(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(tmp_path: Path) -> None:
    with IsolatedBuilder() as builder:
        asked = request(tmp_path, how="hang")
        asked.capture()
        builder.start()
        assert builder._child is not None
        process = builder._child._process
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            builder.build(Misbehaves(), asked)
        assert process.poll() is not None


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from aitune_hf.backends.isolation import IsolatedBuilder\n"
        "b = IsolatedBuilder(); b.start(); print(b._child._process.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1.0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_backend_that_cannot_be_sent_says_so(builder: IsolatedBuilder, tmp_path: Path) -> None:
    class Local(Writes):
        pass

    with pytest.raises(BuildError, match="at the top of a module"):
        builder.build(Local(), request(tmp_path))


def test_an_engine_that_kills_its_process_does_not_kill_ours(builder: IsolatedBuilder, tmp_path: Path) -> None:
    asked = request(tmp_path)
    args = ("net", tmp_path, {}, asked.graph, ShapeEnvelope.fixed([(4, 8)]), torch.device("cpu"))
    with pytest.raises(EngineLoadError, match=r"first load in a child process: its process was killed by SIGSEGV"):
        builder.try_engine(Misbehaves(), *args)
