"""Which code a class or a function runs, said without paths, line numbers, addresses or library versions.

A class is known by its qualified name and the SHA-256 of the source file that defines it, for every class it
inherits from. A name alone is enough for torch and the standard library: the environment part of the cache
key holds torch's version. Code without a source file (a console, a notebook, ``exec``) is known by its own
text or, failing that, by its code objects.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib.machinery
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from aitune_hf.errors import UntunableError

__all__ = ["CodeIdentity", "Json", "canonical", "digest_of", "qualified_name"]

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"

_MAIN = "__main__"
# Code from a Hub repo is imported under a name that holds the repo or folder, and its commit: a loading path.
_REMOTE_CODE = re.compile(r"^(transformers_modules|diffusers_modules)\..*?([^.]+)$")
# Methods a forward does not run: constructors (what they did shows in the attributes), loading and saving.
_NO_FORWARD = ("__init", "__new__", "from_", "load_", "save_", "push_", "_load", "_save", "_from")
_PRIMITIVES = (bool, int, float, str, bytes, type(None))


def canonical(value: Json) -> bytes:
    """The one JSON text of ``value``: sorted keys, no blanks, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def digest_of(value: Json) -> str:
    """SHA-256 of the canonical JSON of ``value``, in hex."""
    return hashlib.sha256(canonical(value)).hexdigest()


def qualified_name(thing: Any) -> str:
    """``module.qualname`` of a class or function; a Hub repo's name and commit are left out of it."""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__qualname__
    return f"{_module_name(thing)}.{name}"


def _module_name(thing: Any) -> str:
    module = getattr(thing, "__module__", None)
    return _home(module) if isinstance(module, str) else builtins.__name__


def _home(module: str) -> str:
    if module == "__mp_main__":  # what a spawned child calls its parent's script
        return _MAIN
    return _REMOTE_CODE.sub(r"\1.\2", module)


def is_torch(module: str) -> bool:
    """Whether a module of this name belongs to torch itself."""
    return module.partition(".")[0] in ("torch", "functorch")


def known_by_name(module: str) -> bool:
    """Whether code in a module of this name is pinned by the environment: torch, or the standard library."""
    top = module.partition(".")[0]
    return is_torch(module) or (top in sys.stdlib_module_names and module not in (_MAIN, "__mp_main__"))


