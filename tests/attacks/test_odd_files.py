"""Pipes, folders and sockets in place of files: they must neither hang the reader nor be taken."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from attack_kit import Victim, native_key


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("name", ["manifest.json", "model.pt2"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, _socket], ids=["pipe", "folder", "socket"])
def test_what_is_no_file_is_refused(victim: Victim, engine: bytes, name: str, make: Callable[[Path], None]) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    (victim.folder / name).unlink()
    make(victim.folder / name)
    victim.refused(native_key(), "malformed", f"{name} is not a regular file")
