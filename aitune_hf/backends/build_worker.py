"""The child process of :mod:`aitune_hf.backends.isolation`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve tasks until the parent closes its end of the pipe."""
    settings = json.loads(sys.argv[1])
    _end_with(settings["parent"])
    import torch

    torch.set_num_threads(settings["threads"])
    pipe: Connection[Any, Any] = Connection(settings["fd"])
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            task = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from the parent process, through a pipe of its own
            pipe.send_bytes(pickle.dumps(_answer(task)))


def _end_with(parent: int) -> None:
    """Be killed when the parent dies, whatever it dies of (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before this was in force.
        os._exit(0)


def _answer(task: Mapping[str, Any]) -> dict[str, Any]:
    try:
        backend = pickle.loads(task["backend"])  # noqa: S301 - see main()
        result = _TASKS[task["kind"]](backend, task)
    except Exception as error:  # noqa: BLE001 - the parent raises it again
        lines = str(error).strip().splitlines() or [""]
        return {"result": None, "error": (type(error).__name__, lines[0])}
    return {"result": result, "error": None}


def _build(backend: Any, task: Mapping[str, Any]) -> dict[str, Any]:
    from aitune_hf.backends.build_message import unpack_request

    result = backend.build(unpack_request(task["request"]))
    return {"files": list(result.files), "envelope": result.envelope.to_dict(), "engine": dict(result.engine)}


def _try(backend: Any, task: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from aitune_hf.backends.base import LoadRequest
    from aitune_hf.backends.stand_in import inputs_for, stand_in
    from aitune_hf.graph.graph_spec import GraphSpec
    from aitune_hf.graph.shape_envelope import ShapeEnvelope

    device = torch.device(task["device"])
    module = stand_in(task["engine"].get("constants", []), device)
    request = LoadRequest(
        path=task["path"], module=module, folder=Path(task["folder"]), engine=task["engine"], device=device
    )
    graph, envelope = GraphSpec.from_dict(task["graph"]), ShapeEnvelope.from_dict(task["envelope"])
    engine = backend.load(request)
    for shapes in envelope.corners():
        engine(inputs_for(graph, shapes, device))
    engine.close()
    return {}


_TASKS = {"build": _build, "try": _try}
