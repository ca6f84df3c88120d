"""A loaded AOTInductor package: the one place that touches torch's private loader.

``torch._inductor.aoti_load_package`` probes the compiler when it loads, which can take many seconds and fails on a
machine without one. The loader underneath needs no compiler, but it is private and changes between releases: what this
package uses of it is looked for when it is used, and its absence is an :class:`EngineLoadError`.
"""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from aitune_hf.backends.aoti_archive import MODEL_NAME
from aitune_hf.errors import EngineLoadError

__all__ = ["AOTIPackage", "missing_loader"]

_MAPS = Path("/proc/self/maps")
#: Files of an unpacked package that are no longer needed once it is loaded.
_READ_AT_LOAD = {".so", ".cpp", ".json", ""}
#: Held while a package is unpacked, so that the folder that is new afterwards is its own.
_unpacking = threading.Lock()


def missing_loader() -> str | None:
    """None if this torch can load packages, else what it lacks."""
    if _native_loader() is None and not hasattr(_public_module(), "aoti_load_package"):
        return f"torch {torch.__version__} has no loader for AOTInductor packages"
    return None


class AOTIPackage:
    """A loaded package. Must not be run before constants are bound to it.

    Args:
        path: the ``.pt2`` file.
        runners: how many calls may run at once.
        device_index: index of the accelerator, -1 on the CPU.

    Attributes:
        names: names of the constants it must be given.

    Raises:
        EngineLoadError: if it cannot be loaded.
    """

    def __init__(self, path: Path, runners: int = 1, device_index: int = -1) -> None:
        with _unpacking:
            before = _unpacked_folders()
            try:
                self._loader = _open_loader(str(path), runners, device_index)
            except RuntimeError as error:
                raise EngineLoadError(f"{path.name} cannot be loaded: {_first_line(error)}") from error
            folders = _unpacked_folders() - before
        self._remove = weakref.finalize(self, _remove_folders, folders)
        if all(_is_read_at_load(folder) for folder in folders):
            # The library is mapped: its file can go now, and nothing is left behind even by a crash.
            self._remove()
        self.names: tuple[str, ...] = tuple(_method(self._loader, "get_constant_fqns")())
        #: Runs on a list of tensors, which it empties; returns the outputs.
        self.run: Callable[[list[torch.Tensor]], list[torch.Tensor]]
        self.run = getattr(self._loader, "boxed_run", None) or _method(self._loader, "run")

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let it read these tensors from now on, without a copy. They must be checked before: it does not.

        Raises:
            EngineLoadError: if this torch cannot do so, or the names are not those of the package.
        """
        try:
            _method(self._loader, "load_constants")(dict(tensors), False, True, True)
        except (RuntimeError, TypeError) as error:
            raise EngineLoadError(f"the weights cannot be bound: {_first_line(error)}") from error

    def close(self) -> None:
        """Remove what was unpacked."""
        self._remove()


def _native_loader() -> Any:
    return getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)


def _public_module() -> Any:
    import torch._inductor

    return torch._inductor


def _open_loader(path: str, runners: int, device_index: int) -> Any:
    native = _native_loader()
    if native is not None:
        try:
            return native(path, MODEL_NAME, False, runners, device_index)
        except TypeError as error:
            reason = f"its arguments have changed ({_first_line(error)})"
    else:
        reason = "it is gone"
    load = getattr(_public_module(), "aoti_load_package", None)
    if load is None:
        raise EngineLoadError(f"torch {torch.__version__} has no loader for AOTInductor packages: {reason}")
    try:
        return load(path, num_runners=runners, device_index=device_index).loader
    except (AttributeError, TypeError) as error:
        raise EngineLoadError(f"torch {torch.__version__} cannot load AOTInductor packages: {error}") from error


def _method(loader: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] | None = getattr(loader, name, None)
    if method is None:
        raise EngineLoadError(f"the package loader of torch {torch.__version__} has no {name!r}")
    return method


def _unpacked_folders() -> set[Path]:
    """The folders from which libraries of such packages are mapped into this process."""
    library = f"/data/aotinductor/{MODEL_NAME}/{MODEL_NAME}.wrapper.so"
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    files = {line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in lines if library in line}
    # The unpacked root holds the package's root folder, which holds the library.
    return {Path(file.removesuffix(library)).parent for file in files}


def _is_read_at_load(folder: Path) -> bool:
    return all(file.suffix in _READ_AT_LOAD for file in folder.rglob("*") if file.is_file())


def _remove_folders(folders: set[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
