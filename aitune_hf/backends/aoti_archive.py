"""The ``.pt2`` package that AOTInductor writes, brought to a form that can be shared.

The same build gives the same bytes, and nothing in them tells where it was built: generated C++ and its build flags
are dropped, the library is stripped, files are named after what they are.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from aitune_hf.backends.elf import clean_library, scrub_paths
from aitune_hf.errors import BuildError

__all__ = ["MODEL_NAME", "machine_paths", "rewrite_package"]

#: The name of the model within its package.
MODEL_NAME = "model"
#: Where the loader looks for the library, within the package's root folder.
_MODEL_FOLDER = f"data/aotinductor/{MODEL_NAME}/"
_EPOCH = (1980, 1, 1, 0, 0, 0)
#: What the loader reads beside the library. ``.cubin`` and the like hold kernels that are not part of the library.
_KEPT_SUFFIXES = (".json", ".cubin", ".hsaco", ".spv", ".fatbin")


def machine_paths(*more: str | Path) -> list[str]:
    """Folders of this machine that a build may leave traces of."""
    torch_home = Path(torch.__file__).parent.parent
    known = [torch_home, sys.prefix, sys.base_prefix, Path.home(), Path.cwd(), *more]
    return list({os.fspath(path) for path in known} | {os.path.realpath(path) for path in known})


def rewrite_package(source: Path, target: Path, paths: Sequence[str]) -> None:
    """Write the package ``source`` to ``target`` in its shareable form.

    Args:
        source: as ``aoti_compile_and_package`` wrote it.
        target: where to write.
        paths: folders that must not be named in it.

    Raises:
        BuildError: if there is not exactly one library in it.
    """
    with zipfile.ZipFile(source) as package:
        members = {name.partition("/")[2]: package.read(name) for name in package.namelist()}
    libraries = [name for name in members if name.startswith(_MODEL_FOLDER) and name.endswith(".so")]
    if len(libraries) != 1:
        raise BuildError(f"the package has {len(libraries)} libraries instead of one: {sorted(members)}")
    stem = libraries[0].removesuffix(".so").rpartition("/")[2]
    kept: dict[str, bytes] = {}
    for name, content in members.items():
        if not name.startswith(_MODEL_FOLDER):
            if name.rpartition("/")[2] != "serialization_id":
                kept[name] = content
            continue
        file = name.removeprefix(_MODEL_FOLDER)
        if file.startswith(stem):
            file = f"{MODEL_NAME}.wrapper{file.removeprefix(stem)}"
        if file.endswith(".so"):
            kept[_MODEL_FOLDER + file] = clean_library(content, paths)
        elif file.endswith(_KEPT_SUFFIXES) and not _is_about_the_build(file):
            kept[_MODEL_FOLDER + file] = scrub_paths(content, paths)
    # The loader finds the metadata by the name of the C++ source next to it.
    kept[f"{_MODEL_FOLDER}{MODEL_NAME}.wrapper.cpp"] = b""
    _write(target, {f"{MODEL_NAME}/{name}": content for name, content in kept.items()})


def _is_about_the_build(file: str) -> bool:
    return file.endswith(("_flags.json", ".kernel_metadata.json", "_compile_command.json"))


def _write(target: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as package:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            package.writestr(info, members[name])
