"""Several processes tune one target: each engine is built once, all load all and agree, and a dead one is survived."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ranks_kit as kit
import torch
from accelerate import PartialState
from launch_kit import Launch
from torch import nn

from aitune_hf.cache import LocalStore
from aitune_hf.cache.locking import KeyLock
from aitune_hf.errors import ConfigError
from aitune_hf.integrations.accelerate import current_rank
from aitune_hf.tuning.ranks import Rank, local_module, shared_out, spread_over_processes

PARTS = ["part14", "part15", "part16", "part8"]
Torchrun = Callable[..., tuple[str, ...]]


def assert_shared_out(said: Mapping[int, Mapping[str, Any]], parts: list[str]) -> None:
    """Two ranks: every part built once over both, some by each; same verdicts, same outputs, all right."""
    assert sorted(said) == [0, 1]
    assert [report["count"] for report in said.values()] == [2, 2]
    assert sorted(said[0]["built"] + said[1]["built"]) == parts
    assert [report["builds"] for report in said.values()] == [len(parts) // 2] * 2
    assert said[0]["decisions"] == said[1]["decisions"]
    assert said[0]["outputs"] == said[1]["outputs"]
    assert [report["right"] for report in said.values()] == [True, True]


def assert_clean(store: LocalStore) -> None:
    """Nothing broken, no lock held, nothing left behind."""
    assert store.verify() == []
    store.sweep()
    assert list((store.root / "aitune/tmp").glob("*")) == []
    for path in (store.root / "aitune/locks").glob("*.lock"):
        lock = KeyLock(path.parent, path.stem)
        assert lock.try_acquire(), f"{path} is held"
        lock.release()


# -- under a launcher --------------------------------------------------------------------------------------------------


def test_torchrun_shares_the_builds_out_and_all_ranks_agree(launch: Launch, torchrun: Torchrun) -> None:
    said = launch.run(*torchrun(*launch.worker("fake", "--accelerate")))
    assert_shared_out(said, PARTS)
    # Three parts have engines; part8's is as fast as eager, and whoever timed it decided for both.
    assert all(said[rank]["engine_calls"] == 6 for rank in (0, 1)) or said[0]["decisions"]["part8"][0] == "logging"
    began = [(part, rank) for event, part, rank, _ in launch.log() if event == "began"]
    assert dict(began[:2]) == {"part16": "0", "part15": "1"}  # From the start, each at something else.
    assert_clean(LocalStore(launch.cache))


def test_real_engines_are_built_once_over_both_ranks(real_launch: Launch) -> None:
    assert_shared_out(real_launch.said(), ["plain12", "plain8"])
    assert [report["loads"] for report in real_launch.said().values()] == [1, 1]
    assert all(engine == ["inductor", ""] for engine in real_launch.said()[0]["decisions"].values())
    assert_clean(LocalStore(real_launch.cache))


def test_a_later_launch_builds_nothing(launch: Launch, real_launch: Launch) -> None:
    shutil.copytree(real_launch.cache, launch.cache)
    (report,) = launch.run(sys.executable, *launch.worker("real")).values()
    assert (report["count"], report["builds"], report["loads"], report["right"]) == (1, 0, 2, True)
    assert report["decisions"] == real_launch.said()[0]["decisions"]


@pytest.mark.slow
def test_torchrun_starts_a_crashed_launch_again_and_it_ends_right(launch: Launch, torchrun: Torchrun) -> None:
    restarting = torchrun("--max-restarts", "1", *launch.worker("fake", "--die-once", "part15"))
    said = launch.run(*restarting)
    died = [line for line in launch.log() if line[:3] == ["began", "part15", "1"]]
    assert len(died) >= 1
    assert (launch.out / "died").exists()
    assert sorted(part for event, part, _, _ in launch.log() if event == "built") == PARTS
    assert said[0]["decisions"] == said[1]["decisions"]
    assert [report["right"] for report in said.values()] == [True, True]
    assert_clean(LocalStore(launch.cache))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")
def test_accelerate_launch_on_two_cpu_processes(launch: Launch) -> None:
    hostfile = launch.folder / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    options = (
        "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_ip 127.0.0.1 "
        f"--main_process_port 29517 --mpirun_hostfile {hostfile}"
    ).split()
    command = (sys.executable, "-m", "accelerate.commands.launch", *options)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # mpirun starts "python" by its name.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = launch.run(*command, *launch.worker("fake", "--accelerate"), PATH=path, **as_root)
    assert_shared_out(said, PARTS)
    assert_clean(LocalStore(launch.cache))


# -- a rank is killed --------------------------------------------------------------------------------------------------


def test_a_rank_killed_in_its_build_is_survived(launch: Launch) -> None:
    ranks = [
        launch.start(
            sys.executable, *launch.worker("fake", "--seconds", "0.8"), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0"
        )
        for rank in (0, 1)
    ]
    deadline = time.monotonic() + 60
    while not any(line[:3] == ["began", "part15", "1"] for line in launch.log()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(ranks[1].pid, signal.SIGKILL)
    output, _ = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 0, output
    assert sorted(launch.said()) == [0]
    report = launch.said()[0]
    assert report["right"]
    assert report["built"] == PARTS  # What the other was building, too.
    assert ["built", "part15", "1"] not in [line[:3] for line in launch.log()]
    assert_clean(LocalStore(launch.cache))


# -- who starts with what ----------------------------------------------------------------------------------------------


def dealt(count: int, structures: str = "abcdefgh") -> list[str]:
    """One string of structures per rank; earlier letters are larger."""
    ranks = [Rank(index=index, count=count) for index in range(count)]
    return ["".join(shared_out(structures, rank, structure=str, size=lambda unit: -ord(unit))) for rank in ranks]


def test_ranks_begin_with_different_structures_the_largest_first() -> None:
    assert dealt(1) == ["abcdefgh"]
    assert dealt(2) == ["aceghfdb", "bdfhgeca"]
    assert [order[0] for order in dealt(8)] == list("abcdefgh")
    assert all(sorted(order) == list("abcdefgh") for count in range(1, 12) for order in dealt(count))


def test_a_lone_process_keeps_its_order() -> None:
    assert shared_out("hbca", Rank(), structure=str, size=ord) == list("hbca")


def test_the_order_does_not_depend_on_that_of_the_units() -> None:
    assert dealt(3, "hgfedcba") == dealt(3)


def test_equal_structures_stay_together() -> None:
    units = ["a1", "b1", "a2", "c1", "b2", "a3"]
    order = shared_out(units, Rank(index=1, count=2), structure=lambda unit: unit[0], size=lambda unit: -ord(unit[0]))
    assert order == ["b1", "b2", "c1", "a1", "a2", "a3"]
    assert all(one[0] <= two[0] or two[0] == "a" for one, two in pairwise(order))


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(index: int, count: int) -> None:
    with pytest.raises(ConfigError, match="ranks are 0 to"):
        Rank(index=index, count=count)


# -- which rank this is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Rank()),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Rank(index=1, count=4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, Rank(index=2, count=3)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Rank(index=0, count=2)),
        ({"RANK": "5", "WORLD_SIZE": "4"}, Rank()),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, Rank()),
        ({"RANK": "x", "WORLD_SIZE": "4"}, Rank()),
        ({"RANK": "0"}, Rank()),
        ({"RANK": "0", "WORLD_SIZE": "0"}, Rank()),
    ],
)
def test_the_launcher_says_which_rank_this_is(environ: dict[str, str], expected: Rank) -> None:
    assert current_rank(environ) == expected


def test_accelerate_is_asked_first_where_it_knows_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"num_processes": 4, "process_index": 3}
    monkeypatch.setattr(PartialState, "_shared_state", state)
    assert current_rank({}) == Rank(index=3, count=4)
    assert current_rank({"RANK": "1", "WORLD_SIZE": "2"}) == Rank(index=3, count=4)
    state.update(num_processes=1, process_index=0)
    assert current_rank({"RANK": "1", "WORLD_SIZE": "2"}) == Rank(index=1, count=2)


def test_asking_makes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {}
    monkeypatch.setattr(PartialState, "_shared_state", state)
    assert current_rank({}) == Rank()
    assert state == {}


# -- modules that talk to other processes ------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """A process group of one."""
    store = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_what_is_inside_ddp_is_tuned_and_ddp_is_not(group: None, tmp_path: Path) -> None:
    inner = kit.Part(6).eval()
    wrapped = nn.parallel.DistributedDataParallel(inner)
    assert local_module(wrapped) is inner
    assert local_module(inner) is inner
    expected = kit.run({"": inner})[""]
    backend = kit.LoggingBackend(tmp_path / "log")
    report = kit.tune_parts({"": wrapped}, kit.settings(tmp_path / "cache", backend))
    assert (report.builds, report.rows[0].backend, report.rows[0].class_name) == (1, "logging", "Part")
    with torch.no_grad():
        torch.testing.assert_close(wrapped(kit.sample_for(inner)), expected)
    assert "forward" in vars(inner)
    assert "forward" not in vars(wrapped)
    again = nn.parallel.DistributedDataParallel(kit.Part(6).eval())
    assert kit.restore_parts({"": again}, kit.settings(tmp_path / "cache", backend)) == 1


def test_what_is_spread_over_processes_stays_eager(group: None, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    part = kit.Part(6).eval()
    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(part.linear.weight.detach(), mesh, [Replicate()])
    assert isinstance(weight, DTensor)
    part.linear.weight = nn.Parameter(weight)
    assert spread_over_processes(part) == "its parameter linear.weight is spread over several processes"
    holder = nn.Sequential(nn.Identity(), nn.parallel.DistributedDataParallel(kit.Part(6)))
    assert "1 is a DistributedDataParallel" in str(spread_over_processes(holder))
    assert spread_over_processes(kit.Part(6)) is None


def test_a_spread_module_is_neither_built_nor_timed(group: None, tmp_path: Path) -> None:
    backend = kit.LoggingBackend(tmp_path / "log")
    chain = nn.Sequential(nn.Linear(6, 4), nn.parallel.DistributedDataParallel(nn.Linear(4, 4))).eval()
    x = torch.ones(2, 6)
    report = kit.tune_modules(
        {"": chain}, lambda _: chain(x), [None], kit.settings(tmp_path / "cache", backend), Rank()
    )
    assert backend.builds == []
    assert "DistributedDataParallel" in report.rows[0].note
