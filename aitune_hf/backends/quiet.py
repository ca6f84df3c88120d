"""Torch's talk to its own developers, kept from the user while a candidate is tried."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

__all__ = ["quiet_torch"]

_TALKATIVE = (
    "onnx_ir.passes.common.initializer_deduplication",
    "torch._export.non_strict_utils",
    "torch._inductor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx._internal.exporter._compat",
    "torch.onnx._internal.exporter._registration",
)


class _OnlyErrors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Within it, torch's compilers log and warn of nothing but errors."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    only_errors = _OnlyErrors()
    for logger in loggers:
        logger.addFilter(only_errors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(only_errors)
