"""AOTInductor: a module's graph as a compiled library that holds no weights. The default backend everywhere."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aitune_hf.backends.aoti_compile import compile_package, compiler, compiler_options
from aitune_hf.backends.aoti_package import AOTIPackage, missing_loader
from aitune_hf.backends.base import BuildRequest, BuildResult, Engine, LoadRequest, Recipe, check_format
from aitune_hf.backends.call_gate import ONCE, CallGate
from aitune_hf.backends.constants import Constant, memory_key, resolve
from aitune_hf.backends.cuda_graphs import GraphedEngine
from aitune_hf.backends.requirements import elsewhere, unmet_requirement
from aitune_hf.errors import BuildError, ConfigError, EngineLoadError

if TYPE_CHECKING:
    from aitune_hf.backends.export import CapturedGraph

__all__ = ["InductorBackend", "InductorEngine"]

PACKAGE = "model.pt2"
RESIDUALS = "residuals.safetensors"
_OPTIONS = {"portable": False, "freezing": False, "max_autotune": False, "cuda_graphs": False}
#: A constant of at least this many bytes is looked for in the package, to be sure that it is not there.
_TELLING_BYTES = 256


class InductorBackend:
    """Builds and loads AOTInductor packages, on CPU and CUDA.

    Options:
        portable: build for every x86-64-v3 CPU instead of this one.
        freezing: fold and pack the weights into the engine, which is then good for them alone.
        max_autotune: let the compiler time more kernels; takes minutes.
        cuda_graphs: replay the engine as one CUDA graph; for fixed shapes only.
    """

    name = "inductor"
    native = True
    format = 1
    isolated = False

    def version(self) -> str:
        """Torch's version: it generates the code and defines what the library calls."""
        return torch.__version__.partition("+")[0]

    def available(self) -> str | None:
        """None if engines can be built here. Loading needs less: no compiler."""
        if not sys.platform.startswith("linux"):
            return f"engines are built on Linux only, this is {sys.platform}"
        if compiler() is None:
            name = os.environ.get("CXX", "g++")
            return f"no C++ compiler found: install {name} (on Debian and Ubuntu: apt-get install g++)"
        return missing_loader()

    def recipes(self, device: torch.device) -> list[Recipe]:
        """A package without weights first; one with packed weights, or more costly on CUDA, where effort is no matter."""
        plain = Recipe(weights="bound", effort="fast", cost=30.0)
        frozen = Recipe(options={"freezing": True}, weights="baked", effort="max", cost=40.0)
        if device.type == "cuda":
            graphs = Recipe(options={"cuda_graphs": True}, weights="bound", effort="balanced", cost=35.0)
            autotuned = Recipe(options={"max_autotune": True}, weights="bound", effort="max", cost=300.0)
            return [plain, graphs, frozen, autotuned]
        return [plain, frozen] if device.type == "cpu" else []

    def supports(self, request: BuildRequest) -> str | None:
        """None if the graph can be tried, else why not."""
        if request.device.type == "cuda" and importlib.util.find_spec("triton") is None:
            return "no Triton found, which generates the kernels: pip install triton"
        if request.options.get("cuda_graphs") and any(axis for row in request.axes for axis in row):
            return "a CUDA graph has fixed shapes"
        reason = unmet_requirement(request)
        if reason is None and request.options.get("cuda_graphs"):
            reason = elsewhere(request, "cuda", constants=True)
            return None if reason is None else f"a CUDA graph holds what it read from the host for good: {reason}"
        return reason

    def build(self, request: BuildRequest) -> BuildResult:
        """Build a package into ``request.workdir``."""
        options = _checked_options(request.options)
        settings = compiler_options(request.device, **{k: v for k, v in options.items() if k != "cuda_graphs"})
        reason = self.available() or self.supports(request)
        if reason:
            raise BuildError(f"{request.path}: inductor cannot build this graph: {reason}")
        graph = request.capture()
        package = request.workdir / PACKAGE
        try:
            compile_package(graph.program, package, settings, request.device)
        except BuildError as error:
            raise BuildError(f"{request.path}: {error}") from error
        if options["freezing"]:
            engine = {"format": self.format, "options": options, "constants": []}
            return BuildResult(files=[PACKAGE], envelope=graph.envelope, engine=engine)
        constants = _used_constants(graph, package, request)
        _check_weight_free(package, constants, request)
        files = [PACKAGE]
        residuals = {c.name: graph.residuals[c.name] for c in constants if c.kind == "residual"}
        if residuals:
            from safetensors.torch import save_file

            save_file({k: v.contiguous().cpu() for k, v in residuals.items()}, request.workdir / RESIDUALS)
            files.append(RESIDUALS)
        engine = {
            "format": self.format,
            "options": options,
            "constants": [constant.to_json() for constant in constants],
        }
        return BuildResult(files=files, envelope=graph.envelope, engine=engine)

    def load(self, request: LoadRequest) -> Engine:
        """Load a package and bind it to the module's tensors."""
        check_format(request, self.format)
        engine = InductorEngine(request)
        return GraphedEngine(engine, engine.device) if request.engine["options"].get("cuda_graphs") else engine


