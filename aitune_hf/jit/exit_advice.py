"""What to tell a user whose program ended without anything having been tuned."""

from __future__ import annotations

from aitune_hf.jit.module_state import ModuleState
from aitune_hf.jit.session import TuningSession

__all__ = ["exit_advice"]


def exit_advice(session: TuningSession) -> str | None:
    """One line that says why nothing was tuned and what to change; None if something was, or nothing was to be."""
    config = session.config
    if session.attempted_tuning or not session.patched_classes or config.mode == "inspect":
        return None
    return f"aitune_hf: nothing was tuned; {_cause(session)}."


def _cause(session: TuningSession) -> str:
    config = session.config
    called = max([session.most_calls, *(patched.call_count for patched in session.modules)])
    if called == 0 and any(patched.state is ModuleState.SKIPPED for patched in session.modules):
        return "what was called was skipped on request"
    if called == 0:
        return "none of the modules that were intercepted was called"
    if config.mode == "deferred":
        return "enable_tune_deferred() was never called, or no module was called after it"
    if called < config.min_samples:
        return (
            f"the most called module saw {called} of min_samples={config.min_samples} calls; "
            "call it more often or lower it"
        )
    return "no recorded call varied an axis; use other batch sizes or set batch_axis_required=False"
