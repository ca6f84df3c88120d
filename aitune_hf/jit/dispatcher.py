"""Which engine answers a call, decided once per exact call key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aitune_hf.backends.base import Engine, WeightsPolicy
from aitune_hf.config import Tolerance
from aitune_hf.errors import EngineLoadError, UnfitInputError
from aitune_hf.graph.call_key import call_key
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.shape_envelope import ShapeEnvelope
from aitune_hf.graph.structure import flatten, unflattener
from aitune_hf.graph.torch_state import interceptor_active
from aitune_hf.jit.call_plan import Plan, gather_order
from aitune_hf.jit.comparison import compare_loosely, compare_outputs
from aitune_hf.jit.guards import ModuleGuard
from aitune_hf.jit.recorder import bind_call

__all__ = ["FIRST_CALL", "Dispatcher", "InstalledEngine"]

Forward = Callable[..., Any]
RunEager = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
#: Plans kept per module; a value that changes at every call must not grow memory.
MAX_PLANS = 1024
FIRST_CALL = "first call of a loaded engine, checked against eager"
_WEIGHTS = "weights no longer fit the engine"
_GRADIENTS = "gradients are wanted"
_is_grad_enabled = torch.is_grad_enabled


@dataclass(eq=False)
class InstalledEngine:
    """An engine at work for one graph.

    Attributes:
        trusted: its outputs were checked against eager in this process; otherwise its first call is checked.
        failed: why it must not be used any more.
        load_s: seconds it took to load.
        on_wrong: told when its first call is not eager's answer; takes it out of the cache.
        on_right: told when it is.
        weights: how the engine gets its weights; one that holds a copy is told of in-place edits too.
        lossy: its outputs differ from eager's by design.
        eager_at: sizes at which eager is faster: input, axis → sizes.
    """

    graph: GraphSpec
    envelope: ShapeEnvelope
    engine: Engine
    backend: str
    tolerance: Tolerance | None = None
    trusted: bool = False
    failed: str | None = None
    load_s: float = 0.0
    on_wrong: Callable[[str], object] = field(default=lambda reason: None, repr=False)
    on_right: Callable[[], object] = field(default=lambda: None, repr=False)
    weights: WeightsPolicy = "bound"
    lossy: bool = False
    eager_at: Mapping[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    rebuild: Callable[[Sequence[Any]], Any] = field(init=False, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.rebuild = unflattener(self.graph.output_spec.node)

    def problem_with(self, ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> str | None:
        """What is wrong with its outputs, or None."""
        if self.lossy:
            return compare_loosely(ours, eager)[2]
        return compare_outputs(ours, eager, self.tolerance)[1]

    def reason_for_eager(self, shapes: Sequence[Sequence[int]]) -> str | None:
        """Why eager answers at these shapes, although the engine takes them; None if it does not."""
        for (index, axis), sizes in self.eager_at.items():
            if shapes[index][axis] in sizes:
                return f"eager was faster at size {shapes[index][axis]} of axis {axis}"
        return None


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
        run_eager: RunEager | None = None,
    ) -> None:
        """Make one.

        Args:
            signature: of the module's forward.
            untuned: graph identity → why that graph has no engine.
            run_eager: runs the forward for a call that no engine answers.
        """
        self._signature = signature
        self.engines = list(engines)
        self.on_engine = on_engine
        self.on_eager = on_eager
        self._run_eager = run_eager or _run
        self._untuned = dict(untuned)
        self._by_graph: dict[str, list[InstalledEngine]] = {}
        for installed in self.engines:
            self._by_graph.setdefault(installed.graph.key, []).append(installed)
        copies = any(installed.weights != "bound" for installed in self.engines)
        self._guard = ModuleGuard(module, watch_versions=copies)
        self._unwatchable = copies and self._guard.unwatchable()
        self._plans: dict[Hashable, Plan] = {}
        self._rebinding = threading.Lock()
        self._checked_scope: object = None
        self._scope_change: str | None = None
        self._running: list[None] = []  # One entry per call under way; appending and popping are atomic.
        self._closing = False

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
        self._running.append(None)
        try:
            if self._closing:
                return self._eager("it was untuned", forward, args, kwargs)
            return self._answer(forward, module, args, kwargs, scope)
        finally:
            self._running.pop()
            if self._closing and not self._running:
                self._close_engines()

    def _answer(
        self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], scope: object
    ) -> Any:
        if interceptor_active():
            return self._eager("a torch mode, transform or trace is active", forward, args, kwargs)
        tensors: list[torch.Tensor] = []
        key = call_key(args, kwargs, module.training, tensors)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, module, args, kwargs, tensors)
        installed = plan.engine
        if installed is None:
            if self._guard.weights_left():
                self._rebind()  # A module on another device gets no call for its engines, which must let go of its weights.
            return self._eager(plan.reason, forward, args, kwargs)
        reason = self._reason_for_eager(scope) or installed.failed
        if reason is not None:
            return self._eager(reason, forward, args, kwargs)
        if not installed.trusted:
            return self._first_call(installed, plan, tensors, forward, args, kwargs)
        try:
            outputs = installed.engine(plan.inputs(tensors))
        except UnfitInputError as error:
            return self._eager(f"the {installed.backend} engine does not take it: {error}", forward, args, kwargs)
        except EngineLoadError as error:  # It has looked at its weights; once they have moved again, it is asked again.
            installed.failed = f"{_WEIGHTS}: {error}"
            return self._eager(installed.failed, forward, args, kwargs)
        except Exception as error:  # noqa: BLE001 - native code may raise anything; eager is always right.
            installed.failed = f"the {installed.backend} engine raised {type(error).__name__}: {error}"
            return self._eager(installed.failed, forward, args, kwargs)
        self.on_engine()
        return installed.rebuild(outputs)

    def _eager(self, reason: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.on_eager(reason)
        return self._run_eager(forward, args, kwargs)

    def _reason_for_eager(self, scope: object) -> str | None:
        if _is_grad_enabled() and self._guard.needs_grad():
            return _GRADIENTS
        if self._guard.collecting():
            return "the outputs of inner modules are being collected"
        values = self._guard.values()
        if scope is None:
            change = self._guard.structure_change(values)
        else:
            if scope is not self._checked_scope:
                self._scope_change = self._guard.structure_change(values)
                self._checked_scope = scope
            change = self._scope_change
        if change is not None:
            return change
        if self._unwatchable:
            return "its weights were made in inference mode, where edits leave no trace, and the engine holds a copy"
        if self._guard.weights_moved(values):
            self._rebind()
        return None

    def _rebind(self) -> None:
        """Weights lie elsewhere now. An engine that cannot follow is out until they fit again."""
        with self._rebinding:
            if not self._guard.weights_moved():
                return  # Another thread has done it.
            # Looked at before they are read, so that what moves meanwhile is seen at the next call; and accepted after
            # all engines have followed: until then calls in other threads wait here, and an interrupt leaves it undone.
            places = self._guard.weights_now()
            for installed in self.engines:
                try:
                    installed.engine.rebind()
                except Exception as error:  # noqa: BLE001 - see call().
                    installed.failed = f"{_WEIGHTS}: {error}"
                else:
                    if (installed.failed or "").startswith(_WEIGHTS):
                        installed.failed = None
            self._guard.accept_weights(places)

    def _first_call(
        self,
        installed: InstalledEngine,
        plan: Plan,
        tensors: list[torch.Tensor],
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Check an engine that came from a cache against eager before it is believed. Returns eager's answer."""
        inputs = [leaf.detach().clone() for leaf in plan.inputs(tensors)]
        output = self._eager(FIRST_CALL, forward, args, kwargs)
        with installed.lock:
            if installed.trusted or installed.failed:
                return output
            node, expected = flatten(output)
            try:
                with torch.no_grad():
                    ours = list(installed.engine(inputs))
                problem = installed.problem_with(ours, expected)
                if problem is None and node != installed.graph.output_spec.node:
                    problem = "the structure of the output is not eager's"
            except UnfitInputError:
                return output  # The next call will show.
            except Exception as error:  # noqa: BLE001 - see call().
                problem = f"it raised {type(error).__name__}: {error}"
            if problem:
                installed.failed = f"the {installed.backend} engine from the cache is wrong: {problem}"
                installed.on_wrong(problem)
            else:
                installed.rebuild = unflattener(node)  # With eager's own classes.
                installed.trusted = True
                installed.on_right()
        return output

    def _plan(
        self,
        key: Hashable | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Plan:
        if key is None:
            return Plan(None, "an argument is of a kind that no engine takes")
        if _is_grad_enabled() and self._guard.needs_grad():
            return Plan(None, _GRADIENTS)  # Not for good: the key does not say what the parameters want.
        plan = self._make_plan(module, args, kwargs, tensors)
        if len(self._plans) >= MAX_PLANS:
            self._plans = {}
        self._plans[key] = plan
        return plan

    def _make_plan(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Plan:
        if any(leaf.is_neg() or leaf.is_conj() or leaf.layout != torch.strided for leaf in tensors):
            return Plan(None, "an argument is a lazy or sparse tensor")
        try:
            call = bind_call(module, self._signature, args, kwargs)
        except TypeError:
            return Plan(None, "the call does not fit the signature")
        if call.context.needs_grad:
            return Plan(None, _GRADIENTS)
        candidates = self._by_graph.get(call.identity)
        if not candidates:
            reason = self._untuned.get(call.identity, "a form of call that was not seen in tuning")
            return Plan(None, reason)
        places = list(call.inputs.tensors)
        shapes = [tuple(leaf.shape) for leaf in call.leaves]
        mismatch = ""
        for installed in candidates:
            mismatch = installed.envelope.mismatch(shapes, [str(place) for place in places]) or ""
            if not mismatch:
                slower = installed.reason_for_eager(shapes)
                if slower:
                    return Plan(None, slower)
                gather = gather_order(self._signature, args, kwargs, places)
                return _plan_for(installed, call.leaves, gather, len(tensors))
        return Plan(None, f"outside the verified shapes: {mismatch}")

    def close(self) -> None:
        """Let go of all engines, as soon as no call is under way in another thread."""
        self._closing = True
        if not self._running:
            self._close_engines()

    def _close_engines(self) -> None:
        for installed in self.engines:
            installed.engine.close()
        self.engines.clear()
        self._by_graph.clear()
        self._plans.clear()


def _plan_for(
    installed: InstalledEngine, leaves: list[torch.Tensor], gather: tuple[int, ...] | None, count: int
) -> Plan:
    if gather is None:
        return Plan(None, "a default argument is a tensor")
    copies = tuple(index for index, leaf in enumerate(leaves) if not leaf.is_contiguous())
    return Plan(installed, gather=None if gather == tuple(range(count)) else gather, copies=copies)


def _run(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)
