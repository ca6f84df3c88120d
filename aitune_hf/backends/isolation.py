"""Native code that may hang or crash, run in a child process.

One child serves several tasks, one after the other. It is started when first needed, told to end with its parent, and
killed when a task takes too long; the next task gets a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

import torch

from aitune_hf.backends.base import Backend, BuildRequest, BuildResult
from aitune_hf.backends.build_message import pack_request
from aitune_hf.errors import BuildError, CandidateError, EngineLoadError, GraphBreakException
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.shape_envelope import ShapeEnvelope

__all__ = ["IsolatedBuilder"]

#: Isolated mode keeps the working directory off the path; what the parent imports from is put there instead.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from aitune_hf.backends.build_worker import main; main()"
)
_ERRORS = {error.__name__: error for error in (BuildError, GraphBreakException, EngineLoadError)}
#: Seconds, eleven days: some systems cannot wait for much more, and nobody would.
_LONGEST = 1e6
#: How much of what a dead child said is repeated.
_LAST_WORDS = 200


class IsolatedBuilder:
    """Builds engines, and tries them out, in a child process. Not for several threads at once.

    Args:
        timeout_s: seconds a task may take, the start of the child included; None is no limit.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._child: _Child | None = None

    def __enter__(self) -> IsolatedBuilder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the child now, so that it gets ready while something else is done.

        Raises:
            BuildError: if this machine has no room for it.
        """
        if self._child is not None:
            return
        try:
            self._child = _Child()
        except OSError as error:
            raise BuildError(
                f"the build process cannot be started: {error}; free some memory, space in {tempfile.gettempdir()} or "
                "file handles, or tune with backends that build in this process, such as inductor"
            ) from error

    @property
    def is_running(self) -> bool:
        """True while there is a child; after a failure, False says that the child died of it or was stopped."""
        return self._child is not None

    def build(self, backend: Backend, request: BuildRequest) -> BuildResult:
        """``backend.build(request)`` in the child.

        Raises:
            BuildError: if it fails, takes too long, or the child dies or cannot be started, with how.
            GraphBreakException: if the forward cannot be captured as one graph.
        """
        label = f"{backend.name} failed on {request.path}"
        task = {"backend": _pickled(backend, label), "request": pack_request(request)}
        found = self._run("build", task, label, BuildError)
        return BuildResult(
            files=found["files"], envelope=ShapeEnvelope.from_dict(found["envelope"]), engine=found["engine"]
        )

    def try_engine(
        self,
        backend: Backend,
        path: str,
        folder: Path,
        engine: Mapping[str, Any],
        graph: GraphSpec,
        envelope: ShapeEnvelope,
        device: torch.device,
    ) -> None:
        """Load an engine in the child, give it random weights and run it at both ends of its shapes.

        What it answers is not looked at: this is for native engines of others, whose code is about to be trusted. An
        engine of data needs no trial, and one that is good only for certain tables of a module would be refused in it.

        Raises:
            EngineLoadError: if it cannot be loaded or run, or the child dies of it, with how.
            BuildError: if there is no child to try it in, which says nothing about the engine.
        """
        label = f"the {backend.name} engine of {path} failed its first load in a child process"
        task = {
            "backend": _pickled(backend, label),
            "path": path,
            "folder": str(folder),
            "engine": dict(engine),
            "graph": graph.to_dict(),
            "envelope": envelope.to_dict(),
            "device": str(device),
        }
        self._run("try", task, label, EngineLoadError)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _run(self, kind: str, task: Mapping[str, Any], label: str, error: type[CandidateError]) -> Any:
        self.start()
        child = self._child
        assert child is not None
        try:
            answer = child.ask({"kind": kind, **task}, self.timeout_s)
        except _Died as death:
            self.close()
            raise error(f"{label}: {death}") from None
        except BaseException:  # An interrupt, for one: what the child is about to say would answer the next task.
            self.close()
            raise
        if child.is_late:  # Stopped in the moment in which it answered.
            self.close()
        if answer["error"] is not None:
            name, message = answer["error"]
            raise _ERRORS.get(name, error)(message if name in _ERRORS else f"{label}: {name}: {message}")
        return answer["result"]


class _Died(Exception):
    """A child gave no answer; the message says why."""


class _Child:
    """One worker process."""

    def __init__(self) -> None:
        self.is_late = False
        with contextlib.ExitStack() as undo:
            ours, theirs = Pipe()
            undo.enter_context(ours)
            with theirs:
                # A file, not a pipe: nobody reads it while the child works, and a full pipe would stop it.
                words: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
                process = _started(theirs.fileno(), words)
            undo.pop_all()
        self._pipe, self._words, self._process = ours, words, process
        self._end = weakref.finalize(self, _kill, process, ours, words)

    def ask(self, task: Mapping[str, Any], timeout_s: float | None) -> Mapping[str, Any]:
        """Send a task and wait for the answer.

        Raises:
            _Died: if there is none.
        """
        try:
            if timeout_s is None or timeout_s > _LONGEST:
                return self._answer(task, None)
            # A child that hangs before it reads would let a large task wait in the pipe for ever: then nothing but its
            # end ends that.
            timer = threading.Timer(timeout_s, self._stop)
            timer.daemon = True
            timer.start()
            try:
                return self._answer(task, time.monotonic() + timeout_s)
            finally:
                timer.cancel()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            if self.is_late:
                raise _Died(f"it took longer than {timeout_s:g} s, and was stopped") from error
            raise _Died(f"its process {self._fate()}") from error

    def _answer(self, task: Mapping[str, Any], deadline: float | None) -> Mapping[str, Any]:
        self._pipe.send_bytes(pickle.dumps(task))
        if not self._pipe.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
            self.is_late = True
            raise EOFError
        answer: Mapping[str, Any] = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 - our own child, our own pipe
        return answer

    def _stop(self) -> None:
        self.is_late = True
        _kill_group(self._process)

    def _fate(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe and went on running; it was stopped"
        if code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        else:
            how = f"ended with exit code {code}"
        self._words.seek(0)
        lines = self._words.read()[-4096:].decode(errors="replace").strip().splitlines()
        return f"{how}; its last words: {lines[-1].strip()[:_LAST_WORDS]}" if lines else how

    def kill(self) -> None:
        """End the process and all it started."""
        self._end()


def _kill(process: subprocess.Popen[bytes], pipe: Connection[Any, Any], words: IO[bytes]) -> None:
    pipe.close()
    _kill_group(process)
    process.wait()
    words.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # It and all it started may have ended.
        os.killpg(process.pid, signal.SIGKILL)


def _started(fd: int, words: IO[bytes]) -> subprocess.Popen[bytes]:
    """A worker that serves the pipe ``fd``."""
    settings = {
        "fd": fd,
        # Some programs put paths there that are no strings; what is neither, Python itself passes over.
        "path": [os.fsdecode(entry) for entry in sys.path if isinstance(entry, (str, os.PathLike))],
        "threads": torch.get_num_threads(),
        "parent": os.getpid(),
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _START, json.dumps(settings)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=words,
        stderr=words,
        start_new_session=True,  # Ctrl-C is for the parent, which then kills this one.
    )


def _pickled(backend: Backend, label: str) -> bytes:
    try:
        return pickle.dumps(backend)
    except Exception as error:
        raise BuildError(
            f"{label}: it is to run in a child process, and the backend cannot be sent there: {error}. "
            "Define its class at the top of a module that can be imported."
        ) from error
