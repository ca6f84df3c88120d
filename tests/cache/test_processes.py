from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aitune_hf.cache import EngineKey, Entry, LocalStore

MakeKey = Callable[..., EngineKey]
Build = Callable[..., Entry]
Spawn = Callable[..., "subprocess.Popen[str]"]


def leftovers(store: LocalStore) -> list[str]:
    folder = store.root / "aitune" / "tmp"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_four_processes_build_a_key_once_and_all_get_the_same_engine(
    store: LocalStore, make_key: MakeKey, spawn: Spawn
) -> None:
    outputs = [spawn("build", store, make_key(), f"w{number}") for number in range(4)]
    lines = [process.communicate(timeout=20)[0].split() for process in outputs]
    assert [process.returncode for process in outputs] == [0] * 4
    assert sorted(line[0] for line in lines) == ["built", "found", "found", "found"]
    assert len({line[1] for line in lines}) == 1
    assert [line[2] for line in lines] == ["False"] * 4  # torch was not imported
    assert store.verify() == []
    assert leftovers(store) == []
    assert list((store.root / "aitune" / "locks").glob("*.owner")) == []


def test_threads_build_a_key_once(store: LocalStore, make_key: MakeKey) -> None:
    built: list[int] = []

    def work(number: int) -> None:
        with store.reserve(make_key()) as slot:
            if slot.entry is None:
                built.append(number)
                time.sleep(0.1)
                slot.write("model.pt2", b"x")
                slot.commit(engine={})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(built) == 1


def test_a_killed_builder_blocks_nobody_and_leaves_nothing(store: LocalStore, make_key: MakeKey, spawn: Spawn) -> None:
    victim = spawn("hold", store, make_key())
    assert victim.stdout is not None
    assert victim.stdout.readline() == "holding\n"
    assert len(leftovers(store)) == 1
    victim.kill()
    victim.wait()

    start = time.monotonic()
    with store.reserve(make_key()) as slot:
        assert time.monotonic() - start < 2
        assert len(leftovers(store)) == 1  # ours; the victim's is gone
        assert list(slot.workdir.iterdir()) == []
        slot.write("model.pt2", b"x")
        slot.commit(engine={})
    assert leftovers(store) == []


def test_a_waiter_gets_the_lock_when_the_builder_is_killed(store: LocalStore, make_key: MakeKey, spawn: Spawn) -> None:
    victim = spawn("hold", store, make_key())
    assert victim.stdout is not None
    victim.stdout.readline()
    waiter = spawn("build", store, make_key(), "waiter")
    time.sleep(0.5)
    victim.kill()
    assert waiter.communicate(timeout=20)[0].split()[:2] == ["built", "waiter"]


def test_sweep_removes_what_dead_builders_of_any_key_left(store: LocalStore, make_key: MakeKey, spawn: Spawn) -> None:
    dead, alive = spawn("hold", store, make_key(0)), spawn("hold", store, make_key(1))
    for process in (dead, alive):
        assert process.stdout is not None
        process.stdout.readline()
    dead.kill()
    dead.wait()
    assert store.sweep() == 1
    assert len(leftovers(store)) == 1
    alive.kill()
    alive.wait()
    assert store.sweep() == 1
    assert leftovers(store) == []


def test_eviction_and_rebuilding_under_a_reader_never_gives_a_wrong_or_corrupt_engine(
    store: LocalStore, make_key: MakeKey, build: Build, spawn: Spawn
) -> None:
    reader = spawn("load", store, make_key(), "2.0")
    round_number = 0
    while reader.poll() is None:
        build(store, make_key(), {"model.pt2": b"%d" % round_number * 100_000, "map.json": b"%d" % round_number})
        time.sleep(0.01)
        store.gc(0)
        round_number += 1
    output, _ = reader.communicate()
    assert reader.returncode == 0, output
    assert int(output.split()[0]) > 0
    assert not (store.root / "aitune/quarantine").exists()


def test_the_cache_is_imported_and_used_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, types; package = types.ModuleType('aitune_hf'); package.__path__ = [sys.argv[1]];"
        "sys.modules['aitune_hf'] = package; import aitune_hf.cache, pathlib;"
        "aitune_hf.cache.LocalStore(pathlib.Path(sys.argv[2])).write_record('a.json', {});"
        "print(sorted({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    folder = str(Path(__file__).parents[2] / "aitune_hf")
    result = subprocess.run(
        [sys.executable, "-c", code, folder, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("seconds", [0, 7200])
def test_work_of_another_machine_goes_only_when_it_is_old(
    store: LocalStore, make_key: MakeKey, spawn: Spawn, seconds: int
) -> None:
    foreign = store.root / "aitune/tmp" / f"{'a' * 32}-00000000-{'b' * 16}"
    foreign.mkdir(parents=True)
    os.utime(foreign, (time.time() - seconds, time.time() - seconds))
    assert store.sweep() == (1 if seconds else 0)
    assert foreign.exists() is not bool(seconds)
