"""When a patched module is tuned, and what happens then: itself first, and where that cannot be, what is below it."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

from aitune_hf.errors import AITuneError, UntunableError
from aitune_hf.graph.torch_state import interceptor_active
from aitune_hf.jit.forward_proxy import ForwardProxy
from aitune_hf.jit.forward_seat import foreign_forward
from aitune_hf.jit.guards import inner_hook
from aitune_hf.jit.module_report import first_line, parameter_count
from aitune_hf.jit.module_state import ModuleState
from aitune_hf.jit.preserved import neutral, preserved
from aitune_hf.jit.pristine import pristine
from aitune_hf.jit.session import GraphTuner, TuningSession

if TYPE_CHECKING:
    from aitune_hf.jit.dispatcher import InstalledEngine
    from aitune_hf.jit.patched_module import PatchedModule

__all__ = [
    "build_strategy",
    "descend",
    "is_ready",
    "is_ready_eager",
    "look_for_graph_breaks",
    "replay",
    "restore",
    "run_tuner",
    "simulate_dry_run",
    "tune",
    "tune_blocks",
    "untunable_reason",
]

logger = logging.getLogger("aitune_hf")


def is_ready(patched: PatchedModule) -> bool:
    """True if the module is to be tuned now, by the rules of the session's mode."""
    session, config = patched.session, patched.session.config
    parent = patched.parent
    if patched.state is not ModuleState.RECORDING or session.tuner is None or config.mode == "inspect":
        return False
    if parent is not None and parent.state is not ModuleState.EAGER:
        return False  # Parents first.
    if config.max_depth_level is not None and patched.level > config.max_depth_level:
        return False
    if session.replaying or patched in session.stack or interceptor_active():
        return False
    return patched._should_be_tuned_deferred() if config.mode == "deferred" else patched._should_be_tuned_eager()


def is_ready_eager(patched: PatchedModule) -> bool:
    """The rule of eager mode: enough calls and, where an axis must vary, one that did."""
    config, recorder = patched.session.config, patched.recorder
    if recorder.calls < config.min_samples:
        return False
    dynamic = any(graph.spec.input_spec.has_dynamic_axis for graph in recorder.graphs.values())
    return dynamic or not config.batch_axis_required


def untunable_reason(patched: PatchedModule) -> str | None:
    """Why the module as a whole must not become an engine, or None."""
    config, module = patched.session.config, patched.module
    parameters = parameter_count(patched)
    if parameters < config.min_parameters:
        return f"{parameters} parameters, fewer than min_parameters={config.min_parameters}"
    replaced = foreign_forward(module, ForwardProxy)
    if replaced:
        return f"its forward was replaced by {replaced}"
    hook = inner_hook(module)
    if hook:
        return f"{hook}, which would not fire inside an engine"
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return "its weights are on the meta device (offloaded?)"
    graphs = list(patched.recorder.graphs.values())
    for graph in graphs:
        if graph.untunable is None and not len(graph.samples):
            graph.untunable = "no sample of it was kept"
    if graphs and all(graph.untunable for graph in graphs):
        return graphs[0].untunable
    return None if graphs else "it was never called"


def build_strategy(session: TuningSession) -> GraphTuner:
    """The tuner of the session.

    Raises:
        UntunableError: if the session only records.
    """
    if session.tuner is None:
        raise UntunableError("this session only records: it has no tuner")
    return session.tuner


def restore(patched: PatchedModule) -> bool:
    """Take over engines that the cache has for this structure, without recording anything.

    Never raises: a cache that cannot be used is no reason for a call to fail.

    Returns:
        Whether there were any. Each is checked against eager at its first call.
    """
    tuner, module = patched.session.tuner, patched.module
    if tuner is None or inner_hook(module) or foreign_forward(module, ForwardProxy):
        return False
    try:
        with pristine(module), preserved(module), neutral():
            restored = tuner.restore(patched)
    except Exception as error:  # noqa: BLE001 - see above; the module is recorded instead.
        logger.info("%s: nothing was taken from the cache: %s", patched.label, first_line(error))
        return False
    if restored is None or not restored[0]:
        return False
    patched.session.attempted_tuning = True  # By an earlier process: there is nothing to advise at exit.
    patched._install(*restored)
    patched._to_history(f"restored {len(restored[0])} engines from the cache")
    return True


def tune(patched: PatchedModule) -> None:
    """See :meth:`PatchedModule.tune`."""
    session = patched.session
    session.attempted_tuning = True
    with session.tuning:
        if tune_blocks(patched):
            return
        hooks = patched._hook_keys()
        try:
            problem = untunable_reason(patched)
            if problem is not None:
                raise UntunableError(problem)
            with pristine(patched.module), preserved(patched.module), neutral():
                engines, reasons = patched._tune(build_strategy(session))
        except Exception as error:  # noqa: BLE001 - whatever happens, the module stays eager; what should not is reported.
            if not isinstance(error, AITuneError):
                _report_fault(patched, error)
            patched._log_tuning_exception(error)
            patched._extra_state_info = patched.reasons["module"] = first_line(error)
            patched._update_state(ModuleState.EAGER)
            descend(patched)
        except BaseException:
            patched._extra_state_info = patched.reasons["module"] = "tuning was interrupted"
            patched._update_state(ModuleState.EAGER)
            raise
        else:
            patched._handle_backend_added_hooks(hooks)
            patched._install(engines, reasons)
        finally:
            patched.recorder.clear_samples()


