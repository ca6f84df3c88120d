"""Which process of a launch this is, as accelerate or the launcher says."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from aitune_hf.tuning.ranks import Rank

__all__ = ["current_rank"]

#: Names of a launch's facts: torchrun's and accelerate's own, then those of Open MPI, MPICH and Intel MPI.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_COUNT = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def current_rank(environ: Mapping[str, str] | None = None) -> Rank:
    """The place of this process among those of its launch; alone where it was not launched with others.

    Accelerate's ``PartialState`` is asked if the process has made one, and else the environment. A ``PartialState`` that
    knows of one process only (as on CPUs without ``cpu=True``) does not overrule a launcher. Initialises nothing.
    """
    rank = _accelerate_rank()
    return rank if rank.count > 1 else _launcher_rank(os.environ if environ is None else environ)


def _accelerate_rank() -> Rank:
    module = sys.modules.get("accelerate.state")
    # Making a PartialState would start the communication between processes, so only one that is there is read.
    shared = module.PartialState._shared_state if module is not None else {}
    return Rank(index=shared.get("process_index", 0), count=shared.get("num_processes", 1))


def _launcher_rank(environ: Mapping[str, str]) -> Rank:
    index, count = _number(environ, _RANK), _number(environ, _COUNT)
    if index is None or count is None or not 0 <= index < count:
        return Rank()
    return Rank(index=index, count=count)


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    text = next((environ[name] for name in names if name in environ), "")
    return int(text) if text.isdecimal() else None
