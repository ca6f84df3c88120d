"""Where torch's compilers put their files while something is built."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["build_folder"]

_building = threading.RLock()


@contextlib.contextmanager
def build_folder(device: torch.device) -> Iterator[Path]:
    """A folder for everything that the compiler writes. The user's own cache is not touched.

    Even capturing a graph makes torch create its cache folder and name it in the environment; so that happens in here
    too. One thread at a time: it is the environment of the process that names the folder.

    All is gone afterwards on the CPU. Triton kernels are known to torch by their files for as long as the process
    lives, so what belongs to them stays until then.
    """
    with _building, tempfile.TemporaryDirectory(prefix="aitune-build-", ignore_cleanup_errors=True) as folder:
        caches = folder if device.type == "cpu" else _process_folder().name
        wanted = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@functools.cache
def _process_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="aitune-triton-", ignore_cleanup_errors=True)
