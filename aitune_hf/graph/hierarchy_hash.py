"""The hierarchy hash: one SHA-256 for what a module computes, whatever its weights, place and name.

A Merkle tree over the modules: the digest of a module covers its own factors and the digests of its
children. Nothing about a module's parent or its place there enters its own digest, so
``hierarchy_factors(m).at(path).digest`` is ``hierarchy_hash(m.get_submodule(path))`` and equal blocks have
equal digests. What ties two subtrees together (a shared parameter, a module with two names, an attribute
that points at a module elsewhere) is a factor of their lowest common ancestor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from aitune_hf.errors import CorruptEntryError, UntunableError
from aitune_hf.graph.code_identity import Json, digest_of, qualified_name
from aitune_hf.graph.factor_difference import children_difference, difference
from aitune_hf.graph.module_factors import FactorReader

__all__ = ["SCHEMA", "HierarchyFactors", "explain", "hierarchy_factors", "hierarchy_hash"]

SCHEMA = 1
"""Version of what goes into the hash. Raise it with any change that gives an unchanged module another
hash."""


@dataclass(frozen=True, kw_only=True)
class HierarchyFactors:
    """Everything that went into the hash of a module; two are equal when their digests are."""

    own: Mapping[str, Json] = field(compare=False, repr=False)
    """Factors of this module alone."""
    children: tuple[tuple[str, HierarchyFactors], ...] = field(compare=False, repr=False)
    """Name and factors of each child, in order; equal children are one object."""
    objects: Mapping[str, Json] = field(compare=False, repr=False)
    """Descriptions that ``own`` refers to by digest (helper objects, long containers); shared by the whole
    tree."""
    digest: str = field(init=False)
    """SHA-256 in hex: the hierarchy hash of this module."""

    def __post_init__(self) -> None:
        names: list[Json] = [[name, child.digest] for name, child in self.children]
        object.__setattr__(self, "digest", digest_of({"schema": SCHEMA, "own": dict(self.own), "children": names}))

    @property
    def class_name(self) -> str:
        """Qualified name of the module's class."""
        return str(self.own["class"])

    def at(self, path: str) -> HierarchyFactors:
        """Factors of the submodule at a dotted path, "" for this one; KeyError when there is none."""
        node = self
        for name in path.split(".") if path else ():
            node = dict(node.children)[name]
        return node

    def walk(self, prefix: str = "") -> Iterator[tuple[str, HierarchyFactors]]:
        """Dotted path and factors of this module and of each below it, parents first."""
        yield prefix, self
        for name, child in self.children:
            yield from child.walk(f"{prefix}.{name}" if prefix else name)

    def to_dict(self) -> dict[str, Json]:
        """A JSON-ready form in which equal subtrees and shared objects are written once."""
        nodes: dict[str, Json] = {}
        objects: dict[str, Json] = {}
        stack = [self]
        while stack:
            node = stack.pop()
            if node.digest not in nodes:
                children: list[Json] = [[name, child.digest] for name, child in node.children]
                nodes[node.digest] = {"own": dict(node.own), "children": children}
                _collect(dict(node.own), node.objects, objects)
                stack.extend(child for _, child in node.children)
        return {"schema": SCHEMA, "digest": self.digest, "nodes": nodes, "objects": objects}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HierarchyFactors:
        """The inverse of ``to_dict``; every digest is computed again.

        Raises:
            CorruptEntryError: ``data`` is of another schema, is incomplete, or its digests do not fit its
            contents.
        """
        if data.get("schema") != SCHEMA:
            raise CorruptEntryError(
                f"hierarchy factors of schema {data.get('schema')!r} cannot be read, this is {SCHEMA}"
            )
        try:
            objects, nodes = dict(data["objects"]), data["nodes"]
            if any(digest_of(described) != digest for digest, described in objects.items()):
                raise CorruptEntryError("hierarchy factors are damaged: an object's digest does not fit its contents")
            return _read_node(str(data["digest"]), nodes, objects, {})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptEntryError(f"hierarchy factors are incomplete: {error!r}") from error


