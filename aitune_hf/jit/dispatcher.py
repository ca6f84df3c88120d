"""Which engine answers a call, decided once per exact call key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.base import Engine
from aitune_hf.config import Tolerance
from aitune_hf.graph.call_key import call_key
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.graph.structure import flatten, unflattener
from aitune_hf.graph.torch_state import interceptor_active
from aitune_hf.jit.comparison import compare_outputs
from aitune_hf.jit.guards import ModuleGuard
from aitune_hf.jit.recorder import bind_call

__all__ = ["FIRST_CALL", "Dispatcher", "InstalledEngine"]

Forward = Callable[..., Any]
#: Plans kept per module; a value that changes at every call must not grow memory.
MAX_PLANS = 1024
FIRST_CALL = "first call of a loaded engine, checked against eager"
_WEIGHTS = "weights no longer fit the engine"


@dataclass(eq=False)
class InstalledEngine:
    """An engine at work for one graph.

    Attributes:
        trusted: its outputs were checked against eager in this process; otherwise its first call is checked.
        failed: why it must not be used any more.
        load_s: seconds it took to load.
    """

    graph: GraphSpec
    envelope: ShapeEnvelope
    engine: Engine
    backend: str
    tolerance: Tolerance | None = None
    trusted: bool = False
    failed: str | None = None
    load_s: float = 0.0
    rebuild: Callable[[Sequence[Any]], Any] = field(init=False, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.rebuild = unflattener(self.graph.output_spec.node)


@dataclass(frozen=True)
class _Plan:
    """How to answer calls of one key: by an engine, or by eager with a reason."""

    engine: InstalledEngine | None
    reason: str = ""
    gather: tuple[int, ...] | None = None
    copies: tuple[int, ...] = ()


class Dispatcher:
    """Answers the calls of one tuned module.

    Attributes:
        on_eager: told the reason of each call that eager answers.
        on_engine: told of each call that an engine answers.
    """

    def __init__(
        self,
        module: nn.Module,
        signature: ForwardSignature,
        engines: Sequence[InstalledEngine],
        untuned: Mapping[str, str],
        on_engine: Callable[[], object],
        on_eager: Callable[[str], object],
    ) -> None:
        """Make one.

        Args:
            signature: of the module's forward.
            untuned: graph identity → why that graph has no engine.
        """
        self._signature = signature
        self.engines = list(engines)
        self.on_engine = on_engine
        self.on_eager = on_eager
        self._untuned = dict(untuned)
        self._by_graph: dict[str, list[InstalledEngine]] = {}
        for installed in self.engines:
            self._by_graph.setdefault(installed.graph.key, []).append(installed)
        self._guard = ModuleGuard(module)
        self._plans: dict[Hashable, _Plan] = {}
        self._rebinding = threading.Lock()
        self._checked_scope: object = None
        self._scope_change: str | None = None

    def call(
        self,
        forward: Forward,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scope: object = None,
    ) -> Any:
        """Answer one call.

        Args:
            scope: an object that stays the same for one call of the pipeline around; the module's structure is compared
                once per scope, or on every call without one.
        """
        tensors: list[torch.Tensor] = []
        key = call_key(args, kwargs, module.training, tensors)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, module, args, kwargs, tensors)
        installed = plan.engine
        if installed is None:
            return self._eager(plan.reason, forward, args, kwargs)
        reason = self._reason_for_eager(scope) or installed.failed
        if reason is not None:
            return self._eager(reason, forward, args, kwargs)
        if not installed.trusted:
            return self._first_call(installed, plan, tensors, forward, args, kwargs)
        try:
            outputs = installed.engine(_inputs(plan, tensors))
        except Exception as error:  # noqa: BLE001 - native code may raise anything; eager is always right.
            installed.failed = f"the {installed.backend} engine raised {type(error).__name__}: {error}"
            return self._eager(installed.failed, forward, args, kwargs)
        self.on_engine()
        return installed.rebuild(outputs)

    def _eager(self, reason: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.on_eager(reason)
        return forward(*args, **kwargs)

    def _reason_for_eager(self, scope: object) -> str | None:
        if interceptor_active():
            return "a torch mode, transform or trace is active"
        if torch.is_grad_enabled() and self._guard.needs_grad():
            return "gradients are wanted"
        if scope is None or scope is not self._checked_scope:
            self._scope_change = self._guard.structure_change()
            self._checked_scope = scope
        if self._scope_change is not None:
            return self._scope_change
        if self._guard.weights_moved():
            self._rebind()
        return None

    def _rebind(self) -> None:
        """Weights lie elsewhere now. An engine that cannot follow is out until they fit again."""
        with self._rebinding:
            if not self._guard.weights_moved():
                return  # Another thread has done it.
            for installed in self.engines:
                try:
                    installed.engine.rebind()
                except Exception as error:  # noqa: BLE001 - see call().
                    installed.failed = f"{_WEIGHTS}: {error}"
                else:
                    if (installed.failed or "").startswith(_WEIGHTS):
                        installed.failed = None
            self._guard.accept_weights()

    def _first_call(
        self,
        installed: InstalledEngine,
        plan: _Plan,
        tensors: list[torch.Tensor],
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Check an engine that came from a cache against eager before it is believed. Returns eager's answer."""
        inputs = [leaf.detach().clone() for leaf in _inputs(plan, tensors)]
        output = self._eager(FIRST_CALL, forward, args, kwargs)
        with installed.lock:
            if installed.trusted or installed.failed:
                return output
            node, expected = flatten(output)
            try:
                with torch.no_grad():
                    ours = list(installed.engine(inputs))
                _, problem = compare_outputs(ours, expected, installed.tolerance)
                if problem is None and node != installed.graph.output_spec.node:
                    problem = "the structure of the output is not eager's"
            except Exception as error:  # noqa: BLE001 - see call().
                problem = f"it raised {type(error).__name__}: {error}"
            if problem:
                installed.failed = f"the {installed.backend} engine from the cache is wrong: {problem}"
            else:
                installed.rebuild = unflattener(node)  # With eager's own classes.
                installed.trusted = True
        return output

    def _plan(
        self,
        key: Hashable | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> _Plan:
        if key is None:
            return _Plan(None, "an argument is of a kind that no engine takes")
        plan = self._make_plan(module, args, kwargs, tensors)
        if len(self._plans) >= MAX_PLANS:
            self._plans = {}
        self._plans[key] = plan
        return plan

    def _make_plan(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> _Plan:
        if any(leaf.is_neg() or leaf.is_conj() or leaf.layout != torch.strided for leaf in tensors):
            return _Plan(None, "an argument is a lazy or sparse tensor")
        try:
            call = bind_call(module, self._signature, args, kwargs)
        except TypeError:
            return _Plan(None, "the call does not fit the signature")
        if call.context.needs_grad:
            return _Plan(None, "gradients are wanted")
        candidates = self._by_graph.get(call.identity)
        if not candidates:
            reason = self._untuned.get(call.identity, "a form of call that was not seen in tuning")
            return _Plan(None, reason)
        shapes = [tuple(leaf.shape) for leaf in call.leaves]
        names = [str(place) for place in call.inputs.tensors]
        mismatch = ""
        for installed in candidates:
            mismatch = installed.envelope.mismatch(shapes, names) or ""
            if not mismatch:
                return self._plan_for(installed, call.leaves, tensors)
        return _Plan(None, f"outside the verified shapes: {mismatch}")

    def _plan_for(self, installed: InstalledEngine, leaves: list[torch.Tensor], tensors: list[torch.Tensor]) -> _Plan:
        position = {id(leaf): index for index, leaf in reversed(list(enumerate(tensors)))}
        try:
            gather = tuple(position[id(leaf)] for leaf in leaves)
        except KeyError:
            return _Plan(None, "a default argument is a tensor")
        copies = tuple(index for index, leaf in enumerate(leaves) if not leaf.is_contiguous())
        identical = gather == tuple(range(len(tensors)))
        return _Plan(installed, gather=None if identical else gather, copies=copies)

    def close(self) -> None:
        """Let go of all engines."""
        for installed in self.engines:
            installed.engine.close()
        self.engines.clear()
        self._by_graph.clear()
        self._plans.clear()


def _inputs(plan: _Plan, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    inputs = tensors if plan.gather is None else [tensors[index] for index in plan.gather]
    for index in plan.copies:
        inputs[index] = inputs[index].contiguous()
    return inputs
