"""One module under observation: its state, its place in the call hierarchy, and how its calls are routed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aitune_hf.errors import UntunableError
from aitune_hf.jit import hierarchy, module_report, module_tuning
from aitune_hf.jit.device import patch_device_attribute, unpatch_device_attribute
from aitune_hf.jit.dispatcher import FIRST_CALL, Dispatcher, InstalledEngine
from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.forward_seat import ForwardSeat
from aitune_hf.jit.hierarchy import PRINT_HIERARCHY_HEADER, PRINT_HIERARCHY_NO_MODULES_HEADER, _emoji_state
from aitune_hf.jit.module_state import ModuleState
from aitune_hf.jit.module_tuning import build_strategy as _build_strategy
from aitune_hf.jit.observed_module import ObservedModule, _to_hist
from aitune_hf.jit.patch_policy import is_skipped
from aitune_hf.jit.pristine import install_proxy, lift_proxy, pristine
from aitune_hf.jit.session import GraphTuner, TuningSession, current_scope, current_session

if TYPE_CHECKING:
    pass

__all__ = ["PRINT_HIERARCHY_HEADER", "PRINT_HIERARCHY_NO_MODULES_HEADER", "PatchedModule"]
#: Kept under these names in this module too, beside :class:`PatchedModule`.
_COMPANIONS = (_build_strategy, _emoji_state, _to_hist)

logger = logging.getLogger("aitune_hf")
Forward = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class PatchedModule(ObservedModule):
    """Intercepts the forward of one module to record it, tune it, and answer for it with engines.

    The module itself is not wrapped: only the callable in its forward seat is replaced, so references to the module,
    its hooks and its attributes stay what they were. The module owns this object, never the other way round.
    """

    def __init__(self, module: nn.Module, session: TuningSession | None = None, path: str = "") -> None:
        original = ForwardSeat.find(module).read()
        if isinstance(original, ForwardProxy):
            raise ValueError(f"this {type(module).__name__} is patched already; see aitune_hf.jit.Patcher.patch")
        super().__init__(module, session or current_session(), path, on_end=_abandoner(self))
        self._dispatcher: Dispatcher | None = None
        self._forward_routing: Callable[..., Any] = self._forward_init
        self._original_forward = ForwardProxy(self, module, original)
        self._id, self._place = self.session.register(self)
        self._proxy_forward()

    @property
    def engines(self) -> Sequence[InstalledEngine]:
        """The engines at work."""
        return tuple(self._dispatcher.engines) if self._dispatcher else ()

    @property
    def _current_forward_hooks(self) -> Any:
        return self.module._forward_hooks

    @property
    def _current_forward_pre_hooks(self) -> Any:
        return self.module._forward_pre_hooks

    # -- routing -------------------------------------------------------------------------------------------------------

    def _forward_router(self, wrapped: Forward, instance: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Send a call to the handler of the present state. The proxy that calls it never changes."""
        return self._forward_routing(wrapped, instance, args, kwargs)

    def _run_on_stack(self, wrapped: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run the forward as the caller of whatever is below; also when it raises."""
        stack = self.session.stack
        stack.append(self)
        try:
            return wrapped(*args, **kwargs)
        finally:
            stack.pop()

    def _forward_init(self, wrapped: Forward, instance: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """First call: find the place in the hierarchy, then record, or restore engines from the cache."""
        if not self.session.stack and hierarchy.runs_inside_unseen(instance, self.session):
            return wrapped(*args, **kwargs)  # Its place shows at the next call.
        with self.session.lock:
            first = self.state is ModuleState.INIT
            if first:
                self._enter_hierarchy()
        if first and self.state is ModuleState.RECORDING:
            self._tune_on_init()
        return self._forward_routing(wrapped, instance, args, kwargs)

    def _enter_hierarchy(self) -> None:
        stack = self.session.stack
        caller = stack[-1] if stack else None
        if caller is None:
            self._level = 0
            self.session.add_head(self)
        else:
            self._parent = weakref.ref(caller)
            self._level = caller.level + 1
            caller._children.append(self)
        self._fq_name = self._get_fully_qualified_name()
        if self._should_be_skipped():
            self._skip()
            return
        try:
            # Tensors are kept at the top only; what is below sees them again by replay, if it comes to that.
            self.recorder.keep_samples = caller is None or caller.state is ModuleState.EAGER
        except UntunableError as error:
            self.keep_eager(module_report.first_line(error))
        else:
            self._update_state(ModuleState.RECORDING)

    def _forward_recording(self, wrapped: Forward, instance: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run eagerly and learn; tune afterwards if it is time."""
        stack = self.session.stack
        stack.append(self)
        try:
            output = self.recorder.run(wrapped, instance, args, kwargs)
        finally:
            stack.pop()
        self.try_tune()
        return output

    def _forward_eager(self, wrapped: Forward, instance: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run eagerly, as the caller of whatever is below."""
        self.stats.eager_call(self._extra_state_info or "not tuned")
        return self._run_on_stack(wrapped, args, kwargs)

    def _forward_tuned(self, wrapped: Forward, instance: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Let an engine answer, or eager where no engine may."""
        dispatcher = self._dispatcher
        if dispatcher is None:  # Untuned by another thread in this moment.
            return wrapped(*args, **kwargs)
        return dispatcher.call(wrapped, instance, args, kwargs, current_scope())

    def _count_eager(self, reason: str) -> None:
        if self.stats.eager_call(reason) and reason != FIRST_CALL:
            logger.warning("%s runs eager: %s. (Said once; stats() counts such calls.)", self.label, reason)

    def _update_state(self, state: ModuleState) -> None:
        """Change state and, with it, the handler of calls."""
        self.state = state
        handlers: dict[ModuleState, Callable[..., Any]] = {
            ModuleState.INIT: self._forward_init,
            ModuleState.RECORDING: self._forward_recording,
            ModuleState.TUNED: self._forward_tuned,
            ModuleState.EAGER: self._forward_eager,
        }
        # SKIPPED and DETACHED modules give their forward back; a reference to the proxy still runs the original.
        self._forward_routing = handlers.get(state, _run_original)
        if state in handlers:
            self._proxy_forward()
        else:
            self._restore_original_forward()
        self._to_history(f"state {state.value}")

    def _proxy_forward(self) -> None:
        """Put the proxy into the module's forward seat, unless it is there.

        A forward that somebody put there meanwhile stays: it may well wrap the proxy.
        """
        module = self.module
        if ForwardSeat.find(module).read() == self._original_forward.__wrapped__:
            install_proxy(module, self._original_forward)

    def _restore_original_forward(self) -> None:
        """Give the forward seat back."""
        module = self._module()
        if module is not None:
            lift_proxy(module, self._original_forward)

    # -- hierarchy -----------------------------------------------------------------------------------------------------

    def _should_be_skipped(self) -> bool:
        return is_skipped(type(self.module), self.session.config)

    def _skip(self) -> None:
        self._extra_state_info = "skipped on request"
        self._detach_below()
        self._update_state(ModuleState.SKIPPED)

    def _detach_below(self) -> None:
        """Lift what is below. A shared module whose engines answer for another caller keeps them."""
        for below in self._below():
            if below.state is not ModuleState.TUNED:
                below._update_state(ModuleState.DETACHED)
                if below._recorder is not None:
                    below._recorder.clear_samples()

    def _unpatch(self) -> None:
        """Leave the module as it was before it was patched, and forget it."""
        self._update_state(ModuleState.DETACHED)
        module = self._module()
        if module is not None:
            unpatch_device_attribute(module)
        self._let_go()

    def _let_go(self) -> None:
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.close()
        if self._recorder is not None:
            self._recorder.clear_samples()
        self.session.most_calls = max(self.session.most_calls, self._call_count)
        self.session.forget(self)

    def _unpatch_hierarchy(self, include_self: bool = False) -> None:
        """Unpatch every patched module below, and itself on request."""
        for patched in self._below():
            patched._unpatch()
        if include_self:
            self._unpatch()

    def _set_original_forward_for_hierarchy(self) -> AbstractContextManager[None]:
        """Context manager: the module tree without any proxy, never-called descendants included."""
        return pristine(self.module)

    def _patch_device_attribute(self, device: torch.device) -> None:
        """Make ``device`` of the module and its callers answer ``device``, on these instances only."""
        patched: PatchedModule | None = self
        while patched is not None:
            patch_device_attribute(patched.module, device)
            patched = patched.parent

    # -- tuning --------------------------------------------------------------------------------------------------------

    def _should_be_tuned(self) -> bool:
        return module_tuning.is_ready(self)

    def _should_be_tuned_deferred(self) -> bool:
        return self.session.deferred_tuning_enabled

    def _should_be_tuned_eager(self) -> bool:
        return module_tuning.is_ready_eager(self)

    def _should_report_inspection(self) -> bool:
        return self.session.config.mode == "inspect" or self.session.config.dry_run

    def try_tune(self) -> None:
        """Tune now if the conditions of the session's mode are met and no other thread is tuning."""
        if self._should_be_tuned() and self.session.tuning.acquire(blocking=False):
            try:
                if self._should_be_tuned():
                    self.tune()
            finally:
                self.session.tuning.release()

    def _tune_on_init(self) -> None:
        """At its first call, a module at the top takes what the cache has for its structure."""
        session, config = self.session, self.session.config
        wanted = self._level == 0 and not session.replaying and config.mode != "inspect" and not config.dry_run
        if wanted and session.tuning.acquire(blocking=False):
            try:
                self.restore()
            finally:
                session.tuning.release()

    def restore(self) -> bool:
        """Take over engines that the cache has for this structure; see :func:`.module_tuning.restore`."""
        return module_tuning.restore(self)

    def tune(self) -> None:
        """Tune in blocking mode: its own graphs first; if it cannot be captured, its children.

        Never raises for a module that cannot be tuned: it stays eager, with its reason in ``reasons`` and the error
        log. Interrupts pass through, with the module eager and usable.
        """
        module_tuning.tune(self)

    def _tune(self, tuner: GraphTuner) -> tuple[list[InstalledEngine], dict[str, str]]:
        return module_tuning.run_tuner(self, tuner)

    def _simulate_dry_run(self) -> tuple[list[InstalledEngine], dict[str, str]]:
        return module_tuning.simulate_dry_run(self)

    def _throw_if_has_graph_break(self, tuner: GraphTuner) -> None:
        module_tuning.look_for_graph_breaks(self, tuner)

    def _install(self, engines: list[InstalledEngine], reasons: dict[str, str]) -> None:
        """Go over to the engines; what is below is not patched any more."""
        self.reasons.update(reasons)
        if not engines:
            reason = next(iter(reasons.values()), "no graph")
            for child in self.children:
                if child.state is ModuleState.RECORDING:
                    child.keep_eager(f"its caller stays eager: {reason}")
            self._extra_state_info = reason
            self._update_state(ModuleState.EAGER)
            return
        self._detach_below()
        self._dispatcher = Dispatcher(
            self.module,
            self.signature,
            engines,
            reasons,
            self.stats.engine_call,
            self._count_eager,
            self._run_on_stack,
        )
        self._extra_state_info = ", ".join(sorted({engine.backend for engine in engines}))
        self._update_state(ModuleState.TUNED)

    def keep_eager(self, reason: str) -> None:
        """Leave the module eager, for a reason that is not a failure."""
        self._extra_state_info = self.reasons["module"] = reason
        self._update_state(ModuleState.EAGER)
        if self._recorder is not None:
            self._recorder.clear_samples()

    def _hook_keys(self) -> tuple[set[Any], set[Any]]:
        return set(self._current_forward_pre_hooks), set(self._current_forward_hooks)

    def _handle_backend_added_hooks(self, before: tuple[set[Any], set[Any]]) -> None:
        """Hooks that a backend has added run before those of the application."""
        for hooks, known in zip((self._current_forward_pre_hooks, self._current_forward_hooks), before, strict=True):
            for key in reversed([key for key in hooks if key not in known]):
                hooks.move_to_end(key, last=False)

    @staticmethod
    def reset() -> None:
        """Unpatch every module of the current session and forget all it knew."""
        session = current_session()
        for patched in session.modules:
            patched._unpatch()
        session.reset()


def _run_original(wrapped: Forward, instance: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    return wrapped(*args, **kwargs)


def _abandoner(patched: PatchedModule) -> Callable[[object], None]:
    """Lets go of engines and samples at the moment the module dies, without waiting for a collection of cycles."""
    itself = weakref.ref(patched)

    def abandon(_: object) -> None:
        patched = itself()
        if patched is not None:
            patched._let_go()
            patched.state = ModuleState.DETACHED
            # Whatever points at itself through the object: nobody can call the proxy any more.
            patched._forward_routing = _run_original
            del patched._original_forward._patched

    return abandon