def hierarchy_factors(module: nn.Module) -> HierarchyFactors:
    """Reads the factors of ``module`` and of all below it; changes nothing and reads no weight.

    Requires that no child is its own ancestor. Costs under a second for 2,000 modules; nothing is kept
    between calls.

    Raises:
        UntunableError: a class has no readable code, a parameter is lazy, or the tree has a cycle; says at
        which path.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"hierarchy_factors wants an nn.Module, got {type(module).__name__}")
    return _Walk(module, FactorReader(), follow=True).factors()


def hierarchy_hash(module: nn.Module) -> str:
    """The hierarchy hash of ``module``: 64 hex digits. See ``hierarchy_factors``."""
    return hierarchy_factors(module).digest


Comparable: TypeAlias = "nn.Module | Mapping[str, Any] | HierarchyFactors"


def explain(a: Comparable, b: Comparable) -> str | None:
    """The first factor in which two modules differ, as a sentence with its path; None when equal.

    Each may be a module, its factors, or their ``to_dict`` form. A module's own factors come before its
    children's, and what ties subtrees together comes last.
    """
    first, second, path = _factors_of(a), _factors_of(b), ""
    if first.digest == second.digest:
        return None
    while True:
        objects = (first.objects, second.objects)
        sentence = difference(_local(first), _local(second), *objects) or children_difference(
            [(name, child.class_name) for name, child in first.children],
            [(name, child.class_name) for name, child in second.children],
        )
        pairs = zip(first.children, second.children, strict=False)
        step = None if sentence else next(((n, x, y) for (n, x), (_, y) in pairs if x != y), None)
        if step is None:
            sentence = sentence or difference(first.own, second.own, *objects)
            return f"module {path or '(root)'} ({first.class_name.rpartition('.')[2]}): {sentence}"
        name, first, second = step
        path = f"{path}.{name}" if path else name


_CROSSING = ("references", "tied", "aliases", "links")


def _local(node: HierarchyFactors) -> dict[str, Json]:
    return {name: factor for name, factor in node.own.items() if name not in _CROSSING}


def _factors_of(target: Comparable) -> HierarchyFactors:
    if isinstance(target, HierarchyFactors):
        return target
    return hierarchy_factors(target) if isinstance(target, nn.Module) else HierarchyFactors.from_dict(target)


def _collect(described: Json, objects: Mapping[str, Json], found: dict[str, Json]) -> None:
    """Adds to ``found`` every object that ``described`` refers to, however deep."""
    if isinstance(described, list):
        for item in described:
            _collect(item, objects, found)
    elif isinstance(described, dict):
        digest = described.get("object")
        if isinstance(digest, str) and digest in objects and digest not in found:
            found[digest] = objects[digest]
            _collect(objects[digest], objects, found)
        for item in described.values():
            _collect(item, objects, found)


def _read_node(
    digest: str,
    nodes: Mapping[str, Any],
    objects: Mapping[str, Json],
    done: dict[str, HierarchyFactors | None],
) -> HierarchyFactors:
    if digest not in done:
        done[digest] = None  # in progress
        written = nodes[digest]
        children = tuple(
            (str(name), _read_node(str(child), nodes, objects, done)) for name, child in written["children"]
        )
        node = HierarchyFactors(own=dict(written["own"]), children=children, objects=objects)
        if node.digest != digest:
            raise CorruptEntryError("hierarchy factors are damaged: a module's digest does not fit its contents")
        done[digest] = node
    found = done[digest]
    if found is None:
        raise CorruptEntryError("hierarchy factors are damaged: a module is its own descendant")
    return found


@dataclass(frozen=True, kw_only=True)
class _Subtree:
    """One module's node, and what a parent needs to see ties that leave it."""

    node: HierarchyFactors
    places: Mapping[int, str]
    """Where in this subtree a thing lies that some other place refers to, too: id → first path; "" is the
    module itself."""
    pending: tuple[tuple[str, int], ...]
    """References that leave this subtree: path and position of the reference, and id of the module it points
    to."""


