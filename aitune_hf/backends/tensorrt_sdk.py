"""The two packages that have TensorRT's Python API, and all in which they differ."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aitune_hf.backends.onnx_export import missing_exporter

__all__ = ["RTX", "TENSORRT", "Sdk", "driver_problem", "torch_dtype"]

logger = logging.getLogger("aitune_hf")


@dataclass(frozen=True, kw_only=True)
class Sdk:
    """One package with TensorRT's Python API.

    Attributes:
        name: of the package to import, and of the backend.
        title: its name in messages.
        install: what to install.
        opset: of the ONNX graphs its parser gets.
        aims: it builds for GPUs other than the one at hand, and without any.
    """

    name: str
    title: str
    install: str
    opset: int
    aims: bool

    def load(self) -> Any:
        """The package.

        Raises:
            ImportError: if it or one of its libraries is missing.
        """
        try:
            return importlib.import_module(self.name)
        except ImportError:
            raise
        except Exception as error:  # Its loader raises whatever a missing library makes it raise.
            raise ImportError(f"{type(error).__name__}: {error}") from error

    def version(self) -> str:
        """The installed version, ``"none"`` without one."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    def missing(self) -> str | None:
        """None if plans can be made with it on this machine, GPU or not; else what to install."""
        try:
            self.load()
        except ImportError as error:
            return f"{self.title} cannot be imported ({_first_line(error)}): pip install {self.install}"
        return missing_exporter()

    def targets(self) -> list[str]:
        """The GPU generations it can build for without having one: ``["sm75", …]``."""
        if not self.aims:
            return []
        names = self.load().ComputeCapability.__members__
        return sorted((name.lower() for name in names if name.startswith("SM")), key=lambda name: int(name[2:]))

    def log(self, keep: list[str]) -> Any:
        """A logger object of the package that puts errors into ``keep`` and tells the rest to ours."""
        sdk = self.load()

        class Log(sdk.ILogger):  # type: ignore[misc, name-defined] # The base class is known at run time only.
            def __init__(self) -> None:
                super().__init__()  # Pybind's classes must be told.

            def log(self, severity: Any, message: str) -> None:
                if severity <= sdk.ILogger.Severity.ERROR:
                    keep.append(message.strip())
                else:
                    logger.debug("%s: %s", self_title, message)

        self_title = self.title
        return Log()


#: Strong typing is the only mode of both; opset 23 keeps attention as one operator.
RTX = Sdk(name="tensorrt_rtx", title="TensorRT-RTX", install="'aitune-hf[tensorrt-rtx]'", opset=23, aims=True)
#: Parsers of TensorRT 10 stop at opset 22; operators newer than 20 are not needed.
TENSORRT = Sdk(name="tensorrt", title="TensorRT", install="'aitune-hf[tensorrt]'", opset=20, aims=False)


def driver_problem(open_library: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """None if an NVIDIA driver with a GPU answers and torch can use it, else why not.

    Asked before a plan is touched: some runtimes of TensorRT crash without a driver instead of saying so.
    """
    try:
        driver = open_library("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver on this machine (libcuda.so.1 is not found)"
    code = driver.cuInit(0)
    if code:
        return f"the NVIDIA driver does not start (cuInit returns {code})"
    count = ctypes.c_int(0)
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return "the NVIDIA driver sees no GPU"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the GPU: install one that is built for CUDA"
    return None


def torch_dtype(sdk: Any, dtype: Any) -> torch.dtype | None:
    """Torch's dtype for one of TensorRT's; None if it has none."""
    return {
        sdk.DataType.FLOAT: torch.float32,
        sdk.DataType.HALF: torch.float16,
        sdk.DataType.BF16: torch.bfloat16,
        sdk.DataType.INT8: torch.int8,
        sdk.DataType.UINT8: torch.uint8,
        sdk.DataType.INT32: torch.int32,
        sdk.DataType.INT64: torch.int64,
        sdk.DataType.BOOL: torch.bool,
    }.get(dtype)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
