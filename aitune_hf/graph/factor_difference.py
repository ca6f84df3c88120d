"""Says in words what differs between the factors of two modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aitune_hf.graph.code_identity import Json

__all__ = ["children_difference", "difference"]

Objects = Mapping[str, Json]

_SECTIONS = (
    "class",
    "classes",
    "script",
    "training",
    "tensors",
    "attributes",
    "tied",
    "aliases",
    "references",
    "links",
)
_WORDS = {
    "class": "class",
    "script": "code of the instance",
    "training": "train/eval: training",
    "tied": "tied parameters",
    "aliases": "modules with several names",
    "references": "modules that attributes point at",
    "links": "places that attributes point at",
}
_WIDTH = 120


def difference(a: Mapping[str, Json], b: Mapping[str, Json], objects_a: Objects, objects_b: Objects) -> str | None:
    """The first difference between two modules' own factors, as the end of a sentence, or None."""
    for section in (*_SECTIONS, *sorted(set(a) | set(b))):
        x, y = a.get(section), b.get(section)
        if x == y:
            continue
        if section == "classes" and isinstance(x, list) and isinstance(y, list):
            return _classes(x, y)
        if section in ("tensors", "attributes") and isinstance(x, dict) and isinstance(y, dict):
            return _named(x, y, objects_a, objects_b, "attribute" if section == "attributes" else "tensor")
        return _sides(_WORDS.get(section, section), x, y, objects_a, objects_b)
    return None


def children_difference(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> str | None:
    """What differs between two lists of children, each a name and a class, or None."""
    names_a, names_b = [name for name, _ in a], [name for name, _ in b]
    for name, kind in b:
        if name not in names_a:
            return f"child {name!r} ({_short(kind)}) is only in the second"
    for name, kind in a:
        if name not in names_b:
            return f"child {name!r} ({_short(kind)}) is only in the first"
    return None if names_a == names_b else f"children are in another order: {_cut(names_a)} and {_cut(names_b)}"


def _classes(a: list[Json], b: list[Json]) -> str:
    for x, y in zip(a, b, strict=False):
        if x == y or not isinstance(x, dict) or not isinstance(y, dict):
            continue
        if x.get("name") != y.get("name"):
            return f"a base class is {x.get('name')} in the first and {y.get('name')} in the second"
        if x.get("source") != y.get("source"):
            return f"the source file of class {x.get('name')} differs"
        if x.get("methods") != y.get("methods"):
            mine, other = _dict(x.get("methods")), _dict(y.get("methods"))
            names = ", ".join(sorted(n for n in {*mine, *other} if mine.get(n) != other.get(n)))
            return f"class {x.get('name')} has other code for {names} (patched or decorated elsewhere)"
        return f"the code of class {x.get('name')} differs"
    return f"there are {len(a)} classes it derives from in the first and {len(b)} in the second"


def _named(a: Mapping[str, Json], b: Mapping[str, Json], objects_a: Objects, objects_b: Objects, label: str) -> str:
    name = next(n for n in sorted({*a, *b}) if n not in a or n not in b or a[n] != b[n])
    what = f"{label}.{name}" if "'" in label else f"{label} '{name}"
    if name in a and name in b:
        return _values(what, a[name], b[name], objects_a, objects_b)
    side, value, objects = ("first", a[name], objects_a) if name in a else ("second", b[name], objects_b)
    return f"{what}' is only in the {side} ({_show(value, objects)})"


def _values(what: str, a: Json, b: Json, objects_a: Objects, objects_b: Objects) -> str:
    """Descends into helper objects and configs as far as they are alike."""
    x, y = _open(a, objects_a), _open(b, objects_b)
    if isinstance(x, dict) and isinstance(y, dict) and "type" in x and x.get("type") == y.get("type"):
        if x.get("classes") != y.get("classes") and isinstance(x.get("classes"), list):
            return f"{what}': {_classes(_list(x['classes']), _list(y.get('classes')))}"
        mine, other = x.get("attributes"), y.get("attributes")
        if isinstance(mine, dict) and isinstance(other, dict) and mine != other:
            return _named(mine, other, objects_a, objects_b, what)
    if isinstance(x, dict) and isinstance(y, dict):
        for tag in ("config", "dict"):
            mine, other = _table(x.get(tag)), _table(y.get(tag))
            if mine is not None and other is not None and mine != other:
                return _named(mine, other, objects_a, objects_b, what)
    return _sides(f"{what}'", a, b, objects_a, objects_b)


def _sides(what: str, a: Json, b: Json, objects_a: Objects, objects_b: Objects) -> str:
    shown_a, shown_b = _show(a, objects_a), _show(b, objects_b)
    return (
        f"{what} differs ({shown_a})"
        if shown_a == shown_b
        else f"{what} is {shown_a} in the first and {shown_b} in the second"
    )


def _dict(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _table(value: Json) -> dict[str, Json] | None:
    """The pairs of a described mapping, when its keys are all text."""
    pairs = [pair for pair in _list(value) if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)]
    return {str(key): item for key, item in pairs} if pairs and len(pairs) == len(_list(value)) else None


def _open(value: Json, objects: Objects) -> Json:
    digest = value.get("object") if isinstance(value, dict) else None
    return objects.get(digest, value) if isinstance(digest, str) else value


def _show(value: Json, objects: Objects) -> str:
    """A described value, as near to Python as it is short."""
    value = _open(value, objects)
    if isinstance(value, list):
        return _cut([_show(item, objects) for item in value])
    if not isinstance(value, dict):
        return repr(value)
    if "shape" in value:
        shape = ", ".join(map(str, _list(value["shape"])))
        kind = _short(value.get("type", ""))
        return f"{value.get('kind', 'tensor')} ({shape}) {value.get('dtype')} {kind}".strip()
    if "type" in value and "attributes" in value:
        return _short(value["type"])
    for tag in ("float", "torch", "enum", "module", "class", "complex"):
        if tag in value:
            return str(value[tag])
    for tag in ("callable", "tensor"):
        if isinstance(value.get(tag), dict):
            return _show(value[tag], objects)
    for tag in ("function", "list", "tuple", "set"):
        if tag in value:
            inner = value[tag]
            return _cut([_show(item, objects) for item in inner]) if isinstance(inner, list) else str(inner)
    return _cut(value)


def _short(name: object) -> str:
    return str(name).rpartition(".")[2]


def _cut(value: object) -> str:
    text = "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
