"""Nested calls and outputs taken apart into leaves, and put together again.

Containers that are understood: ``tuple``, ``list``, ``dict`` (any mapping type with string or integer keys), named
tuples, and output classes in the way of ``transformers`` and ``diffusers`` (a dataclass that is also a mapping).
Everything else is a leaf: a tensor, a plain value (:mod:`.values`), or an opaque object.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aitune_hf.errors import UntunableError
from aitune_hf.graph.locator import Locator
from aitune_hf.graph.values import EnumName, decode_value, encode_enum_name, encode_value, is_value

__all__ = ["Node", "describe", "flatten", "unflattener"]

_CONTAINERS = ("tuple", "list", "dict", "namedtuple", "output")


@dataclass(frozen=True)
class Node:
    """The shape of a nested structure, without its tensors.

    ``kind`` is ``"tensor"``, ``"value"``, ``"opaque"`` or a container; ``type_name`` is ``module:qualname`` of classes
    other than the builtin ones; ``keys`` name the children of mapping-like containers; ``value`` is the plain value.
    """

    kind: str
    type_name: str | None = None
    keys: tuple[str | int, ...] = ()
    children: tuple[Node, ...] = ()
    value: Any = None
    cls: type | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def steps(self) -> tuple[str | int, ...]:
        """The locator step of each child."""
        return self.keys or tuple(range(len(self.children)))

    def leaves(self, at: Locator | None = None) -> Iterator[tuple[Locator, Node]]:
        """Every leaf with its locator, depth first, in the order in which :func:`flatten` lists them."""
        at = at or Locator()
        if self.kind not in _CONTAINERS:
            yield at, self
            return
        for step, child in zip(self.steps, self.children, strict=True):
            yield from child.leaves(at.child(step))

    def to_json(self) -> dict[str, Any]:
        """JSON form; classes by name only."""
        data: dict[str, Any] = {"kind": self.kind}
        if self.type_name is not None:
            data["type"] = self.type_name
        if self.keys:
            data["keys"] = list(self.keys)
        if self.children:
            data["children"] = [child.to_json() for child in self.children]
        if self.kind == "value":
            value = self.value
            data["value"] = encode_enum_name(value) if isinstance(value, EnumName) else encode_value(value)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Node:
        """Inverse of :meth:`to_json`. Never imports the classes it names."""
        return cls(
            kind=data["kind"],
            type_name=data.get("type"),
            keys=tuple(data.get("keys", ())),
            children=tuple(cls.from_json(child) for child in data.get("children", ())),
            value=decode_value(data["value"]) if "value" in data else None,
        )


def describe(value: Any) -> Node:
    """The :class:`Node` of ``value``; mapping keys sorted where their order carries no meaning."""
    return flatten(value)[0]


def flatten(value: Any) -> tuple[Node, list[Any]]:
    """Take ``value`` apart.

    Returns:
        Its :class:`Node` and its *tensor* leaves, in the order of ``Node.leaves()``.
    """
    tensors: list[Any] = []
    return _flatten(value, tensors), tensors


def _flatten(value: Any, tensors: list[Any]) -> Node:
    cls = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Node("tensor")
    if is_value(value):
        return Node("value", value=value)
    if cls is tuple or cls is list:
        return Node(cls.__name__, children=tuple(_flatten(child, tensors) for child in value))
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        children = tuple(_flatten(child, tensors) for child in value)
        return Node("namedtuple", _name(cls), tuple(cls._fields), children, cls=cls)
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        is_output = dataclasses.is_dataclass(cls)
        # The fields of an output have an order (it can be indexed); a dict's keys are sorted, so that permuted forms
        # of one call are one graph.
        keys = tuple(value) if is_output else tuple(sorted(value, key=lambda key: (type(key) is str, key)))
        children = tuple(_flatten(value[key], tensors) for key in keys)
        if is_output:
            return Node("output", _name(cls), keys, children, cls=cls)
        return Node("dict", None if cls is dict else _name(cls), keys, children, cls=cls)
    return Node("opaque", _name(cls))


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def unflattener(node: Node) -> Callable[[Sequence[Any]], Any]:
    """Return a function that puts tensors, in the order of :func:`flatten`, back into the structure of ``node``.

    Classes named in a node that came from a file are taken from the modules already imported, never imported for it.

    Raises:
        UntunableError: if a class is not to be had or an opaque leaf cannot be rebuilt.
    """
    if node.kind == "tensor":
        return lambda tensors: tensors[0]
    return _builder(node, 0)[0]


def _builder(node: Node, start: int) -> tuple[Callable[[Sequence[Any]], Any], int]:
    """A builder that reads tensors from index ``start``, and the index after the last one it reads."""
    if node.kind == "tensor":
        return (lambda tensors: tensors[start]), start + 1
    if node.kind == "value":
        value = node.value
        return (lambda tensors: value), start
    if node.kind == "opaque":
        raise UntunableError(f"a {node.type_name} cannot be rebuilt from tensors")
    builders: list[Callable[[Sequence[Any]], Any]] = []
    position = start
    for child in node.children:
        build, position = _builder(child, position)
        builders.append(build)
    return _assemble(node, builders), position


def _assemble(node: Node, builders: list[Callable[[Sequence[Any]], Any]]) -> Callable[[Sequence[Any]], Any]:
    keys = node.keys
    if node.kind == "tuple":
        return lambda tensors: tuple([build(tensors) for build in builders])
    if node.kind == "list":
        return lambda tensors: [build(tensors) for build in builders]
    cls: Any = dict if node.kind == "dict" and node.type_name is None else _class_of(node)
    if node.kind == "namedtuple":
        return lambda tensors: cls(*[build(tensors) for build in builders])
    if node.kind == "output":
        pairs = list(zip((str(key) for key in keys), builders, strict=True))
        return lambda tensors: cls(**{key: build(tensors) for key, build in pairs})
    items = list(zip(keys, builders, strict=True))
    if cls is dict:
        return lambda tensors: {key: build(tensors) for key, build in items}
    return lambda tensors: cls({key: build(tensors) for key, build in items})


def _class_of(node: Node) -> type:
    if node.cls is not None:
        return node.cls
    module_name, _, qualname = (node.type_name or "").partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    wanted = tuple if node.kind == "namedtuple" else Mapping
    if not (isinstance(found, type) and issubclass(found, wanted)):
        raise UntunableError(f"the output class {node.type_name} is not imported in this process")
    return found