def _report_fault(patched: PatchedModule, error: Exception) -> None:
    """What is none of our own errors is a fault of this package, since whatever a candidate raises is one of them.

    The module stays eager and the pipeline usable; but it must be seen.
    """
    logger.error("%s: tuning failed in a way it should not; please report this", patched.label, exc_info=error)
    if patched.session.config.debug:
        patched._extra_state_info = patched.reasons["module"] = first_line(error)
        patched._update_state(ModuleState.EAGER)
        raise error


def tune_blocks(patched: PatchedModule) -> bool:
    """Tune repeated blocks instead of the module, where the session's tuner prefers that.

    Returns:
        Whether it did. The module itself is eager then.
    """
    tuner, config = patched.session.tuner, patched.session.config
    can_replay = any(len(graph.samples) and graph.repeatable for graph in patched.recorder.graphs.values())
    if tuner is None or config.dry_run or not can_replay:
        return False
    blocks = tuner.blocks(patched)
    if not blocks:
        return False
    for block in blocks:
        block.recorder.keep_samples = True
    replay(patched)
    patched.keep_eager(f"its {len(blocks)} repeated blocks are tuned one by one")
    for block in blocks:
        if block.state is ModuleState.RECORDING:
            block.tune()
    return True


def run_tuner(patched: PatchedModule, tuner: GraphTuner) -> tuple[list[InstalledEngine], dict[str, str]]:
    """Look for graph breaks if asked to, then for engines; the time goes to the history."""
    config = patched.session.config
    if config.detect_graph_breaks:
        patched._throw_if_has_graph_break(tuner)
    start = time.perf_counter()
    try:
        return patched._simulate_dry_run() if config.dry_run else tuner.tune(patched)
    finally:
        patched._to_history(f"tuning took {time.perf_counter() - start:.2f} s")


def look_for_graph_breaks(patched: PatchedModule, tuner: GraphTuner) -> None:
    """Raise GraphBreakException unless the module can be captured as one graph; the time goes to the history."""
    start = time.perf_counter()
    try:
        tuner.can_capture(patched)
    finally:
        patched._to_history(f"looking for graph breaks took {time.perf_counter() - start:.2f} s")


def simulate_dry_run(patched: PatchedModule) -> tuple[list[InstalledEngine], dict[str, str]]:
    """Pretend: no engine is built, every graph keeps eager, and modules fail as often as configured.

    Raises:
        UntunableError: when it pretends that the module fails.
    """
    # A generator of its own: the caller may have seeded the global one for other things.
    if random.Random().random() < patched.session.config.dry_run_failure_probability:
        raise UntunableError("the dry run pretends that it fails")
    return [], dict.fromkeys(patched.recorder.graphs, "dry run")


def descend(patched: PatchedModule) -> None:
    """Record the children by replaying the own samples, then tune them. A child that saw none goes on recording."""
    session, config = patched.session, patched.session.config
    children = [child for child in patched.children if child.state is ModuleState.RECORDING]
    if config.mode == "inspect":
        return
    if config.max_depth_level is not None and patched.level >= config.max_depth_level:
        for child in children:
            child.keep_eager(f"deeper than max_depth_level={config.max_depth_level}")
        return
    if not children:
        return
    for child in children:
        child.recorder.keep_samples = True
    replay(patched)
    seconds = patched.recorder.seconds
    for child in children:
        has_samples = any(len(graph.samples) or graph.untunable for graph in child.recorder.graphs.values())
        if child.state is not ModuleState.RECORDING or session.tuner is None or not has_samples:
            continue
        share = child.recorder.seconds / seconds if seconds else 1.0
        if share < config.min_share:
            child.keep_eager(f"takes {share:.1%} of its parent's time")
        else:
            child.tune()


def replay(patched: PatchedModule) -> None:
    """Run the recorded samples through the eager forward, so that the modules below see them again.

    Calls that leave traces are not run again: their children learn from the calls to come.
    """
    if inner_hook(patched.module):
        return  # A hook fires once per call of the user, and never for us.
    forward = patched._original_forward.__wrapped__
    session = patched.session
    before, session.replaying = session.replaying, True
    try:
        with preserved(patched.module), neutral():
            for graph in list(patched.recorder.graphs.values()):
                for sample in graph.samples if graph.repeatable and not graph.spec.context.training else ():
                    args, kwargs = patched.signature.unbind(sample.bound())
                    with sample.context.enter(graph.spec.device_type):
                        patched._run_on_stack(forward, args, kwargs)
    except Exception as error:  # noqa: BLE001 - children that saw nothing stay eager.
        patched._log_tuning_exception(error)
    finally:
        session.replaying = before
