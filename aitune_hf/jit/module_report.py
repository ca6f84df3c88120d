"""What is told about one patched module: its line in the hierarchy, its report, its folder and its error log."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aitune_hf.cache.layout import default_cache_dir
from aitune_hf.errors import AITuneError, UntunableError
from aitune_hf.jit.inspection import ModuleInspectionReport

if TYPE_CHECKING:
    from aitune_hf.jit.observed_module import ObservedModule

__all__ = [
    "describe",
    "first_line",
    "inspection_graphs",
    "inspection_report",
    "log_tuning_exception",
    "module_cache_dir",
    "module_dtypes",
    "parameter_count",
    "write_error_log",
]

logger = logging.getLogger("aitune_hf")


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def parameter_count(patched: ObservedModule) -> int:
    """Parameters of the module and of all below it; 0 once it does not exist any more."""
    module = patched._module()
    return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0


def describe(patched: ObservedModule) -> str:
    """One line for people."""
    extra = f" ({patched._extra_state_info})" if patched._extra_state_info else ""
    return (
        f"{patched.fq_name} [{patched.name}, {parameter_count(patched):,} parameters, {patched.call_count} calls] "
        f"{patched.state.value}{extra}"
    )


def module_dtypes(patched: ObservedModule) -> list[str]:
    """Distinct dtypes of parameters and buffers of the module's tree."""
    module = patched._module()
    tensors = (*module.parameters(), *module.buffers()) if module is not None else ()
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def inspection_graphs(patched: ObservedModule) -> list[dict[str, Any]]:
    """The graphs seen, as JSON."""
    recorder = patched._recorder
    return [graph.spec.to_dict() for graph in list(recorder.graphs.values())] if recorder is not None else []


def inspection_report(patched: ObservedModule) -> ModuleInspectionReport:
    """What was seen of a module so far."""
    recorder = patched._recorder
    graphs = dict(recorder.graphs) if recorder is not None else {}
    by_name = {graphs[key].spec.name if key in graphs else key: why for key, why in patched.reasons.items()}
    untunable = {graph.spec.name: graph.untunable for graph in graphs.values() if graph.untunable}
    return ModuleInspectionReport(
        fq_name=patched.fq_name,
        path=patched.path,
        class_name=patched._class_name,
        level=patched.level,
        state=patched.state.value,
        call_count=patched.call_count,
        parameters=parameter_count(patched),
        dtypes=module_dtypes(patched),
        seconds=recorder.seconds if recorder is not None else 0.0,
        graphs=inspection_graphs(patched),
        reasons={**untunable, **by_name},
    )


def module_cache_dir(patched: ObservedModule) -> Path:
    """The module's folder for what it leaves behind for people. Not made yet."""
    root = patched.session.config.cache_dir or default_cache_dir(os.environ)
    safe = "".join(char if char.isalnum() or char in "._-" else "_" for char in patched.fq_name)
    # A deep hierarchy gives names that no file system takes.
    return Path(root) / "logs" / (safe if len(safe) <= 200 else f"{safe[:20]}...{safe[-170:]}")


def log_tuning_exception(patched: ObservedModule, error: Exception) -> None:
    """Say why a module is not tuned, in one line, and keep the traceback in a file."""
    log = None if isinstance(error, UntunableError) else patched._write_error_log(error)
    where = f" Traceback: {log}" if log else ""
    level = logging.INFO if isinstance(error, AITuneError) else logging.WARNING
    logger.log(level, "%s stays eager: %s%s", patched.label, first_line(error), where)
    patched._to_history(f"stays eager: {first_line(error)}")


def write_error_log(patched: ObservedModule, error: Exception) -> Path | None:
    """Write a traceback to ``error.log`` in the module's folder; None where that cannot be written."""
    try:
        folder = module_cache_dir(patched)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "error.log"
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return None  # No reason to fail; the message itself was logged.
    return path
