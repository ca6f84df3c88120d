"""One process of a test with several: ``worker.py <action> <root> <key as JSON> [argument]``.

``aitune_hf`` is entered by its folder, so that a worker starts without torch.
"""

from __future__ import annotations

import json
import sys
import time
import types
from pathlib import Path

package = types.ModuleType("aitune_hf")
package.__path__ = [str(Path(__file__).parents[2] / "aitune_hf")]
sys.modules["aitune_hf"] = package

from aitune_hf.cache import EngineKey, Entry, LocalStore  # noqa: E402


def main(action: str, root: str, key_json: str, argument: str = "") -> None:
    store, key = LocalStore(Path(root)), EngineKey.from_dict(json.loads(key_json))
    if action == "build":
        with store.reserve(key) as slot:
            print("found" if slot.entry else "built")
            if slot.entry is None:
                slot.write("model.pt2", argument.encode() * 1000)
                time.sleep(0.3)
                slot.commit(engine={})
        print(slot.entry.read("model.pt2")[: len(argument)].decode())
    elif action == "hold":
        with store.reserve(key) as slot:
            (slot.workdir / "half.bin").write_bytes(b"half")
            print("holding", flush=True)
            sys.stdin.read()
    elif action == "load":
        deadline = time.monotonic() + float(argument)
        loads = 0
        while time.monotonic() < deadline:
            found = store.lookup(key)
            if isinstance(found, Entry):
                target = Path(root).parent / f"copy-{loads}"
                found = store.checkout(key, target)
                if isinstance(found, Entry):
                    assert found.read("model.pt2") == (target / "model.pt2").read_bytes()
                    loads += 1
            else:
                assert found.kind == "absent", found
        print(loads)
    elif action == "private":
        with store.reserve(key) as slot:
            slot.write("model.pt2", b"x")
            print(slot.commit(engine={}).path)
    print("torch" in sys.modules)


main(*sys.argv[1:])