class InductorEngine:
    """A package bound to one module.

    As many calls as ``threads`` run at once. :meth:`rebind` waits for them and holds back new ones. Once weights do not fit
    any more, those that did are let go of, and calls are refused until a :meth:`rebind` succeeds.
    """

    def __init__(self, request: LoadRequest) -> None:
        self._path = request.path
        # The module owns its engines; a strong reference back would keep both alive in a cycle.
        self._module = weakref.ref(request.module)
        self._device = _indexed(request.device)
        self._constants = [Constant.from_json(item) for item in request.engine["constants"]]
        self._residuals = _load_residuals(request.folder, self._constants, self._device)
        # Checked before any native code runs.
        live = self._resolve()
        threads = max(1, request.threads)
        index = self._device.index if self._device.type == "cuda" else -1
        try:
            package = AOTIPackage(request.folder / PACKAGE, threads, -1 if index is None else index)
        except EngineLoadError as error:
            raise EngineLoadError(f"{self._path}: {error}") from error
        self._is_frozen = bool(request.engine["options"].get("freezing"))
        if set(package.names) != live.keys() and not self._is_frozen:
            package.close()
            odd = sorted(set(package.names) ^ live.keys())
            raise EngineLoadError(f"{self._path}: the package and its description name different constants: {odd[:5]}")
        self._package: AOTIPackage | None = package
        self._bound: dict[str, torch.Tensor] = {}
        self._release = weakref.finalize(self, _let_go, package, self._bound)
        self._rebinding = threading.Lock()
        self._gate = CallGate(threads)
        self._take, self._give = self._gate.take, self._gate.give
        self._run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = _no_weights
        self._is_ready = False
        self._bind(live)

    @property
    def device(self) -> torch.device:
        """Where it runs, with the index."""
        return self._device

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run; see :class:`aitune_hf.backends.base.Engine`."""
        held: list[int] = []
        try:
            held += map(self._take, ONCE)
            return self._run(inputs)
        finally:
            if held:
                self._give(held[0])

    def rebind(self) -> None:
        """Take up the module's tensors again; does nothing where none has moved."""
        with self._rebinding:
            if self._package is None:
                raise EngineLoadError(f"{self._path}: the engine is closed")
            try:
                live = self._resolve()
            except EngineLoadError:
                if not self._is_frozen:
                    self._gate.alone(self._unbind)
                raise
            if not self._is_ready or any(
                memory_key(self._bound[name]) != memory_key(tensor) for name, tensor in live.items()
            ):
                self._gate.alone(partial(self._bind, live))

    def close(self) -> None:
        """Wait for running calls, then let go of the library, the weights and all files."""
        with self._rebinding:
            self._gate.alone(self._end)

    def _resolve(self) -> dict[str, torch.Tensor]:
        module = self._module()
        if module is None:
            raise EngineLoadError(f"{self._path}: the module of this engine no longer exists")
        return resolve(self._constants, module, self._residuals, self._path, self._device)

    def _bind(self, live: Mapping[str, torch.Tensor]) -> None:
        assert self._package is not None
        if not self._is_frozen:
            self._unbind()
            self._bound.update({name: tensor.detach() for name, tensor in live.items()})
            try:
                self._package.bind(self._bound)
            except EngineLoadError as error:
                raise EngineLoadError(f"{self._path}: {error}") from error
        self._run, self._is_ready = self._package.run, True

    def _unbind(self) -> None:
        self._run, self._is_ready = _no_weights, False
        _forget(self._bound)

    def _end(self) -> None:
        self._run, self._package = _closed, None
        self._release()


def _no_weights(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    raise EngineLoadError("the engine has no weights")


def _closed(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    raise EngineLoadError("the engine was closed")


def _let_go(package: AOTIPackage, bound: dict[str, torch.Tensor]) -> None:
    package.close()
    _forget(bound)


def _forget(views: dict[str, torch.Tensor]) -> None:
    """Make views let go of their memory.

    Torch's runtime never releases the handles of user-managed constants, and each holds a view for good; so the views
    are emptied, and what stays is a few hundred bytes each.
    """
    for view in views.values():
        view.data = torch.empty(0, dtype=view.dtype, device=view.device)
    views.clear()


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(options.keys() - _OPTIONS.keys())
    if unknown:
        raise ConfigError(f"inductor has no option {', '.join(unknown)}; it has {', '.join(sorted(_OPTIONS))}")
    return {name: bool(options.get(name, default)) for name, default in _OPTIONS.items()}


def _used_constants(graph: CapturedGraph, package: Path, request: BuildRequest) -> list[Constant]:
    """The constants that the package asks for. A compiler may drop some, but must not add any of its own."""
    index = request.device.index if request.device.type == "cuda" else -1
    loaded = AOTIPackage(package, 1, -1 if index is None else index)
    loaded.close()
    known = {constant.name: constant for constant in graph.constants}
    strange = sorted(set(loaded.names) - known.keys())
    if strange:
        raise BuildError(f"{request.path}: the compiler made constants of its own ({', '.join(strange[:5])})")
    return [known[name] for name in sorted(loaded.names)]


def _check_weight_free(package: Path, constants: Sequence[Constant], request: BuildRequest) -> None:
    content = package.read_bytes()
    for constant in constants:
        if constant.kind == "residual":
            continue
        tensor = resolve([constant], request.module, {}, request.path)[constant.name]
        if not tensor.is_floating_point():
            continue  # Tables of indices, such as position ids, look like those that a compiler makes for itself.
        head = tensor.detach().flatten()[:_TELLING_BYTES].cpu().contiguous()
        raw = head.view(torch.uint8).numpy().tobytes()[:_TELLING_BYTES]
        # A run of one value, such as zeros, is found anywhere.
        if len(raw) == _TELLING_BYTES and len(set(raw)) > 8 and raw in content:
            raise BuildError(f"{request.path}: the package holds weights ({constant.name}), and must not")


def _load_residuals(folder: Path, constants: Sequence[Constant], device: torch.device) -> dict[str, torch.Tensor]:
    wanted = {constant.name: constant for constant in constants if constant.kind == "residual"}
    if not wanted:
        return {}
    from safetensors.torch import load_file

    stored = load_file(folder / RESIDUALS)
    return {
        name: stored[name].to(device if constant.device_type == device.type else constant.device_type, copy=True)
        for name, constant in wanted.items()
        if name in stored
    }
