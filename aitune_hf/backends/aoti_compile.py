"""A program compiled to an AOTInductor package, by default without weights, leaving nothing else behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aitune_hf.backends.aoti_archive import machine_paths, rewrite_package
from aitune_hf.backends.build_folder import build_folder
from aitune_hf.backends.quiet import quiet_torch
from aitune_hf.errors import BuildError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["compile_package", "compiler", "compiler_options"]

#: Without these an engine would hold weights, or values computed from them.
_WEIGHT_FREE: dict[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.use_runtime_constant_folding": False,
    # Small tensors would become numbers in the code.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "freezing": False,
}
#: The opposite: constants are folded, packed for the machine's matrix kernels, and kept in the library.
_FROZEN: dict[str, Any] = {"aot_inductor.package_constants_in_so": True, "freezing": True}
#: What makes building cheaper, where torch knows it; none changes the kernels.
_CHEAPER: dict[str, Any] = {
    # A precompiled header pays after four builds, and is written where no cache setting reaches.
    "aot_inductor.precompile_headers": False,
    "aot_inductor.enable_line_tables": False,
    # Sizes are checked before a call; a size of 1 is allowed where it was verified.
    "aot_inductor.check_lowerbound": False,
}
#: The oldest g++ that knows every instruction set that torch generates code for on x86-64.
_GCC_FOR_ALL_ISAS = 12


def compiler() -> str | None:
    """Path of the C++ compiler that torch would call, or None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compiler_options(
    device: torch.device, portable: bool, freezing: bool = False, max_autotune: bool = False
) -> dict[str, Any]:
    """Settings of ``torch._inductor.config`` for one build.

    Args:
        device: where the engine will run.
        portable: for any x86-64-v3 CPU instead of this one.
        freezing: with the weights, folded and packed.
        max_autotune: time more kernels.

    Raises:
        BuildError: if this torch lacks a setting that correctness depends on.
    """
    with build_folder(device):
        import torch._inductor.config as config

    known = config.get_config_copy()
    needed = dict(_FROZEN if freezing else _WEIGHT_FREE)
    wanted = dict(_CHEAPER)
    if max_autotune:
        wanted["max_autotune"] = True
    if portable:
        needed |= {"cpp.simdlen": 256, "cpp.march": "x86-64-v3"}
    if device.type == "cpu":
        # Kernels are compiled in one go: a pool of workers would only have to be waited for.
        wanted["compile_threads"] = 1
        if not portable and _gcc_major() >= _GCC_FOR_ALL_ISAS:
            # Instead of compiling a test program per instruction set, 10 s in each process.
            wanted["cpp.vec_isa_ok"] = True
    else:
        needed["aot_inductor.embed_kernel_binary"] = True
    missing = sorted(needed.keys() - known.keys())
    if missing:
        raise BuildError(f"torch {torch.__version__} has no setting {', '.join(missing)}")
    return needed | {key: value for key, value in wanted.items() if key in known}


def compile_package(program: ExportedProgram, target: Path, options: Mapping[str, Any], device: torch.device) -> None:
    """Compile ``program`` and write the package to ``target``, in its shareable form.

    Raises:
        BuildError: if the compiler fails.
    """
    from torch._inductor import aoti_compile_and_package

    forked = [device] if device.type == "cuda" else []
    with build_folder(device) as folder, quiet_torch(), torch.random.fork_rng(devices=forked):
        raw = folder / "raw.pt2"
        try:
            with torch.no_grad():
                aoti_compile_and_package(program, package_path=str(raw), inductor_configs=dict(options))
        except Exception as error:
            raise BuildError(f"AOTInductor failed: {_short(error)}") from error
        rewrite_package(raw, target, machine_paths(folder, os.environ["TORCHINDUCTOR_CACHE_DIR"]))


def _gcc_major() -> int:
    """Major version of the compiler if it is g++ on x86-64, else 0."""
    path = compiler()
    if path is None or "x86" not in os.uname().machine:
        return 0
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r"\b(\d+)\.\d+\.\d+", text) if "Free Software Foundation" in text else None
    return int(found[1]) if found else 0


def _short(error: BaseException) -> str:
    """What a compiler error says, without the command line that it quotes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower()]
    return f"{type(error).__name__}: {(telling or lines or [''])[0][:300]}"
