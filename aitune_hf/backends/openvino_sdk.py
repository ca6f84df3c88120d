"""The OpenVINO package: whether it is there, and how it is imported so that it tells nobody."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "OV_TYPES",
    "load_nncf",
    "load_openvino",
    "missing_nncf",
    "missing_openvino",
    "openvino_version",
    "runs_bf16",
]

#: Types that OpenVINO computes with, or takes and gives: torch's → the name of OpenVINO's.
OV_TYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "boolean",
}
_TELEMETRY = "openvino_telemetry"
_importing = threading.Lock()


def load_openvino() -> Any:
    """The package. Importing it would report that to Intel and leave a folder in the user's home; here it does not."""
    return _load("openvino")


def load_nncf() -> Any:
    """NNCF, which makes int8 models."""
    load_openvino()
    return _load("nncf")


def missing_openvino() -> str | None:
    """None if OpenVINO is installed, else what to do."""
    if importlib.util.find_spec("openvino") is None:
        return "OpenVINO is not installed: pip install openvino"
    return None


def missing_nncf() -> str | None:
    """None if NNCF is installed, else what to do."""
    if importlib.util.find_spec("nncf") is None:
        return "NNCF, which makes int8 models, is not installed: pip install nncf"
    return None


def openvino_version() -> str:
    """Major, minor and patch, or ``none``."""
    try:
        return importlib.metadata.version("openvino")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def runs_bf16() -> bool:
    """True if the CPU itself computes in bfloat16."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return bool({"amx_bf16", "avx512_bf16"} & set(flags))


def _load(name: str) -> Any:
    with _importing:
        if name in sys.modules or _TELEMETRY in sys.modules:
            return importlib.import_module(name)  # The user's own program has decided already.
        # Both packages do without the package that reports. There is no setting that leaves the home folder alone.
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
        try:
            return importlib.import_module(name)
        finally:
            del sys.modules[_TELEMETRY]
