"""Nested calls and outputs taken apart into leaves, and put together again.

Containers that are understood: ``tuple``, ``list``, ``dict`` and its subclasses without state of their own, named
tuples, and output classes in the way of ``transformers`` and ``diffusers`` (a dataclass that is also a mapping).
Everything else is a leaf: a tensor, a plain value (:mod:`.values`), or an opaque object.

A container is taken apart only if the parts make an equal one: an object that carries more than its children (an
attribute set by hand, a tokenizer's encodings) is opaque.
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
from aitune_hf.graph.values import EnumName, decode_value, encode_value, is_value, same_value

__all__ = ["Node", "describe", "flatten", "unflattener"]

_CONTAINERS = ("tuple", "list", "dict", "namedtuple", "output")
_KEY_TYPES = frozenset({str, int})


@dataclass(frozen=True, eq=False)
class Node:
    """The shape of a nested structure, without its tensors.

    ``kind`` is ``"tensor"``, ``"value"``, ``"opaque"`` or a container; ``type_name`` is ``module:qualname`` of classes
    other than the builtin ones; ``keys`` name the children of mapping-like containers; ``value`` is the plain value.

    Two nodes are equal when their JSON is: plain values count with their type (``1`` is not ``True``), ``nan`` equals
    itself.
    """

    kind: str
    type_name: str | None = None
    keys: tuple[str | int, ...] = ()
    children: tuple[Node, ...] = ()
    value: Any = None
    cls: type | None = dataclasses.field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        mine, theirs = (self.kind, self.type_name, self.keys), (other.kind, other.type_name, other.keys)
        if mine != theirs or (self.kind == "value" and not same_value(self.value, other.value)):
            return False
        return self.children == other.children

    def __hash__(self) -> int:
        return hash((self.kind, self.type_name, self.keys, self.children))

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
            data["value"] = encode_value(self.value)
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
    """The :class:`Node` of ``value``."""
    return flatten(value)[0]


def flatten(value: Any) -> tuple[Node, list[Any]]:
    """Take ``value`` apart.

    The keys of a mapping keep their order. It can be seen by whoever walks over the mapping: ``torch.cat(list(
    features.values()))`` in a forward, ``next(iter(output.values()))`` in its caller.

    Returns:
        Its :class:`Node` and its *tensor* leaves, in the order of ``Node.leaves()``.
    """
    tensors: list[Any] = []
    try:
        return _flatten(value, tensors), tensors
    except RecursionError:  # It contains itself.
        return Node("opaque", _name(type(value))), []


def _flatten(value: Any, tensors: list[Any]) -> Node:
    cls = type(value)
    if isinstance(value, torch.Tensor):
        problem = _unusual(value, cls)
        if problem:
            return Node("opaque", problem)
        tensors.append(value)
        return Node("tensor")
    if is_value(value):
        return Node("value", value=value)
    if cls is tuple or cls is list:
        return Node(cls.__name__, children=tuple(_flatten(child, tensors) for child in value))
    kind = container_kind(value, cls)
    if kind is None:
        return Node("opaque", _name(cls))
    if kind == "namedtuple":
        fields: tuple[str, ...] = cls._fields
        return Node(kind, _name(cls), fields, tuple(_flatten(child, tensors) for child in value), cls=cls)
    keys = tuple(value)
    children = tuple(_flatten(value[key], tensors) for key in keys)
    return Node(kind, None if cls is dict else _name(cls), keys, children, cls=cls)


def _unusual(tensor: torch.Tensor, cls: type) -> str | None:
    """What kind of tensor it is, if it is more than a block of numbers: shape, dtype and device do not say all of it.

    Stand-ins of tensors while torch traces (fake and functional ones) are not unusual.
    """
    if cls is not torch.Tensor and cls is not torch.nn.Parameter and not cls.__module__.startswith("torch._subclasses"):
        return _name(cls)
    if tensor.layout is not torch.strided:
        return f"{_name(cls)}:{str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_nested or tensor.is_quantized:
        return f"{_name(cls)}:{'nested' if tensor.is_nested else 'quantized'}"
    return None


def container_kind(value: Any, cls: type) -> str | None:
    """``"dict"``, ``"namedtuple"`` or ``"output"`` if ``value`` is one and is made of its children alone, else None."""
    if cls is dict:
        return "dict" if _KEY_TYPES.issuperset(map(type, value)) else None
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return "namedtuple" if _makes_twin(value, lambda: cls(*value)) else None
    if not issubclass(cls, Mapping) or not _KEY_TYPES.issuperset(map(type, value)):
        return None
    if dataclasses.is_dataclass(cls):
        return "output" if _makes_twin(value, lambda: cls(**{str(key): value[key] for key in value})) else None
    if issubclass(cls, dict):
        return "dict" if _makes_twin(value, lambda: cls({key: value[key] for key in value})) else None
    return None


def _makes_twin(value: Any, make: Callable[[], Any]) -> bool:
    """True if ``make`` gives an object of the same type, children, order and attributes as ``value``."""
    try:
        twin = make()
    except Exception:  # noqa: BLE001 - a constructor of the user's; it may refuse in any way.
        return False
    if type(twin) is not type(value):
        return False
    mine, theirs = _contents(value), _contents(twin)
    return list(mine) == list(theirs) and all(mine[at] is theirs[at] for at in mine)


def _contents(value: Any) -> dict[Any, Any]:
    """All that ``value`` holds: its children in order, and its attributes by name."""
    children = [(key, value[key]) for key in value] if isinstance(value, Mapping) else enumerate(value)
    attributes = getattr(value, "__dict__", {})
    return {("child", at): child for at, child in children} | {("attribute", at): attributes[at] for at in attributes}


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
        value = _live_value(node.value)
        return (lambda tensors: value), start
    if node.kind not in _CONTAINERS:
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


def _live_value(value: Any) -> Any:
    """The value itself; an enum's name read from a file becomes the member, as forwards compare members by ``is``."""
    if isinstance(value, slice):
        return slice(_live_value(value.start), _live_value(value.stop), _live_value(value.step))
    if not isinstance(value, EnumName):
        return value
    for member in getattr(_imported(value.cls), "__members__", {}).values():
        if value == member:
            return member
    raise UntunableError(f"{value.cls}.{value.member} is not an enum member of this process")


def _class_of(node: Node) -> type:
    if node.cls is not None:
        return node.cls
    found = _imported(node.type_name or "")
    if isinstance(found, type) and _fits(node, found):
        return found
    raise UntunableError(f"the class {node.type_name} is not imported in this process, or is not the one recorded")


def _fits(node: Node, cls: type) -> bool:
    if node.kind == "namedtuple":
        return issubclass(cls, tuple) and getattr(cls, "_fields", None) == node.keys
    if node.kind == "output":
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        return issubclass(cls, Mapping) and {field.name for field in fields if field.init}.issuperset(node.keys)
    return issubclass(cls, dict)


def _imported(type_name: str) -> Any:
    """What ``module:qualname`` names, if its module is imported.

    Looks into ``__dict__``: ``getattr`` on a lazy module, such as ``transformers``, would import what it is asked for.
    """
    module_name, _, qualname = type_name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found
