"""Rounds of: some processes tune one target on one empty cache, and one of them is killed at a random moment.

crash_rounds.py <folder> <rounds> <processes> <seed>

Prints one JSON line a round. The processes are forked, so that a round costs no imports.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from ranks_kit import Rank
from worker import work

from aitune_hf.cache import LocalStore
from aitune_hf.cache.locking import KeyLock

BUILD_S = 0.15
#: A whole round of eight processes takes about that long until all is built.
ROUND_S = 0.6


def fork_rank(out: Path, cache: Path, rank: Rank) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        with (out / f"stdout{rank.index}").open("w") as sys.stdout:
            work(out, cache, "fake", rank, BUILD_S, slow_width=None)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a forked child must not return into the code of its parent.
        traceback.print_exc()
        os._exit(1)


def log_of(out: Path) -> list[list[str]]:
    return [line.split() for line in (out / "log").read_text().splitlines()] if (out / "log").exists() else []


def building(out: Path) -> list[int]:
    lines = log_of(out)
    done = {(path, pid) for event, path, _, pid in lines if event == "built"}
    return [int(pid) for event, path, _, pid in lines if event == "began" and (path, pid) not in done]


def pick_victim(pids: list[int], out: Path, dice: random.Random, in_a_build: bool) -> int:
    """Any process at any moment, or one that is building: as soon as there is one, then a little later."""
    if not in_a_build:
        time.sleep(dice.uniform(0, ROUND_S))
        return dice.choice(pids)
    deadline = time.monotonic() + 20
    while not building(out) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(dice.uniform(0, BUILD_S))
    return dice.choice(building(out) or pids)


def held_locks(store: LocalStore) -> list[str]:
    held = []
    for path in sorted((store.root / "aitune/locks").glob("*.lock")):
        lock = KeyLock(path.parent, path.stem)
        if lock.try_acquire():
            lock.release()
        else:
            held.append(path.stem)
    return held


def left_behind(store: LocalStore) -> list[str]:
    """What stays in the temporary folder: at once, but for a record that was being written, and after an hour at all."""
    temporary = store.root / "aitune/tmp"
    at_once = [path.name for path in temporary.glob("*") if not path.name.startswith("record-")]
    for path in temporary.glob("*"):
        os.utime(path, (time.time() - 7200,) * 2)
    store.sweep()
    return sorted({*at_once, *(path.name for path in temporary.glob("*"))})


def one_round(folder: Path, count: int, dice: random.Random, in_a_build: bool) -> dict[str, Any]:
    out, cache = folder / "out", folder / "cache"
    out.mkdir(parents=True)
    pids = [fork_rank(out, cache, Rank(index=index, count=count)) for index in range(count)]
    victim = pick_victim(pids, out, dice, in_a_build)
    was_building = victim in building(out)
    os.kill(victim, signal.SIGKILL)
    codes = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
    dead = codes.pop(victim) == -signal.SIGKILL
    store = LocalStore(cache)
    swept = store.sweep()
    reports = [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]
    survivors = [report for report in reports if not (dead and report["rank"] == pids.index(victim))]
    return {
        "killed": dead,
        "killed_in_a_build": dead and was_building,
        "victim": pids.index(victim) if dead else None,
        "codes": sorted(codes.values()),
        "survivors": [{k: r[k] for k in ("rank", "right", "built", "loads", "decisions")} for r in survivors],
        "log": log_of(out),
        "entries": len(store.entries()),
        "problems": [f"{problem.path}: {problem.reason}" for problem in store.verify()],
        "held": held_locks(store),
        "swept": swept,
        "left": left_behind(store),
        "quarantined": (cache / "aitune/quarantine").exists(),
    }


def main(folder: str, rounds: str, processes: str, seed: str) -> None:
    dice = random.Random(int(seed))
    for number in range(int(rounds)):
        place = Path(folder) / f"round{number}"
        print(json.dumps(one_round(place, int(processes), dice, in_a_build=number % 2 == 0)), flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
