"""Backends by name: the built-in ones and those that other packages register."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points

from aitune_hf.backends.base import Backend
from aitune_hf.errors import ConfigError

__all__ = [
    "ENTRY_POINT_GROUP",
    "available_backends",
    "backend_names",
    "get_backend",
    "known_backends",
    "unavailable_backends",
]

logger = logging.getLogger("aitune_hf")

#: Entry points of this group name a :class:`Backend` class, or a function that returns a backend.
ENTRY_POINT_GROUP = "aitune_hf.backends"

#: Built-in backends: name → where its class is. Nothing is imported before it is asked for.
_BUILTIN: Mapping[str, str] = {
    "inductor": "aitune_hf.backends.inductor:InductorBackend",
    "onnxruntime": "aitune_hf.backends.onnxruntime:OnnxRuntimeBackend",
    "openvino": "aitune_hf.backends.openvino:OpenVINOBackend",
    "tensorrt": "aitune_hf.backends.tensorrt:TensorRTBackend",
    "tensorrt_rtx": "aitune_hf.backends.tensorrt:TensorRTRTXBackend",
    "torch_compile": "aitune_hf.backends.torch_compile:TorchCompileBackend",
    "torch_tensorrt": "aitune_hf.backends.torch_tensorrt:TorchTensorRTBackend",
}


def backend_names() -> list[str]:
    """Names of all backends that are known, whether they work here or not."""
    return sorted({*_BUILTIN, *_third_party()})


def get_backend(name: str) -> Backend:
    """The backend called ``name``.

    Raises:
        ConfigError: if there is none, with the names there are; or if a third party's cannot be imported, with why.
    """
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        return _made(name, lambda: getattr(importlib.import_module(module), attribute))
    point = _third_party().get(name)
    if point is None:
        raise ConfigError(f"there is no backend {name!r}; there are: {', '.join(backend_names())}")
    return _made(name, point.load)


def known_backends() -> list[Backend]:
    """All backends that can be imported, in the order of their names. Some may only load here, and not build."""
    found: list[Backend] = []
    for name in backend_names():
        try:
            found.append(get_backend(name))
        except ConfigError as error:
            logger.warning("%s", error)
    return found


def available_backends() -> list[Backend]:
    """The backends that can build and load here, in the order of their names."""
    return [backend for name in backend_names() if isinstance(backend := _tried(name), Backend)]


def unavailable_backends() -> dict[str, str]:
    """The backends that cannot, with the reason: name → why not and what would help."""
    return {name: reason for name in backend_names() if isinstance(reason := _tried(name), str)}


def _tried(name: str) -> Backend | str:
    try:
        backend = get_backend(name)
    except ConfigError as error:
        return str(error)
    try:
        reason = backend.available()
    except Exception as error:  # noqa: BLE001 - code of third parties, which must not stop the others
        reason = f"its check failed: {type(error).__name__}: {error}"
    return backend if reason is None else reason


def _made(name: str, load: Callable[[], object]) -> Backend:
    try:
        factory = load()
        backend = factory() if callable(factory) else factory
    except Exception as error:
        raise ConfigError(f"backend {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(backend, Backend) or backend.name != name:
        raise ConfigError(f"backend {name!r} is registered with {backend!r}, which is no backend of that name")
    return backend


@functools.cache
def _third_party() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in _BUILTIN}