class CodeIdentity:
    """Reads and remembers the identity of classes and functions, for the time of one hash.

    ``describe`` turns a value held by code (a closure cell, a default) into JSON; it is handed in because
    values can hold code in turn. Nothing is remembered between hashes, so a file that was edited and
    reloaded is read again.
    """

    def __init__(self, describe: Callable[[object, int], Json]) -> None:
        self._describe = describe
        self._files: dict[str, str | None] = {}
        self._classes: dict[type, list[Json]] = {}

    def classes(self, cls: type, depth: int) -> list[Json]:
        """One entry per class of the MRO, most derived first: its name and, unless torch's, its source.

        Raises:
            UntunableError: neither source nor bytecode of a class can be had (a compiled extension class).
        """
        if cls not in self._classes:
            cls = _real_class(cls)
            lineage = [c for c in cls.__mro__ if not _is_transparent(c, cls)]
            entries = [self._class(c, depth) for c in lineage if qualified_name(c) not in _ROOTS]
            self._classes[cls] = entries
        return self._classes[cls]

    def _class(self, cls: type, depth: int) -> Json:
        entry: dict[str, Json] = {"name": qualified_name(cls)}
        if known_by_name(cls.__module__):
            # Still look at methods: a patched torch.nn.Linear.forward is no longer what torch's version says.
            foreign = self._foreign_methods(cls, depth)
            return {**entry, "methods": foreign} if foreign else entry
        source = self.file(cls.__module__)
        if source is not None:
            entry["source"] = source
            foreign = self._foreign_methods(cls, depth)
            if foreign:
                entry["methods"] = foreign
        elif _is_extension(cls.__module__):
            raise UntunableError(
                f"class {qualified_name(cls)} is compiled and its source cannot be read, so equal modules "
                f"cannot be told from different ones; leave it out with skip_modules"
            )
        if source is None or "<locals>" in cls.__qualname__ or _is_executed(cls):
            entry["code"] = self._loose_class(cls, depth, text=source is None)
        return entry

    def _loose_class(self, cls: type, depth: int, *, text: bool) -> Json:
        """What a file does not tell of a class made in a function, a console or by ``exec``."""
        found: dict[str, Json] = {}
        source = _own_source(cls) if text else None
        if source is not None:
            found["text"] = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        else:
            found["constants"] = {
                name: self._describe(value, 0)
                for name, value in sorted(vars(cls).items())
                if isinstance(value, _PRIMITIVES) and not name.startswith("__")
            }
        found["functions"] = self._reachable(_functions_of(cls), depth, bytecode=source is None)
        return digest_of(found)

    def _foreign_methods(self, cls: type, depth: int) -> dict[str, Json]:
        """Methods from another file: put there at run time, or wrapped by a decorator."""
        foreign: dict[str, Json] = {}
        for name, method in sorted(vars(cls).items()):
            function = _plain(method)
            if function is None or isinstance(method, classmethod) or name.startswith(_NO_FORWARD):
                continue
            defined_in = function.__globals__.get("__name__")
            at_home = function.__module__ == cls.__module__ == defined_in
            if function.__code__.co_filename.startswith("<"):  # generated: dataclass, namedtuple
                continue
            if known_by_name(cls.__module__):
                at_home = known_by_name(str(defined_in))
            elif at_home and "<" not in function.__qualname__:
                at_home = function.__qualname__ == f"{cls.__qualname__}.{name}"
            if not at_home:
                foreign[name] = self.function(function, min(depth, 3))
        return foreign

    def function(self, function: types.FunctionType, depth: int) -> Json:
        """Identity of a Python function: name, source of its file, and what its name does not tell."""
        defined_in = str(function.__globals__.get("__name__"))
        source = None if known_by_name(defined_in) else self.file(defined_in)
        found: dict[str, Json] = {"function": qualified_name(function)}
        if defined_in != function.__module__ or function.__code__.co_name != function.__name__:
            # functools.wraps renames: say whose code really runs.
            found["runs"] = f"{_home(defined_in)}.{function.__code__.co_name}"
        if source is not None:
            found["source"] = source
        if source is None and not known_by_name(defined_in):
            found["code"] = digest_of(self._reachable([function], depth, bytecode=True))
        elif "<" in function.__qualname__ or function.__code__.co_name == "<lambda>":
            found["code"] = code_digest(function.__code__)
        captured = self._captured(function, depth)
        if captured:
            found["captured"] = captured
        return found

    def _captured(self, function: types.FunctionType, depth: int) -> list[Json]:
        """Values a function carries along: closure cells and defaults."""
        values: list[object] = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if name == "__class__":  # the cell behind super()
                continue
            try:
                values.append(cell.cell_contents)
            except ValueError:  # not filled yet
                values.append(None)
        values.extend(function.__defaults__ or ())
        values.extend(value for _, value in sorted((function.__kwdefaults__ or {}).items()))
        return [self._describe(value, depth - 1) for value in values]

    def _reachable(self, start: Iterable[types.FunctionType], depth: int, *, bytecode: bool) -> Json:
        """Code and constants that functions without a file reach by name in their own namespace.

        Without this an edited helper of a notebook would go unseen: no file's digest covers it.
        """
        queue = list(start)
        own = set(map(id, queue)) if not bytecode else set()
        seen: set[int] = set()
        found: dict[str, Json] = {}
        while queue:
            function = queue.pop(0)
            if id(function) in seen:
                continue
            seen.add(id(function))
            label = f"{qualified_name(function)}#{len(seen)}"
            body = [] if id(function) in own else [code_digest(function.__code__)]
            found[label] = [*body, *self._captured(function, depth)]
            for name in sorted(_names(function.__code__)):
                value = function.__globals__.get(name)
                if isinstance(value, _PRIMITIVES) and not name.startswith("__") and name in function.__globals__:
                    found[name] = self._describe(value, 0)
                elif isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                    queue.append(value)
                elif isinstance(value, type) and value.__module__ == function.__module__:
                    queue.extend(_functions_of(value))
        return found

    def file(self, module: str) -> str | None:
        """SHA-256 of a module's source file, line ends made one; None where there is none worth reading.

        ``__main__`` counts as none: a script's classes must not change their identity with the prompt next
        to them.
        """
        if module not in self._files:
            source = None if module in (_MAIN, "__mp_main__") else _read_source(module)
            self._files[module] = None if source is None else hashlib.sha256(source.replace(b"\r\n", b"\n")).hexdigest()
        return self._files[module]


