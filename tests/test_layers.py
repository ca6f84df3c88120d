"""The layering of the package, held by reading its imports, and what importing it may not do.

From the bottom up, every part may import the parts below it and nothing above or beside it; the exceptions
are written out in ``VIEWS``. Imports inside functions and under ``TYPE_CHECKING`` count as well.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "aitune_hf"
ROOT = PACKAGE.name

# From the bottom up. Parts in one row do not see each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("quality", "strategy"),
    ("config",),
    ("graph",),
    ("backends", "cache"),
    ("jit",),
    ("tuning",),
    ("hub",),
    ("integrations", "report"),
    ("target",),
    ("pipeline", "model"),
    ("functional",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, row in enumerate(LAYERS) for part in row}

# Parts that see less than all that is below them, or a part beside them.
# A dotted name stands for that module and what is in it.
VIEWS: dict[str, tuple[str, ...]] = {
    "graph": ("errors",),
    # The last: what `jit.enable` hands out, imported when it is asked for.
    "jit": ("errors", "config", "graph", "cache", "backends.base", "tuning.enable"),
    "pipeline": ("model", *(part for row in LAYERS[:10] for part in row)),
    "model": ("pipeline", *(part for row in LAYERS[:10] for part in row)),
}

# Who may import a library at all.
OWNERS: dict[str, tuple[str, ...]] = {
    "huggingface_hub": ("hub",),
    "cryptography": ("hub",),
    "diffusers": ("integrations",),
    "transformers": ("integrations",),
    "accelerate": ("integrations",),
    "openvino": ("backends",),
    "onnx": ("backends",),
    "onnxruntime": ("backends",),
    "onnxscript": ("backends",),
    "tensorrt": ("backends",),
    "tensorrt_rtx": ("backends",),
    "torch_tensorrt": ("backends",),
    "matplotlib": ("report",),
    "jinja2": ("report",),
}
# Not installed everywhere: never imported at the top of a module.
LAZY = frozenset(library for library, owners in OWNERS.items() if owners in {("backends",), ("report",)})
# All that a part may import beside the standard library and this package.
ONLY: dict[str, frozenset[str]] = {"errors": frozenset(), "graph": frozenset({"torch", "safetensors"})}
# Parts that can be imported without torch, whatever they import in turn.
WITHOUT_TORCH = ("errors", "cache")


@dataclass(frozen=True)
class Import:
    """One import as it stands in a file."""

    file: str
    line: int
    target: str
    at_import_time: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def module_name(path: Path, package: Path) -> str:
    """Return the dotted name below the package, ``jit.patcher``; the package itself is ``__init__``."""
    parts = list(path.relative_to(package).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def read_imports(path: Path, package: Path) -> list[Import]:
    """Return every import in a file, those in functions and under ``TYPE_CHECKING`` included."""
    file = path.relative_to(package.parent).as_posix()
    parents = path.relative_to(package.parent).parent.parts
    found: list[Import] = []

    def targets(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(parents[: len(parents) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield ".".join([*base, alias.name])
        elif isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            literal = node.args[0] if node.args else None
            if (
                name in {"import_module", "__import__"}
                and isinstance(literal, ast.Constant)
                and isinstance(literal.value, str)
                and not literal.value.startswith(".")
            ):
                yield literal.value

    def visit(node: ast.AST, at_import_time: bool, typing_only: bool) -> None:
        found.extend(
            Import(file, getattr(node, "lineno", 0), target, at_import_time, typing_only) for target in targets(node)
        )
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False, True)
            for child in node.orelse:
                visit(child, at_import_time, typing_only)
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import_time = False
        for child in ast.iter_child_nodes(node):
            visit(child, at_import_time, typing_only)

    visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)), True, False)
    return found


def resolve(target: str, names: frozenset[str]) -> str | None:
    """Return the module of this package that a dotted target names; ``None`` if it is another package's.

    ``aitune_hf.jit.patcher.Patcher`` is ``jit.patcher``; a name that no module has is the package's own.
    """
    first, *rest = target.split(".")
    if first != ROOT:
        return None
    while rest and ".".join(rest) not in names:
        rest.pop()
    return ".".join(rest) or "__init__"


def may_see(part: str, module: str) -> bool:
    """Say whether a part of the package may import one of its modules."""
    target = module.split(".")[0]
    if target == part:
        return True
    if part in VIEWS:
        return any(module == seen or module.startswith(f"{seen}.") for seen in VIEWS[part])
    return LEVEL[target] < LEVEL[part]


def reaches_torch(module: str, imports: dict[str, list[Import]], seen: set[str]) -> list[str]:
    """Return the chain of imports by which importing a module also imports torch; empty where it does not."""
    seen.add(module)
    names = frozenset(imports)
    for entry in imports[module]:
        if not entry.at_import_time:
            continue
        if entry.target.split(".")[0] == "torch":
            return [str(entry)]
        inner = resolve(entry.target, names)
        if inner is None or inner == "__init__" or inner in seen:
            continue
        # Importing a module runs its package's __init__ too.
        for step in {inner.split(".")[0], inner} & names - seen:
            chain = reaches_torch(step, imports, seen)
            if chain:
                return [str(entry), *chain]
    return []


def violations(package: Path) -> list[str]:
    """Return one line for each import that breaks a rule."""
    files = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    imports = {name: read_imports(path, package) for name, path in files.items()}
    names = frozenset(files)
    broken: list[str] = []
    for name, entries in imports.items():
        part = name.split(".")[0]
        if part not in LEVEL:
            broken.append(f"{files[name].name}: {part!r} has no place in LAYERS of tests/test_layers.py")
            continue
        for entry in entries:
            inner = resolve(entry.target, names)
            library = entry.target.split(".")[0]
            if inner is not None:
                if part == "config" and entry.typing_only:
                    continue  # The types of settings live above; nothing of them is imported at run time.
                if inner.split(".")[0] in LEVEL and not may_see(part, inner):
                    broken.append(f"{entry}: {part} may not import {inner}")
                continue
            if library in OWNERS and part not in OWNERS[library]:
                broken.append(f"{entry}: only {', '.join(OWNERS[library])} may")
            elif library in LAZY and entry.at_import_time:
                broken.append(f"{entry} at import time: move it into the function that needs it")
            if part in ONLY and library not in ONLY[part] and library not in sys.stdlib_module_names:
                known = ", ".join(["the standard library", *sorted(ONLY[part])])
                broken.append(f"{entry}: {part} may import only {known}")
        if part in WITHOUT_TORCH:
            chain = reaches_torch(name, imports, set())
            if chain:
                broken.append(f"{part} must be importable without torch: " + "; ".join(chain))
    return broken


def test_the_package_keeps_its_layers() -> None:
    broken = violations(PACKAGE)
    assert not broken, "\n" + "\n".join(broken)


def lay(folder: Path, files: dict[str, str]) -> Path:
    """Write a small package of the same name and return its folder."""
    package = folder / ROOT
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


LEGAL = {
    "errors.py": "import enum",
    "config.py": "from .errors import ConfigError",
    "graph/__init__.py": "from .graph_spec import GraphSpec",
    "graph/graph_spec.py": "import torch\nfrom torch.utils import _pytree\nfrom ..errors import AITuneError",
    "backends/__init__.py": "",
    "backends/base.py": "from aitune_hf.graph import GraphSpec",
    "backends/openvino.py": "from .base import Backend\ndef build():\n    import openvino",
    "cache/__init__.py": "import filelock",
    "cache/key.py": "def key():\n    import torch\n    from ..graph import GraphSpec",
    "jit/__init__.py": "from .. import errors\nfrom ..backends.base import Backend\nfrom ..cache import key",
    "tuning/__init__.py": "from aitune_hf.backends import openvino\nfrom aitune_hf.jit import Patcher",
    "hub/__init__.py": "def push():\n    from huggingface_hub import HfApi",
    "integrations/accelerate.py": "from accelerate.hooks import ModelHook",
    "integrations/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import diffusers",
    "report/__init__.py": "from aitune_hf import tuning\ndef plot():\n    import matplotlib.pyplot",
    "pipeline.py": "from .integrations import diffusers as _\nfrom .model import AITuneModel",
    "model.py": "from .tuning import tune",
    "cli.py": "import aitune_hf\nfrom aitune_hf import AITunePipeline",
    "__main__.py": "from .cli import main",
}


def test_a_legal_package_passes(tmp_path: Path) -> None:
    assert violations(lay(tmp_path, LEGAL)) == []


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("graph/bad.py", "from ..jit import Patcher", "graph may not import jit"),
        ("graph/bad.py", "def f():\n    from aitune_hf.cache import key", "graph may not import cache.key"),
        ("graph/bad.py", "import numpy", "graph may import only the standard library, safetensors, torch"),
        ("graph/bad.py", "from .. import config", "graph may not import config"),
        ("errors.py", "import torch", "errors may import only the standard library"),
        ("backends/bad.py", "import aitune_hf.cache.key as k", "backends may not import cache.key"),
        ("backends/bad.py", "import openvino", "at import time"),
        (
            "jit/bad.py",
            "from aitune_hf.backends.openvino import build",
            "jit may not import backends.openvino",
        ),
        ("jit/bad.py", "from ..backends import openvino", "jit may not import backends.openvino"),
        ("jit/bad.py", "from ..backends import Registry", "jit may not import backends"),
        (
            "jit/bad.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..tuning import T",
            "jit may not import tuning",
        ),
        ("jit/bad.py", "def f():\n    import accelerate.hooks", "only integrations may"),
        (
            "tuning/bad.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from diffusers import X",
            "only integrations may",
        ),
        ("tuning/bad.py", "from importlib import import_module\nimport_module('transformers')", "only integ"),
        ("tuning/bad.py", "from aitune_hf import AITunePipeline", "tuning may not import __init__"),
        ("report/bad.py", "class A:\n    import matplotlib", "at import time"),
        ("integrations/bad.py", "from ..report import html", "integrations may not import report"),
        ("pipeline.py", "import aitune_hf.cli", "pipeline may not import cli"),
        ("cache/bad.py", "try:\n    import torch\nexcept ImportError:\n    pass", "importable without torch"),
        ("cache/bad.py", "from ..graph.graph_spec import GraphSpec", "importable without torch"),
        ("extras.py", "", "has no place in LAYERS"),
    ],
)
def test_each_broken_rule_is_seen(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    broken = violations(lay(tmp_path, {**LEGAL, name: text}))
    assert any(complaint in line for line in broken), broken


PROBE = """
import json, sys
import torch
names = ("__call__", "__init__", "__setattr__", "__getattr__", "_call_impl", "_wrapped_call_impl")
before = {name: getattr(torch.nn.Module, name) for name in names}
loaded = set(sys.modules)
import aitune_hf
print(json.dumps({
    "patched": [name for name in names if getattr(torch.nn.Module, name) is not before[name]],
    "hooked": [name for name, value in vars(torch.nn.modules.module).items()
               if name.startswith("_global_") and isinstance(value, dict) and value],
    "loaded": sorted({name.split(".")[0] for name in set(sys.modules) - loaded}),
}))
"""


def test_importing_the_package_patches_nothing_and_loads_no_heavy_library() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["patched"] == []
    assert seen["hooked"] == []
    heavy = set(OWNERS) - {"jinja2", "huggingface_hub"}  # torch loads jinja2; the hub client is light
    assert not heavy & set(seen["loaded"])
