"""Setting damaged entries and records aside, out of everybody's way but kept for a look."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from pathlib import Path

from aitune_hf.cache.layout import Layout

__all__ = ["quarantine"]


def quarantine(layout: Layout, path: Path, reason: str) -> Path | None:
    """Move what lies at ``path`` to the quarantine in one rename, with ``reason.json`` beside it.

    Returns its new place; None when it was gone already. Raises ``OSError`` when it cannot be moved.
    """
    cell = layout.quarantine / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(6)}"
    cell.mkdir(parents=True)
    moved = cell / ("record.json" if path.is_file() and path.suffix == ".json" else "entry")
    try:
        path.rename(moved)
    except FileNotFoundError:
        cell.rmdir()
        return None
    except OSError:
        with suppress(OSError):
            cell.rmdir()
        raise
    note = {"from": path.relative_to(layout.root).as_posix(), "reason": reason, "time": int(time.time())}
    with suppress(OSError):
        (cell / "reason.json").write_text(json.dumps(note, indent=1), encoding="utf-8")
    return moved
