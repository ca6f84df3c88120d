"""A TensorRT plan at work: loaded, given the module's weights, and run on torch's tensors and streams."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aitune_hf.backends.base import LoadRequest
from aitune_hf.backends.constants import memory_key
from aitune_hf.backends.tensorrt_sdk import Sdk, driver_problem, torch_dtype
from aitune_hf.backends.tensorrt_weights import PlanWeights
from aitune_hf.errors import EngineLoadError, UnfitInputError

__all__ = ["TensorRTEngine", "engine_summary", "load_plan", "refittable_names"]

#: What TensorRT's kernels expect of an address. Torch's own allocations are aligned to 512 bytes; views may not be.
_ALIGNMENT = 256
#: Layers whose names go into a manifest, and how long they may be.
_NAMES, _NAME_LENGTH = 200, 120


def load_plan(sdk: Sdk, content: bytes, device: torch.device, where: str) -> tuple[Any, Any]:
    """A plan as TensorRT's engine, and the runtime that must outlive it.

    Raises:
        EngineLoadError: if there is no driver, or the plan is not for this GPU or this version.
    """
    problem = driver_problem()
    if problem:
        raise EngineLoadError(f"{where}: a {sdk.title} engine cannot be loaded: {problem}")
    try:
        package = sdk.load()
    except ImportError as error:
        raise EngineLoadError(f"{where}: the engine needs {sdk.title} ({error}): pip install {sdk.install}") from error
    said: list[str] = []
    with torch.cuda.device(device):
        runtime = package.Runtime(sdk.log(said))
        engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        why = " ".join(said[0].split())[:300] if said else "it does not say why"
        raise EngineLoadError(f"{where}: {sdk.title} {sdk.version()} refuses the plan: {why}")
    return runtime, engine


def refittable_names(sdk: Sdk, engine: Any) -> set[str]:
    """Names of the weights that can be filled into a loaded engine."""
    package = sdk.load()
    return set(package.Refitter(engine, sdk.log([])).get_all_weights())


def engine_summary(package: Any, engine: Any) -> dict[str, Any]:
    """Facts of a loaded engine, as JSON: its size, and what it is made of, by the engine inspector."""
    return {"layers": engine.num_layers, "memory_bytes": engine.device_memory_size_v2, **_inspected(package, engine)}


def _inspected(package: Any, engine: Any) -> dict[str, Any]:
    """Names of the engine's layers, which say what was fused, in order, as many as a manifest should hold."""
    said = engine.create_engine_inspector().get_engine_information(package.LayerInformationFormat.JSON)
    try:
        layers = json.loads(said)["Layers"]
    except (ValueError, KeyError, TypeError):
        return {}
    names = [str(layer.get("Name", "")) if isinstance(layer, dict) else str(layer) for layer in layers]
    return {"layer_names": [name[:_NAME_LENGTH] for name in names[:_NAMES]]}


class _Context:
    """An execution context of one thread, and the stream it uses where the caller has none of its own."""

    def __init__(self, context: Any, device: torch.device) -> None:
        self.context = context
        self.generation = -1
        self.side = _new_stream(device)