_ROOTS = frozenset(
    {
        "builtins.object",
        "builtins.dict",
        "torch.nn.modules.module.Module",
        "typing.Generic",
        "typing.Protocol",
        "abc.ABC",
    }
)


def _real_class(cls: type) -> type:
    """The class that this package made ``cls`` from, to add methods of tuning; ``cls`` itself for all others."""
    base = cls.__dict__.get("_aitune_base_class")
    return _real_class(base) if isinstance(base, type) else cls


def _is_transparent(cls: type, leaf: type) -> bool:
    """Whether ``cls`` only adds properties and dunders to the class it derives from, under its name.

    Such a subclass is how an instance gets a patched ``device`` attribute; the module computes what it did
    before.
    """
    following = leaf.__mro__[leaf.__mro__.index(cls) + 1 :]
    if not following or qualified_name(following[0]) != qualified_name(cls):
        return False
    return all(isinstance(v, property) or (k.startswith("__") and k != "__call__") for k, v in vars(cls).items())


def _is_extension(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))


def _is_executed(cls: type) -> bool:
    """Whether a class's own methods were compiled from no file, although its module has one."""
    own = [f for f in _functions_of(cls) if f.__qualname__.startswith(f"{cls.__qualname__}.")]
    return bool(own) and all(f.__code__.co_filename.startswith("<") for f in own)


def _own_source(cls: type) -> str | None:
    try:
        return textwrap.dedent(inspect.getsource(cls)).replace("\r\n", "\n")
    except (OSError, TypeError):
        return None


def _read_source(module: str) -> bytes | None:
    loaded = sys.modules.get(module)
    if loaded is None:
        return None
    try:
        file = inspect.getsourcefile(loaded)
    except TypeError:
        return None
    if file is not None:
        try:
            return Path(file).read_bytes()
        except OSError:
            pass
    get_source = getattr(getattr(loaded, "__loader__", None), "get_source", None)  # a zip import
    if get_source is None:
        return None
    try:
        text = get_source(module)
    except (ImportError, OSError):
        return None
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else None


def _plain(method: object) -> types.FunctionType | None:
    if isinstance(method, (staticmethod, classmethod)):
        method = method.__func__
    return method if isinstance(method, types.FunctionType) else None


def _functions_of(cls: type) -> list[types.FunctionType]:
    found: list[types.FunctionType] = []
    for _, value in sorted(vars(cls).items()):
        accessors = (value.fget, value.fset) if isinstance(value, property) else (value,)
        found.extend(f for f in map(_plain, accessors) if f is not None)
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def code_digest(code: types.CodeType) -> str:
    """SHA-256 of what a code object does: no file, lines or local names."""
    parts: list[Json] = [
        code.co_code.hex(),
        code.co_argcount,
        code.co_kwonlyargcount,
        code.co_posonlyargcount,
    ]
    return digest_of([*parts, code.co_flags, list(code.co_names), [_const(c) for c in code.co_consts]])


def _const(const: object) -> Json:
    if isinstance(const, types.CodeType):
        return code_digest(const)
    if isinstance(const, frozenset):
        return [
            "frozenset",
            *sorted(map(digest_of, map(_const, const))),
        ]  # its own order follows PYTHONHASHSEED
    if isinstance(const, tuple):
        return ["tuple", *map(_const, const)]
    return [type(const).__name__, repr(const)]
