"""One module under observation: its state, its place in the call hierarchy, and how its calls are routed."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from aitune_hf.cache.layout import default_cache_dir
from aitune_hf.errors import AITuneError, UntunableError
from aitune_hf.graph.dynamic_shapes import DynamicShapes
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.hierarchy_hash import hierarchy_hash
from aitune_hf.jit import hierarchy
from aitune_hf.jit.device import patch_device_attribute, unpatch_device_attribute
from aitune_hf.jit.dispatcher import FIRST_CALL, Dispatcher, InstalledEngine
from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.forward_seat import ForwardSeat, foreign_forward
from aitune_hf.jit.guards import inner_hook
from aitune_hf.jit.inspection import ModuleInspectionReport
from aitune_hf.jit.module_state import ModuleState
from aitune_hf.jit.patch_policy import is_skipped
from aitune_hf.jit.preserved import preserved
from aitune_hf.jit.pristine import install_proxy, lift_proxy, pristine
from aitune_hf.jit.recorder import GraphRecorder
from aitune_hf.jit.session import GraphTuner, TuningSession, current_scope, current_session
from aitune_hf.jit.statistics import ModuleStats

__all__ = ["PatchedModule"]

logger = logging.getLogger("aitune_hf")
Forward = Callable[..., Any]
T = TypeVar("T")


class _SessionView(Generic[T]):
    """A class attribute that reads the current session."""

    def __init__(self, read: Callable[[TuningSession], T]) -> None:
        self._read = read

    def __get__(self, instance: PatchedModule | None, owner: type) -> T:
        return self._read(instance.session if instance is not None else current_session())


class PatchedModule:
    """Intercepts the forward of one module to record it, tune it, and answer for it with engines.

    The module itself is not wrapped: only the callable in its forward seat is replaced, so references to the module,
    its hooks and its attributes stay what they were. The module owns this object, never the other way round.

    Class attributes that name sets of modules or counters are views of the current :class:`TuningSession`.
    """

    heads = _SessionView(lambda session: session.heads)
    history = _SessionView(lambda session: session.history)
    stack = _SessionView(lambda session: session.stack)
    fq_name_counter = _SessionView(lambda session: session.fq_name_counter)
    patched_classes = _SessionView(lambda session: session.patched_classes)
    module_counter = _SessionView(lambda session: session.module_counter)
    attempted_tuning = _SessionView(lambda session: session.attempted_tuning)
    deferred_tuning_enabled = _SessionView(lambda session: session.deferred_tuning_enabled)

    def __init__(self, module: nn.Module, session: TuningSession | None = None, path: str = "") -> None:
        self.session = session or current_session()
        self.path = path
        self.state = ModuleState.INIT
        self.stats = ModuleStats()
        self.reasons: dict[str, str] = {}
        self.results: list[Any] = []
        self._module = weakref.ref(module)
        self._name = type(module).__name__
        self._call_count = 0
        self._children: list[PatchedModule] = []
        self._parent: weakref.ref[PatchedModule] | None = None
        self._level = -1
        self._fq_name: str | None = None
        self._extra_state_info = ""
        self._dispatcher: Dispatcher | None = None
        self._signature: ForwardSignature | None = None
        self._recorder: GraphRecorder | None = None
        self._forward_routing: Callable[..., Any] = self._forward_init
        self._id = self.session.register(self)
        self._original_forward = ForwardProxy(self, module, ForwardSeat.find(module).read())
        self._proxy_forward()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module; it is alive for as long as this object is in use."""
        module = self._module()
        if module is None:
            raise ReferenceError(f"the module {self.fq_name} no longer exists")
        return module

    @property
    def name(self) -> str:
        """Class name of the module."""
        return self._name

    @property
    def level(self) -> int:
        """Depth in the call hierarchy; 0 is the top, -1 is never called."""
        return self._level

    @property
    def parent(self) -> PatchedModule | None:
        """The module that called it first, or None at the top."""
        return self._parent() if self._parent is not None else None

    @property
    def children(self) -> list[PatchedModule]:
        """Modules that it called, in the order of their first call."""
        return list(self._children)

    @property
    def call_count(self) -> int:
        """Calls so far."""
        return self._call_count

    @property
    def fq_name(self) -> str:
        """Name that is unique in the session from the first call on."""
        if self._fq_name is None:
            return f"{self._name}(not called)"
        return self._fq_name

    @property
    def label(self) -> str:
        """What messages and reports call it: its path where it has one, else its name in the hierarchy."""
        return self.path or self.fq_name

    @property
    def recorder(self) -> GraphRecorder:
        """What was learned of the module's calls."""
        if self._recorder is None:
            config = self.session.config
            declared = config.dynamic_shapes
            self._recorder = GraphRecorder(
                self.signature,
                dynamic_shapes=declared.get(self.path) or declared.get(self._name) or DynamicShapes(),
                max_sample_bytes=config.max_sample_bytes,
            )
        return self._recorder

    @property
    def signature(self) -> ForwardSignature:
        """The signature of the module's own forward."""
        if self._signature is None:
            self._signature = ForwardSignature.from_callable(self._original_forward.__wrapped__)
        return self._signature

    @property
    def engines(self) -> Sequence[InstalledEngine]:
        """The engines at work."""
        return tuple(self._dispatcher.engines) if self._dispatcher else ()

    @property
    def cache_dir(self) -> Path:
        """The module's folder for logs, within the cache."""
        return self._module_cache_dir()

    @property
    def _current_forward_hooks(self) -> Any:
        return self.module._forward_hooks

    @property
    def _current_forward_pre_hooks(self) -> Any:
        return self.module._forward_pre_hooks

    def __repr__(self) -> str:
        return f"PatchedModule({self.fq_name}, state={self.state.value}, level={self._level}, calls={self._call_count})"

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        extra = f" ({self._extra_state_info})" if self._extra_state_info else ""
        return (
            f"{self.fq_name} [{self._name}, {count:,} parameters, {self._call_count} calls] {self.state.value}{extra}"
        )

    # -- routing -------------------------------------------------------------------------------------------------------

    def _forward_router(
        self, wrapped: Forward, instance: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Send a call to the handler of the present state. The proxy that calls it never changes."""
        return self._forward_routing(wrapped, instance, args, kwargs)

    @contextmanager
    def _on_stack(self) -> Iterator[None]:
        """Be the caller of whatever is called within; also when it raises."""
        stack = self.session.stack
        stack.append(self)
        try:
            yield
        finally:
            stack.pop()

    def _forward_init(
        self, wrapped: Forward, instance: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """First call: find the place in the hierarchy, then record, or restore engines from the cache."""
        with self.session.lock:
            if self.state is ModuleState.INIT:
                self._enter_hierarchy()
                if self._should_be_skipped():
                    self._skip()
                else:
                    self._update_state(ModuleState.RECORDING)
                    self._tune_on_init()
        return self._forward_routing(wrapped, instance, args, kwargs)

    def _enter_hierarchy(self) -> None:
        stack = self.session.stack
        caller = stack[-1] if stack else None
        if caller is None or caller is self:
            self._level = 0
            self.session.add_head(self)
        else:
            self._parent = weakref.ref(caller)
            self._level = caller.level + 1
            caller._children.append(self)
            # Tensors are kept at the top only; what is below sees them again by replay, if it comes to that.
            self.recorder.keep_samples = caller.state is ModuleState.EAGER
        self._fq_name = self._get_fully_qualified_name()

    def _forward_recording(
        self, wrapped: Forward, instance: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run eagerly and learn; tune afterwards if it is time."""
        self._call_count += 1
        with self._on_stack():
            output = self.recorder.run(wrapped, instance, args, kwargs)
        self.try_tune()
        return output

    def _forward_eager(
        self, wrapped: Forward, instance: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run eagerly, as the caller of whatever is below."""
        self._call_count += 1
        self.stats.eager_call(self._extra_state_info or "not tuned")
        with self._on_stack():
            return wrapped(*args, **kwargs)

    def _forward_tuned(
        self, wrapped: Forward, instance: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Let an engine answer, or eager where no engine may."""
        self._call_count += 1
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
        handlers = {
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
        """Put the proxy into the module's forward seat, unless it is there."""
        if ForwardSeat.holding(self.module, self._original_forward) is None:
            install_proxy(self.module, self._original_forward)

    def _restore_original_forward(self) -> None:
        """Give the forward seat back."""
        lift_proxy(self.module, self._original_forward)

    # -- hierarchy -----------------------------------------------------------------------------------------------------

    def _get_fully_qualified_name(self) -> str:
        parent = self.parent
        return hierarchy.unique_name(self._name, parent.fq_name if parent else None, self.session.fq_name_counter)

    def _get_hierarchy_hash(self) -> str:
        """Structural hash of the module as it is without any of our patches."""
        with pristine(self.module):
            return hierarchy_hash(self.module)

    def _should_be_skipped(self) -> bool:
        return is_skipped(type(self.module), self.session.config)

    def _skip(self) -> None:
        self._extra_state_info = "skipped on request"
        for below in self._below():
            below._update_state(ModuleState.DETACHED)
        self._update_state(ModuleState.SKIPPED)

    def _below(self) -> list[PatchedModule]:
        """Patched modules of the session within this module's tree, without itself."""
        tree = {id(module) for module in self.module.modules()} - {id(self.module)}
        return [patched for patched in self.session.modules if id(patched._module()) in tree]

    def _unpatch(self) -> None:
        """Leave the module as it was before it was patched, and forget it."""
        self._update_state(ModuleState.DETACHED)
        unpatch_device_attribute(self.module)
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None
        if self._recorder is not None:
            self._recorder.clear_samples()
        self.session.forget(self)

    def _unpatch_hierarchy(self, include_self: bool = False) -> None:
        """Unpatch every patched module below, and itself on request."""
        for patched in self._below():
            patched._unpatch()
        if include_self:
            self._unpatch()

    def _set_original_forward_for_hierarchy(self) -> Any:
        """Context manager: the module tree without any proxy, never-called descendants included."""
        return pristine(self.module)

    def _patch_device_attribute(self, device: torch.device) -> None:
        """Make ``device`` of the module and its callers answer ``device``, on these instances only."""
        patched: PatchedModule | None = self
        while patched is not None:
            patch_device_attribute(patched.module, device)
            patched = patched.parent

    # -- when to tune --------------------------------------------------------------------------------------------------

    def _should_be_tuned(self) -> bool:
        session = self.session
        parent = self.parent
        waits_for_parent = parent is not None and parent.state is not ModuleState.EAGER
        if self.state is not ModuleState.RECORDING or session.replaying or self in session.stack or waits_for_parent:
            return False
        if session.tuner is None or session.config.mode == "inspect":
            return False
        deferred = session.config.mode == "deferred"
        return self._should_be_tuned_deferred() if deferred else self._should_be_tuned_eager()

    def _should_be_tuned_deferred(self) -> bool:
        return self.session.deferred_tuning_enabled

    def _should_be_tuned_eager(self) -> bool:
        config = self.session.config
        if self.recorder.calls < config.min_samples:
            return False
        dynamic = any(graph.spec.input_spec.has_dynamic_axis for graph in self.recorder.graphs.values())
        return dynamic or not config.batch_axis_required

    def _should_report_inspection(self) -> bool:
        return self.session.config.mode == "inspect" or self.session.config.dry_run

    def try_tune(self) -> None:
        """Tune now if the conditions of the session's mode are met."""
        if self._should_be_tuned():
            with self.session.lock:
                if self._should_be_tuned():
                    self.tune()

    def _tune_on_init(self) -> None:
        """At its first call, a module at the top takes what the cache has for its structure."""
        config = self.session.config
        if self._level == 0 and not self.session.replaying and config.mode != "inspect" and not config.dry_run:
            self.restore()

    def restore(self) -> bool:
        """Take over engines that the cache has for this structure, without recording anything.

        Returns:
            Whether there were any. Each is checked against eager at its first call.
        """
        session = self.session
        if session.tuner is None or inner_hook(self.module) or foreign_forward(self.module, ForwardProxy):
            return False
        with pristine(self.module):
            restored = session.tuner.restore(self)
        if restored is None or not restored[0]:
            return False
        self._install(*restored)
        self._to_history(f"restored {len(restored[0])} engines from the cache")
        return True

    # -- tuning --------------------------------------------------------------------------------------------------------

    def tune(self) -> None:
        """Tune in blocking mode: its own graphs first; if it cannot be captured, its children.

        Never raises for a module that cannot be tuned: it stays eager, with its reason in ``reasons`` and the error
        log. Interrupts pass through, with the module eager and usable.
        """
        session = self.session
        session.attempted_tuning = True
        hooks = self._hook_keys()
        try:
            problem = self._untunable()
            if problem is not None:
                raise UntunableError(problem)
            with pristine(self.module), preserved(self.module):
                engines, reasons = self._tune(_build_strategy(session))
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises, the module stays eager.
            self._log_tuning_exception(error)
            self._extra_state_info = self.reasons["module"] = _first_line(error)
            self._update_state(ModuleState.EAGER)
            self._descend()
        except BaseException:
            self._extra_state_info = "tuning was interrupted"
            self._update_state(ModuleState.EAGER)
            raise
        else:
            self._handle_backend_added_hooks(hooks)
            self._install(engines, reasons)
        finally:
            self.recorder.clear_samples()

    def _tune(self, tuner: GraphTuner) -> tuple[list[InstalledEngine], dict[str, str]]:
        """Check for graph breaks if asked to, then find engines; the time goes to the history."""
        config = self.session.config
        if config.detect_graph_breaks:
            self._throw_if_has_graph_break(tuner)
        start = time.perf_counter()
        try:
            if config.dry_run:
                return self._simulate_dry_run()
            return tuner.tune(self)
        finally:
            self._to_history(f"tuning took {time.perf_counter() - start:.2f} s")

    def _simulate_dry_run(self) -> tuple[list[InstalledEngine], dict[str, str]]:
        """Pretend: no engine is built, every graph keeps eager, and modules fail as often as configured."""
        probability = self.session.config.dry_run_failure_probability
        if random.random() < probability:
            raise UntunableError("the dry run pretends that it fails")
        return [], dict.fromkeys(self.recorder.graphs, "dry run")

    def _throw_if_has_graph_break(self, tuner: GraphTuner) -> None:
        start = time.perf_counter()
        try:
            tuner.can_capture(self)
        finally:
            self._to_history(f"looking for graph breaks took {time.perf_counter() - start:.2f} s")

    def _untunable(self) -> str | None:
        """Why the module as a whole must not become an engine, or None."""
        config = self.session.config
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        if parameters < config.min_parameters:
            return f"{parameters} parameters, fewer than min_parameters={config.min_parameters}"
        replaced = foreign_forward(self.module, ForwardProxy)
        if replaced:
            return f"its forward was replaced by {replaced}"
        hook = inner_hook(self.module)
        if hook:
            return f"{hook}, which would not fire inside an engine"
        graphs = list(self.recorder.graphs.values())
        if graphs and all(graph.untunable for graph in graphs):
            return graphs[0].untunable
        return None if graphs else "it was never called"

    def _install(self, engines: list[InstalledEngine], reasons: dict[str, str]) -> None:
        """Go over to the engines; what is below is not patched any more."""
        self.reasons.update(reasons)
        if not engines:
            self._extra_state_info = next(iter(reasons.values()), "no graph")
            self._update_state(ModuleState.EAGER)
            return
        for below in self._below():
            below._update_state(ModuleState.DETACHED)
        self._dispatcher = Dispatcher(
            self.module, self.signature, engines, reasons, self.stats.engine_call, self._count_eager
        )
        self._extra_state_info = ", ".join(sorted({engine.backend for engine in engines}))
        self._update_state(ModuleState.TUNED)

    def _descend(self) -> None:
        """Record the children by replaying the own samples, then tune them."""
        config = self.session.config
        if config.max_depth_level is not None and self._level >= config.max_depth_level:
            return
        children = [child for child in self._children if child.state is ModuleState.RECORDING]
        if not children or self.session.config.mode == "inspect":
            return
        for child in children:
            child.recorder.keep_samples = True
        self._replay()
        for child in children:
            share = child.recorder.seconds / self.recorder.seconds if self.recorder.seconds else 1.0
            if child.state is ModuleState.RECORDING and child.recorder.graphs:
                if share < config.min_share:
                    child.keep_eager(f"takes {share:.1%} of its parent's time")
                else:
                    child.tune()

    def keep_eager(self, reason: str) -> None:
        """Leave the module eager, for a reason that is not a failure."""
        self._extra_state_info = self.reasons["module"] = reason
        self._update_state(ModuleState.EAGER)
        self.recorder.clear_samples()

    def _replay(self) -> None:
        """Run the recorded samples through the eager forward, so that the modules below see them again."""
        forward = self._original_forward.__wrapped__
        self.session.replaying = True
        try:
            with preserved(self.module), torch.no_grad():
                for graph in self.recorder.graphs.values():
                    for sample in graph.samples:
                        args, kwargs = self.signature.unbind(sample.bound())
                        with self._on_stack(), sample.context.enter(graph.spec.device_type):
                            forward(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - children that saw nothing stay eager.
            self._log_tuning_exception(error)
        finally:
            self.session.replaying = False

    def _hook_keys(self) -> tuple[set[Any], set[Any]]:
        return set(self._current_forward_pre_hooks), set(self._current_forward_hooks)

    def _handle_backend_added_hooks(self, before: tuple[set[Any], set[Any]]) -> None:
        """Hooks that a backend has added run before those of the application."""
        for hooks, known in zip((self._current_forward_pre_hooks, self._current_forward_hooks), before, strict=True):
            for key in reversed([key for key in hooks if key not in known]):
                hooks.move_to_end(key, last=False)

    # -- reports and logs ----------------------------------------------------------------------------------------------

    def _to_history(self, entry: str) -> None:
        _to_hist(f"{self.fq_name}: {entry}", self.session)

    def _module_cache_dir(self) -> Path:
        root = self.session.config.cache_dir or default_cache_dir(os.environ)
        safe = "".join(char if char.isalnum() or char in "._-" else "_" for char in self.fq_name)
        return Path(root) / "logs" / safe

    def _create_graph_cache_dir(self, graph_spec_name: str) -> Path:
        """A folder for what one graph leaves behind for people (never for engines: those go to the store)."""
        folder = self._module_cache_dir() / graph_spec_name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _log_tuning_exception(self, exception: Exception) -> None:
        """Say why the module is not tuned, in one line, and keep the traceback in a file."""
        log = None if isinstance(exception, UntunableError) else self._write_error_log(exception)
        where = f" Traceback: {log}" if log else ""
        expected = isinstance(exception, AITuneError)
        level = logging.INFO if expected else logging.WARNING
        logger.log(level, "%s stays eager: %s%s", self.label, _first_line(exception), where)
        self._to_history(f"stays eager: {_first_line(exception)}")

    def _write_error_log(self, exception: Exception) -> Path | None:
        try:
            folder = self._module_cache_dir()
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "error.log"
            path.write_text("".join(traceback.format_exception(exception)), encoding="utf-8")
        except OSError:
            return None  # A log that cannot be written is no reason to fail; the message was logged.
        return path

    def _module_dtypes(self) -> list[str]:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})

    def _inspection_graphs(self) -> list[dict[str, Any]]:
        return [graph.spec.to_dict() for graph in self.recorder.graphs.values()]

    def inspection_report(self) -> ModuleInspectionReport:
        """What was seen of this module so far."""
        module = self.module
        graphs = self.recorder.graphs
        by_name = {graphs[key].spec.name if key in graphs else key: why for key, why in self.reasons.items()}
        untunable = {graph.spec.name: graph.untunable for graph in graphs.values() if graph.untunable}
        return ModuleInspectionReport(
            fq_name=self.fq_name,
            path=self.path,
            class_name=f"{type(module).__module__}.{type(module).__qualname__}",
            level=self._level,
            state=self.state.value,
            call_count=self._call_count,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            dtypes=self._module_dtypes(),
            seconds=self.recorder.seconds,
            graphs=self._inspection_graphs(),
            reasons={**untunable, **by_name},
        )

    def inspection_subtree_reports(self) -> list[ModuleInspectionReport]:
        """Reports of this module and of all that it was seen to call."""
        return [patched.inspection_report() for patched in hierarchy.walk([self])]

    @staticmethod
    def print_hierarchy(sink: Callable[[str], object] = print) -> None:
        """Print the call hierarchy of the current session."""
        hierarchy.print_hierarchy(current_session().heads, sink)

    @staticmethod
    def print_history(sink: Callable[[str], object] = print) -> None:
        """Print what happened in the current session, line by line."""
        for entry in current_session().history:
            sink(entry)

    @staticmethod
    def reset() -> None:
        """Unpatch every module of the current session and forget all it knew."""
        session = current_session()
        for patched in session.modules:
            patched._unpatch()
        session.reset()

    @staticmethod
    def on_python_exit() -> None:
        """Say what to do when modules were patched but none was ever tuned."""
        session = current_session()
        if session.attempted_tuning or not session.patched_classes or session.config.mode == "inspect":
            return
        called = max((patched.call_count for patched in session.modules), default=0)
        mode = session.config.mode
        missing = "enable_tune_deferred() was never called" if mode == "deferred" else _too_few(session, called)
        sys.stderr.write(f"aitune_hf: nothing was tuned; {missing}.\n")


def _too_few(session: TuningSession, called: int) -> str:
    wanted = session.config.min_samples
    if called < wanted:
        return f"the most called module saw {called} of min_samples={wanted} calls; call it more often or lower it"
    return "no recorded call varied an axis; use other batch sizes or set batch_axis_required=False"


def _run_original(wrapped: Forward, instance: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _build_strategy(session: TuningSession) -> GraphTuner:
    """The tuner of the session.

    Raises:
        UntunableError: if the session only records.
    """
    if session.tuner is None:
        raise UntunableError("this session only records: it has no tuner")
    return session.tuner


def _to_hist(entry: str, session: TuningSession | None = None) -> None:
    """Add a line to the history."""
    (session or current_session()).to_history(entry)