class TensorRTEngine:
    """A plan bound to one module; see :class:`aitune_hf.backends.base.Engine`.

    Every thread gets an execution context of its own. Work is queued on torch's current stream of the calling thread.
    """

    def __init__(self, sdk: Sdk, request: LoadRequest, content: bytes) -> None:
        self._sdk = sdk
        self._path = request.path
        # The module owns its engines; a strong reference back would keep both alive in a cycle.
        self._module = weakref.ref(request.module)
        self._device = _indexed(request.device)
        self._weights = PlanWeights.from_json(request.engine["weights"])
        self._inputs: Sequence[str | None] = request.engine["inputs"]
        self._outputs: Sequence[str] = request.engine["outputs"]
        self._lock = threading.Lock()
        self._local = threading.local()
        #: How often tensors were bound, and those that are; None while the engine has none.
        self._bound: tuple[int, dict[str, torch.Tensor] | None] = (0, None)
        self._tables: list[tuple[torch.Tensor, int]] = []
        live = self._live()  # Checked before any native code runs.
        self._runtime, self._engine = load_plan(sdk, content, self._device, self._path)
        self._check_interface()
        self._bind(live)

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run on torch's current stream."""
        if any(table._version != version for table, version in self._tables):
            with self._lock:
                self._fitting()
        with torch.cuda.device(self._device):
            # What is bound is held on to until the work is queued, should another thread let go of it meanwhile.
            mine, bound = self._own_context()
            current = torch.cuda.current_stream(self._device)
            # On the default stream TensorRT would wait for the whole device.
            stream = current if current.cuda_stream else mine.side
            feeds = self._feed(mine, inputs)
            outputs = [self._allocate(mine.context, name) for name in self._outputs]
            for name, output in zip(self._outputs, outputs, strict=True):
                mine.context.set_tensor_address(name, output.data_ptr() or self._spare.data_ptr())
            if stream is not current:
                stream.wait_stream(current)
            if not mine.context.execute_async_v3(stream.cuda_stream):
                raise EngineLoadError(f"{self._path}: {self._sdk.title} did not run the engine")
            if stream is not current:
                current.wait_stream(stream)
            del feeds, bound
            return outputs

    def rebind(self) -> None:
        """Take up the module's tensors again, their values too where the engine has copies."""
        with self._lock:
            if self._engine is None:
                raise EngineLoadError(f"{self._path}: the engine is closed")
            if self._weights.delivery == "plan":
                raise EngineLoadError(f"{self._path}: the weights are part of the plan; tune again to use the new ones")
            live = self._fitting()
            bound = self._bound[1]
            if bound is not None and not self._weights.copies:
                same = {name: memory_key(tensor) for name, tensor in bound.items()}
                if same == {name: memory_key(tensor) for name, tensor in live.items()}:
                    return
            torch.cuda.synchronize(self._device)  # Calls under way still read what is bound.
            self._bind(live)

    def close(self) -> None:
        """Wait for running calls, then let go of the engine."""
        with self._lock:
            if self._engine is None:
                return
            torch.cuda.synchronize(self._device)
            self._local = threading.local()
            self._engine = None
            self._rebound(None)

    def _fitting(self) -> dict[str, torch.Tensor]:
        """The module's tensors. Where they do not fit any more, those from before are let go of."""
        try:
            return self._live()
        except EngineLoadError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        torch.cuda.synchronize(self._device)  # Work that is queued still reads them.
        self._rebound(None)

    def _rebound(self, tensors: dict[str, torch.Tensor] | None) -> None:
        self._bound = (self._bound[0] + 1, tensors)

    def _live(self) -> dict[str, torch.Tensor]:
        module = self._module()
        if module is None:
            raise EngineLoadError(f"{self._path}: the module of this engine no longer exists")
        live = self._weights.live(module, self._path, self._device)
        self._tables = self._weights.tables(module, self._path)
        return live

    def _bind(self, live: dict[str, torch.Tensor]) -> None:
        if self._weights.delivery == "refit":
            self._refit(live)
            self._rebound({})
            return
        for name, tensor in live.items():
            if tensor.data_ptr() % _ALIGNMENT:
                self._let_go()
                raise EngineLoadError(
                    f"{self._path}: the weight {name} lies at an address that TensorRT cannot read (it is no multiple of "
                    f"{_ALIGNMENT}: a view into a larger tensor?)"
                )
        self._rebound(live)

    def _refit(self, live: Mapping[str, torch.Tensor]) -> None:
        package = self._sdk.load()
        said: list[str] = []
        refitter = package.Refitter(self._engine, self._sdk.log(said))
        host = {name: tensor.cpu().contiguous() for name, tensor in live.items()}
        for name, tensor in host.items():
            kind = refitter.get_weights_prototype(name).dtype
            if torch_dtype(package, kind) != tensor.dtype:
                raise EngineLoadError(f"{self._path}: the engine wants {name} as {kind}, the module has {tensor.dtype}")
            weights = package.Weights(kind, tensor.data_ptr(), tensor.numel())
            if not refitter.set_named_weights(name, weights):
                raise EngineLoadError(f"{self._path}: the engine does not take the weight {name}: {said[:1]}")
        missing = refitter.get_missing_weights()
        if missing or not refitter.refit_cuda_engine():
            raise EngineLoadError(f"{self._path}: the engine's weights cannot be filled: {missing or said[:1]}")

    def _check_interface(self) -> None:
        package = self._sdk.load()
        there = {self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)}
        wanted = {name for name in (*self._inputs, *self._outputs) if name}
        if self._weights.delivery == "inputs":
            wanted |= set(self._weights.constants)
        if there != wanted:
            raise EngineLoadError(
                f"{self._path}: the plan and its description name different tensors: {sorted(there ^ wanted)[:5]}"
            )
        for name in there:
            if self._engine.get_tensor_location(name) != package.TensorLocation.DEVICE:
                raise EngineLoadError(f"{self._path}: the plan wants {name} in host memory, which is not supported")
        self._dtypes = {name: torch_dtype(package, self._engine.get_tensor_dtype(name)) for name in there}
        #: Something to point at where a tensor has no elements.
        self._spare = torch.empty(_ALIGNMENT, dtype=torch.uint8, device=self._device)

    def _own_context(self) -> tuple[_Context, Mapping[str, torch.Tensor]]:
        """This thread's context, and the tensors that its addresses are of."""
        mine: _Context | None = getattr(self._local, "mine", None)
        generation, bound = self._bound
        if mine is None or bound is None or mine.generation != generation:
            with self._lock:
                if self._engine is None:
                    raise EngineLoadError("the engine was closed")
                generation, bound = self._bound
                if bound is None:
                    raise EngineLoadError(f"{self._path}: the engine has no weights")
                mine = mine or _Context(self._engine.create_execution_context(), self._device)
                for name, tensor in bound.items():
                    mine.context.set_tensor_address(name, tensor.data_ptr() or self._spare.data_ptr())
                mine.generation = generation
                self._local.mine = mine
        return mine, bound

    def _feed(self, mine: _Context, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tell the context where the inputs are. What is returned must live until the work is queued."""
        feeds = []
        for name, given in zip(self._inputs, inputs, strict=True):
            if name is None:
                continue
            tensor = given.to(self._device, self._dtypes[name])
            if tensor.data_ptr() % _ALIGNMENT:
                tensor = tensor.clone()
            if not mine.context.set_input_shape(name, tuple(tensor.shape)):
                raise UnfitInputError(f"it does not take {name} of shape {list(tensor.shape)}")
            mine.context.set_tensor_address(name, tensor.data_ptr() or self._spare.data_ptr())
            feeds.append(tensor)
        return feeds

    def _allocate(self, context: Any, name: str) -> torch.Tensor:
        shape = tuple(context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            raise EngineLoadError(f"{self._path}: the size of output {name} depends on data, which is not supported")
        return torch.empty(shape, dtype=self._dtypes[name], device=self._device)


def _new_stream(device: torch.device) -> Any:
    stream: Any = torch.cuda.Stream  # Without types of its own.
    return stream(device)


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
