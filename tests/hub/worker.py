"""A process that pulls, when told to."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sharing_kit import Machine, Many, call

from aitune_hf.backends.isolation import IsolatedBuilder


def main(cache: str, repo: str) -> None:
    IsolatedBuilder.try_engine = lambda *args, **kwargs: None  # type: ignore[assignment, method-assign]
    module = Many(4)
    print("ready", flush=True)
    sys.stdin.readline()
    result = Machine(Path(cache)).pull(module, repo)
    call(module)
    call(module)
    print(result.installed, bool(result.confirm()), flush=True)


main(*sys.argv[1:])
