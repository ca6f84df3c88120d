"""A module tree left as it was found, whatever a trace did to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import nn

from aitune_hf.backends.constants import MODULE_TABLES

__all__ = ["module_restored"]

#: How far into lists, dicts and helper objects changes are looked for, and how many objects are looked at.
_MAX_DEPTH = 4
_MAX_OBJECTS = 50_000


@contextlib.contextmanager
def module_restored(module: nn.Module) -> Iterator[list[str]]:
    """Put every attribute of a module tree back afterwards, and what its lists, dicts and helper objects held.

    Yields:
        A list that is filled at the end with the places that had got hold of a tracing tensor.
    """
    before = [(path, container, _copy(container)) for path, container in _containers(module)]
    assigned: list[str] = []
    try:
        yield assigned
    finally:
        for path, container, copy in before:
            assigned += _differences(path, container, copy)
            _put_back(container, copy)


def _containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The dicts and lists that hold the state of a module tree, each once."""
    todo: list[tuple[str, Any, int]] = []
    for name, part in module.named_modules():
        yield name, part.__dict__
        yield from ((name, part.__dict__[table]) for table in MODULE_TABLES)
        todo += [(_at(name, key), value, 1) for key, value in vars(part).items() if key not in MODULE_TABLES]
    seen: set[int] = set()
    while todo and len(seen) < _MAX_OBJECTS:
        path, value, depth = todo.pop()
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, (MutableMapping, list)):
            inner: Any = value
        elif isinstance(value, (nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
            continue
        else:
            inner = vars(value)
        yield path, inner
        items = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
        todo += [(_at(path, key), child, depth + 1) for key, child in items]


def _at(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, Mapping) else list(container)


def _differences(path: str, container: Any, copy: Any) -> list[str]:
    if isinstance(container, Mapping):
        changed = [(key, value) for key, value in container.items() if key not in copy or copy[key] is not value]
        return [_at(path, key) for key, value in changed if _holds_fake(value)]
    return [path] if _holds_fake(container) else []


def _put_back(container: Any, copy: Any) -> None:
    if isinstance(container, list):
        if len(container) != len(copy) or any(a is not b for a, b in zip(container, copy, strict=True)):
            container[:] = copy
    elif container.keys() != copy.keys() or any(container[key] is not copy[key] for key in copy):
        container.clear()
        container.update(copy)


def _holds_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, (list, tuple)):
        return any(map(_holds_fake, value))
    if isinstance(value, Mapping):
        return any(map(_holds_fake, value.values()))
    return isinstance(value, FakeTensor)
