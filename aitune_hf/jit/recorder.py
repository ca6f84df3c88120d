"""What a module's calls look like: graphs, shapes and a few samples, learned while the calls run."""

from __future__ import annotations

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
from aitune_hf.jit.guards import ModuleGuard

__all__ = ["GraphRecorder", "RecordedGraph", "bind_call"]

Forward = Callable[..., Any]


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
    """A graph that was seen, its samples, and the reason why it cannot be tuned, if there is one."""

    spec: GraphSpec
    samples: SampleStore
    untunable: str | None = None
    calls: int = 0
    seconds: float = 0.0


@dataclass
class GraphRecorder:
    """Learns the graphs of one module.

    Attributes:
        keep_samples: clone tensors of some calls; otherwise only their description is kept.
        graphs: identity → graph, in the order in which they were first seen.
        calls: calls recorded.
        seconds: time spent in the module's forward.
    """

    signature: ForwardSignature
    keep_samples: bool = True
    dynamic_shapes: DynamicShapes = field(default_factory=DynamicShapes)
    max_sample_bytes: int = 1 << 30
    graphs: dict[str, RecordedGraph] = field(default_factory=dict)
    calls: int = 0
    seconds: float = 0.0
    _known: dict[Hashable, tuple[RecordedGraph, Shapes]] = field(default_factory=dict)

    def run(self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call eagerly and learn from it. Never changes what the caller gets or sees raised."""
        self.calls += 1
        tensors: list[torch.Tensor] = []
        key = call_key(args, kwargs, module.training, tensors)
        if key is not None and key in self._known:
            known, shapes = self._known[key]
            if not self.keep_samples or known.untunable or not known.samples.wants(shapes):
                return self._timed(known, forward, args, kwargs)
        try:
            call = bind_call(module, self.signature, args, kwargs)
        except TypeError:
            return forward(*args, **kwargs)  # Not a valid call: let the forward itself say so.
        return self._learn(call, key, forward, module, args, kwargs)

    def _timed(
        self, graph: RecordedGraph | None, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        start = time.perf_counter()
        output = forward(*args, **kwargs)
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        if graph is not None:
            graph.calls += 1
            graph.seconds += elapsed
        return output

    def _learn(
        self,
        call: BoundCall,
        key: Hashable | None,
        forward: Forward,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        shapes = call.inputs.shapes[0]
        graph = self.graphs.get(call.identity)
        keep = self.keep_samples and (graph is None or not graph.untunable)
        store = graph.samples if graph else SampleStore(max_bytes=self.max_sample_bytes)
        if keep and (graph is None or key not in self._known):
            keep = store.wants(shapes)  # A known key has asked already.
        clones = [leaf.detach().clone() for leaf in call.leaves] if keep else []
        watch = _Watch(module, call.leaves) if keep else None
        before = self.seconds
        output = self._timed(graph, forward, args, kwargs)
        problem = watch.problem() if watch else None
        out_node, out_leaves = flatten(output)
        outputs = SampleMetadata.of_leaves(out_node, out_leaves)
        if graph is None:
            graph = self._new_graph(call, outputs, store)
            graph.calls, graph.seconds = 1, self.seconds - before
        else:
            try:
                graph.spec.update_shapes_seen(call.inputs, outputs)
            except UntunableError as error:
                problem = problem or str(error)
        graph.untunable = graph.untunable or problem or _unfit(call, outputs)
        if key is not None:
            self._known[key] = (graph, shapes)
        # Samples of a graph that cannot be tuned as a whole still serve to replay what is below it.
        if keep and not call.inputs.opaque and not call.context.needs_grad:
            copies = [leaf.detach().clone() for leaf in out_leaves]
            store.add(
                Sample(
                    inputs=clones,
                    input_node=call.node,
                    outputs=copies,
                    output_node=out_node,
                    context=call.context,
                )
            )
        return output

    def _new_graph(self, call: BoundCall, outputs: SampleMetadata, store: SampleStore) -> RecordedGraph:
        spec = GraphSpec(
            f"graph{len(self.graphs)}", call.inputs, outputs, self.signature, self.dynamic_shapes, call.context
        )
        graph = self.graphs[call.identity] = RecordedGraph(spec, store)
        return graph

    def clear_samples(self) -> None:
        """Let go of all recorded tensors."""
        for graph in self.graphs.values():
            graph.samples.clear()
        self._known.clear()


class _Watch:
    """Looks for what a call does besides computing its output."""

    def __init__(self, module: nn.Module, leaves: list[torch.Tensor]) -> None:
        self._guard = ModuleGuard(module)
        self._leaves = [leaf for leaf in leaves if not leaf.is_inference()]
        self._versions = [leaf._version for leaf in self._leaves]
        self._weights = [t for t in (*module.parameters(), *module.buffers()) if not t.is_inference()]
        self._weight_versions = [t._version for t in self._weights]
        self._rng = torch.get_rng_state()

    def problem(self) -> str | None:
        if [leaf._version for leaf in self._leaves] != self._versions:
            return "the forward changes one of its inputs in place"
        change = self._guard.structure_change()
        if change:
            return f"the forward keeps state on the module ({change.removesuffix(' after tuning')})"
        if [t._version for t in self._weights] != self._weight_versions:
            return "the forward changes a parameter or buffer in place"
        if not torch.equal(self._rng, torch.get_rng_state()):
            return "the forward draws random numbers"
        return None


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
