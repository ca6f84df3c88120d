"""What a module's calls look like: graphs, shapes and a few samples, learned while the calls run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aitune_hf.errors import UntunableError
from aitune_hf.graph.call_context import CallContext, autocast_state
from aitune_hf.graph.call_key import call_key
from aitune_hf.graph.dynamic_shapes import DynamicShapes
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.graph_spec import GraphSpec, graph_identity
from aitune_hf.graph.sample_metadata import SampleMetadata, Shapes
from aitune_hf.graph.sample_store import Sample, SampleStore
from aitune_hf.graph.structure import Node, flatten
from aitune_hf.graph.torch_state import interceptor_active
from aitune_hf.jit.side_effects import SideEffectWatch

__all__ = ["GraphRecorder", "RecordedGraph", "bind_call"]

logger = logging.getLogger("aitune_hf")
Forward = Callable[..., Any]
#: Call forms that are told apart per module; a value that is another at every call must not grow memory.
MAX_GRAPHS = 64
MAX_KNOWN = 1024


@dataclass(frozen=True)
class BoundCall:
    """A call brought to its one form."""

    node: Node
    leaves: list[torch.Tensor]
    inputs: SampleMetadata
    context: CallContext
    identity: str


def bind_call(
    module: nn.Module, signature: ForwardSignature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> BoundCall:
    """Bind a call and work out which graph it belongs to.

    Raises:
        TypeError: if it does not fit the signature.
    """
    node, leaves = flatten(signature.bind(args, kwargs))
    device_type = leaves[0].device.type if leaves else "cpu"
    needs_grad = torch.is_grad_enabled() and (
        any(leaf.requires_grad for leaf in leaves) or any(p.requires_grad for p in module.parameters())
    )
    context = CallContext(training=module.training, needs_grad=needs_grad, autocast=autocast_state(device_type))
    inputs = SampleMetadata.of_leaves(node, leaves)
    return BoundCall(node, leaves, inputs, context, graph_identity(inputs, context))


@dataclass
class RecordedGraph:
    """A graph that was seen and its samples.

    Attributes:
        untunable: why it cannot be tuned, if so.
        repeatable: running its samples once more leaves no trace.
    """

    spec: GraphSpec
    samples: SampleStore
    untunable: str | None = None
    calls: int = 0
    seconds: float = 0.0
    repeatable: bool = True


@dataclass
class _Preparation:
    """What was learned of a call before it ran."""

    graph: RecordedGraph | None = None
    key: Hashable | None = None
    call: BoundCall | None = None
    clones: list[torch.Tensor] | None = None
    watch: SideEffectWatch | None = None


@dataclass
class GraphRecorder:
    """Learns the graphs of one module. Safe from several threads.

    Attributes:
        keep_samples: clone tensors of some calls; otherwise only their description is kept.
        graphs: identity → graph, in the order in which they were first seen.
        calls: calls recorded.
        seconds: time spent in the module's forward.
        overflow: calls that were not looked at because they were of one form too many.
    """

    signature: ForwardSignature
    keep_samples: bool = True
    dynamic_shapes: DynamicShapes = field(default_factory=DynamicShapes)
    max_sample_bytes: int = 1 << 30
    graphs: dict[str, RecordedGraph] = field(default_factory=dict)
    calls: int = 0
    seconds: float = 0.0
    overflow: int = 0
    _known: dict[Hashable, tuple[RecordedGraph, Shapes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def run(self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call eagerly and learn from it. Never changes what the caller gets or sees raised."""
        if interceptor_active():
            return forward(*args, **kwargs)  # Its tensors are no real ones, or somebody watches each operation.
        prepared = self._prepare(module, args, kwargs)
        start = time.perf_counter()
        output = forward(*args, **kwargs)
        seconds = time.perf_counter() - start
        with self._lock:
            self.calls += 1
            self.seconds += seconds
            try:
                self._learn(prepared, output, seconds)
            except Exception as error:  # noqa: BLE001 - a call that cannot be described must still be answered.
                logger.debug("a call of %s was not recorded: %r", type(module).__name__, error)
        return output

    def _prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Preparation:
        try:
            with self._lock:
                known = self._look_up(module, args, kwargs)
                if known.graph is not None:
                    return known
                call = bind_call(module, self.signature, args, kwargs)
                graph = self.graphs.get(call.identity)
                if graph is None and len(self.graphs) >= MAX_GRAPHS:
                    self.overflow += 1
                    return _Preparation()
                keep = self._keeps(graph, known.key, call)
            clones = [_clone(leaf) for leaf in call.leaves] if keep else None
            watch = SideEffectWatch(module, call.leaves, clones) if clones is not None else None
        except Exception as error:  # noqa: BLE001 - as in run(); a wrong call is told by the forward itself.
            logger.debug("a call of %s was not recorded: %r", type(module).__name__, error)
            return _Preparation()
        return _Preparation(key=known.key, call=call, clones=clones, watch=watch)

    def _look_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Preparation:
        """The graph of a call that is like one before and need not be looked at again; else only the call's key."""
        key = call_key(args, kwargs, module.training, [])
        if key is None or torch.is_grad_enabled():
            return _Preparation()  # A key does not say whether a parameter wants a gradient.
        graph, shapes = self._known.get(key, (None, ()))
        if graph is None or (self.keep_samples and graph.untunable is None and graph.samples.wants(shapes)):
            return _Preparation(key=key)
        return _Preparation(graph=graph, key=key)

    def _keeps(self, graph: RecordedGraph | None, key: Hashable | None, call: BoundCall) -> bool:
        if not self.keep_samples or (graph is not None and graph.untunable is not None):
            return False
        if graph is None or key in self._known:
            return True  # The first call of a graph; or a known key, for which the store was asked already.
        return graph.samples.wants(call.inputs.shapes[0])

    def _learn(self, prepared: _Preparation, output: Any, seconds: float) -> None:
        call, graph = prepared.call, prepared.graph
        if call is None:
            if graph is not None:
                graph.calls += 1
                graph.seconds += seconds
            return
        effect = prepared.watch.found() if prepared.watch is not None else None
        out_node, out_leaves = flatten(output)
        outputs = SampleMetadata.of_leaves(out_node, out_leaves)
        problem = effect.reason if effect else None
        graph = self.graphs.get(call.identity)
        if graph is None:
            graph = self._new_graph(call, outputs, counted=prepared.clones is not None)
        else:
            try:
                graph.spec.update_shapes_seen(call.inputs, outputs)
            except UntunableError as error:
                problem = problem or str(error)
        graph.calls += 1
        graph.seconds += seconds
        graph.repeatable = graph.repeatable and (effect is None or effect.repeatable)
        graph.untunable = graph.untunable or problem or _unfit(call, outputs)
        if prepared.key is not None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[prepared.key] = (graph, call.inputs.shapes[0])
        # Samples of a graph that cannot be tuned as a whole still serve to replay what is below it.
        if not graph.repeatable:
            graph.samples.clear()
        elif prepared.clones is not None and self.keep_samples and not (call.inputs.opaque or call.context.needs_grad):
            copies = [_clone(leaf) for leaf in out_leaves]
            graph.samples.add(
                Sample(
                    inputs=prepared.clones,
                    input_node=call.node,
                    outputs=copies,
                    output_node=out_node,
                    context=call.context,
                )
            )

    def _new_graph(self, call: BoundCall, outputs: SampleMetadata, counted: bool) -> RecordedGraph:
        spec = GraphSpec(
            f"graph{len(self.graphs)}", call.inputs, outputs, self.signature, self.dynamic_shapes, call.context
        )
        graph = self.graphs[call.identity] = RecordedGraph(spec, SampleStore(max_bytes=self.max_sample_bytes))
        if counted:
            graph.samples.wants(call.inputs.shapes[0])
        return graph

    def clear_samples(self) -> None:
        """Let go of all recorded tensors, and keep none any more."""
        with self._lock:
            self.keep_samples = False
            for graph in self.graphs.values():
                graph.samples.clear()
            self._known.clear()


def _clone(leaf: torch.Tensor) -> torch.Tensor:
    """A copy that is a normal tensor whatever mode the call was made in."""
    with torch.inference_mode(False), torch.no_grad():
        return leaf.detach().clone()


def _unfit(call: BoundCall, outputs: SampleMetadata) -> str | None:
    """Why no engine can stand for such a call, or None."""
    for place, kind in call.inputs.opaque.items():
        return f"the argument {place} is a {kind}, which no engine can take"
    for place, kind in outputs.opaque.items():
        return f"the output {place} is a {kind}, which no engine can give"
    if not call.inputs.tensors or not outputs.tensors:
        return "no tensor goes in or none comes out"
    if call.context.needs_grad:
        return "gradients were wanted; call it under torch.no_grad() to have it tuned"
    if call.context.training:
        return "the module is in training mode; call .eval() first"
    return None