class _Walk:
    """One pass over a module tree.

    With ``follow=False`` a module outside the tree is told by its class only, which ends every cycle.
    """

    def __init__(self, root: nn.Module, reader: FactorReader, *, follow: bool) -> None:
        self._root, self._reader, self._follow = root, reader, follow
        self._children: dict[int, list[tuple[str, nn.Module]]] = {}
        self._paths: dict[int, str] = {}
        self._own: dict[int, dict[str, Json]] = {}
        self._references: dict[int, list[nn.Module]] = {}
        self._subtrees: dict[int, _Subtree] = {}
        self._interned: dict[str, HierarchyFactors] = {}
        self._outside: dict[int, tuple[frozenset[int], Json]] = {}
        self._modules: list[nn.Module] = []
        self._shared: frozenset[int] = frozenset()

    def factors(self) -> HierarchyFactors:
        self._list_modules()
        for module in self._modules:
            described = self._reader.module(module, self._paths[id(module)])
            self._own[id(module)], self._references[id(module)] = described
        self._shared = self._find_shared()
        return self._subtree(self._root).node

    def _list_modules(self) -> None:
        try:
            everything = list(nn.Module.named_modules(self._root, remove_duplicate=False))
        except RecursionError:
            raise UntunableError("a module is its own descendant, or the tree is too deep to walk") from None
        by_path = dict(everything)
        for path, module in everything:
            if id(module) not in self._paths:
                self._paths[id(module)] = path
                self._children[id(module)] = []
                self._modules.append(module)
            parent, _, name = path.rpartition(".")
            # A module with two names is expanded twice; its children belong to its first path.
            if path and self._paths[id(by_path[parent])] == parent:
                self._children[id(by_path[parent])].append((name, module))

    def _find_shared(self) -> frozenset[int]:
        """Ids of tensors and modules with more than one name, or pointed at by an attribute."""
        times = Counter(id(child) for children in self._children.values() for _, child in children)
        for module in self._modules:
            times.update(id(tensor) for _, tensor in _own_tensors(module))
        pointed = {id(target) for targets in self._references.values() for target in targets}
        return frozenset(pointed.union(key for key, count in times.items() if count > 1))

    def _subtree(self, module: nn.Module) -> _Subtree:
        if id(module) in self._subtrees:
            return self._subtrees[id(module)]
        below = [(name, child, self._subtree(child)) for name, child in self._children[id(module)]]
        own = dict(self._own[id(module)])
        places, ties = self._places(module, below)
        own.update(ties)
        references, pending = self._resolve(module, below, places)
        own.update(references)
        children = tuple((name, subtree.node) for name, _, subtree in below)
        node = HierarchyFactors(own=own, children=children, objects=self._reader.objects)
        node = self._interned.setdefault(node.digest, node)
        self._subtrees[id(module)] = _Subtree(node=node, places=places, pending=pending)
        return self._subtrees[id(module)]

    def _places(
        self, module: nn.Module, below: list[tuple[str, nn.Module, _Subtree]]
    ) -> tuple[dict[int, str], dict[str, Json]]:
        """Shared things by first path, and the groups of paths that meet here and not further down."""
        found: dict[int, list[str]] = {id(module): [""]} if id(module) in self._shared else {}
        for name, tensor in _own_tensors(module):
            if id(tensor) in self._shared:
                found.setdefault(id(tensor), []).append(name)
        modules: set[int] = set()
        for name, child, subtree in below:
            if id(child) in modules:
                found[id(child)].append(name)  # all below it was met under its first name
                continue
            modules.add(id(child))
            for key, place in subtree.places.items():
                found.setdefault(key, []).append(f"{name}.{place}" if place else name)
        ties: dict[str, Json] = {}
        for kind, wanted in (("aliases", True), ("tied", False)):
            groups = [
                cast("Json", paths) for key, paths in found.items() if len(paths) > 1 and (key in self._paths) is wanted
            ]
            if groups:
                ties[kind] = sorted(groups, key=str)
        return {key: paths[0] for key, paths in found.items()}, ties

    def _resolve(
        self, module: nn.Module, below: list[tuple[str, nn.Module, _Subtree]], places: Mapping[int, str]
    ) -> tuple[dict[str, Json], tuple[tuple[str, int], ...]]:
        """What this module's attributes point at; links that meet here; and those that leave this subtree."""
        references: list[Json] = []
        leaving: list[tuple[str, int]] = []
        for position, target in enumerate(self._references[id(module)]):
            if id(target) in places:
                references.append({"inside": places[id(target)]})
            else:
                references.append(self._outside_reference(module, target))
                leaving.append((f"#{position}", id(target)))
        links: list[Json] = []
        pending = list(leaving)
        for name, _, subtree in below:
            for place, key in subtree.pending:
                if key in places:
                    links.append([f"{name}.{place}", places[key]])
                else:
                    pending.append((f"{name}.{place}", key))
        own: dict[str, Json] = {"references": references} if references else {}
        if links:
            own["links"] = sorted(links, key=str)
        return own, tuple(pending)

    def _outside_reference(self, module: nn.Module, target: nn.Module) -> Json:
        """A module outside the subtree that an attribute points at: equal words wherever the walk began."""
        name = qualified_name(type(target))
        if not self._follow:
            return {"outside": name}
        if id(target) not in self._outside:
            inside = frozenset(map(id, target.modules()))
            digest = _Walk(target, self._reader, follow=False).factors().digest
            self._outside[id(target)] = (inside, {"outside": name, "digest": digest})
        inside, described = self._outside[id(target)]
        return {"ancestor": name} if id(module) in inside else described


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # The base class's methods: a subclass may override them with fewer arguments.
    yield from nn.Module.named_parameters(module, recurse=False, remove_duplicate=False)
    yield from nn.Module.named_buffers(module, recurse=False, remove_duplicate=False)
