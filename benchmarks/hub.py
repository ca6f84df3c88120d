"""The round trip of tuned engines through a Hub on this machine: seconds, builds, and the requests that each step made.

    python benchmarks/hub.py

The Hub is the one of the tests (``tests/hub/hub_server.py``). Process A tunes and pushes, B pulls and trusts, C does not
trust and builds by the recipe; each has an empty home. See ``examples/share.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hub"))

from hub_server import FakeHub  # noqa: E402


def main() -> None:
    hub = FakeHub()
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": next(iter(hub.tokens)),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, str(ROOT / "examples" / "share.py"), "--repo", "someone/digits-engines"]
    try:
        subprocess.run(command, check=True, env=environment)
    finally:
        print(f"requests to the Hub by all three processes: {len(hub.requests)}")
        for request in hub.requests:
            print(f"  {request.method} {request.path}"[:140])
        hub.close()


if __name__ == "__main__":
    main()
