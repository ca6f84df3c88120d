"""What one module is, apart from its children, as JSON: class, attributes, helpers, tensors.

Every value becomes ``None``, a bool, an int, a str, or a dict with one tag (``{"float": "1e-05"}``), so two
different values never share a text. Devices, absolute paths, addresses and the names by which a model was
loaded become the same text everywhere.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import pathlib
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from aitune_hf.errors import UntunableError
from aitune_hf.graph.attribute_names import (
    CONFIG_COUNT,
    MODULE_INTERNALS,
    OFF_UNLESS_TRUE,
    SEATS,
    is_identity,
)
from aitune_hf.graph.code_identity import (
    CodeIdentity,
    Json,
    canonical,
    digest_of,
    is_torch,
    known_by_name,
    qualified_name,
)

__all__ = ["FactorReader", "tensor_factors"]

# How deep helper objects and containers are followed. A limit rather than a list of visited objects cuts
# cycles, so that what is found does not depend on where the walk came in.
MAX_DEPTH = 6
# Containers beyond the first size are kept once beside the tree, beyond the second by digest only
# (vocabularies).
_INTERN_ABOVE, _DIGEST_ABOVE = 12, 256
_TEXT_LIMIT = 256

_DEVICE = re.compile(r"^(cpu|cuda|mps|xpu|hpu|npu|xla|meta)(:\d+)?$")
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_ABSOLUTE = re.compile(r"^(/[^/\0\n]+){1,}/?$|^[A-Za-z]:[\\/]|^file://|^~/")
# torch types that hold settings; the others (handles, streams, meshes, generators) hold counters, ids and
# devices.
_TORCH_SETTINGS = ("torch.nn.", "torch.distributions.", "torch.ao.")


class FactorReader:
    """Describes values for the time of one hash; remembers helper objects, which modules often share."""

    def __init__(self) -> None:
        self.code = CodeIdentity(lambda value, depth: self._captured(value, depth))
        self.objects: dict[str, Json] = {}
        """Descriptions too big to repeat, by digest; a description refers to one as ``{"object":
        digest}``."""
        self._seen: dict[tuple[int, int, bool], tuple[object, Json, list[nn.Module]]] = {}
        self._references: list[nn.Module] = []

    def module(self, module: nn.Module, path: str) -> tuple[dict[str, Json], list[nn.Module]]:
        """Own factors of ``module``, and the modules its attributes refer to, in the order they are met.

        Raises:
            UntunableError: something the module computes from cannot be described; the message names
            ``path``.
        """
        self._references = []
        try:
            factors: dict[str, Json] = {
                "class": qualified_name(type(module)),
                "classes": self.code.classes(type(module), MAX_DEPTH),
                "training": module.training,
                "attributes": self._attributes(module, MAX_DEPTH, config=False),
                "tensors": self._tensors(module),
            }
        except UntunableError as error:
            raise UntunableError(f"module {path or '(root)'!r} ({type(module).__name__}): {error}") from error
        script = _script_of(module)
        if script is not None:
            factors["script"] = hashlib.sha256(script.encode()).hexdigest()
        return factors, self._references

    def _tensors(self, module: nn.Module) -> dict[str, Json]:
        found: dict[str, Json] = {}
        # The base class's methods: a subclass may override them with fewer arguments.
        for kind, tensors in (
            ("parameter", nn.Module.named_parameters(module, recurse=False, remove_duplicate=False)),
            ("buffer", nn.Module.named_buffers(module, recurse=False, remove_duplicate=False)),
        ):
            for name, tensor in tensors:
                found[name] = {"kind": kind, **tensor_factors(tensor, name), **self._subclass(tensor)}
        return found

    def _subclass(self, tensor: torch.Tensor) -> dict[str, Json]:
        """What a tensor subclass (a quantized weight) adds: its type, inner tensors and settings."""
        if type(tensor) in (torch.Tensor, nn.Parameter):
            return {}
        found: dict[str, Json] = {"type": qualified_name(type(tensor))}
        if not is_torch(type(tensor).__module__):
            found["classes"] = self.code.classes(type(tensor), MAX_DEPTH)
            found["attributes"] = self._attributes(tensor, 3, config=False)
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            names, context = flatten()
            found["inner"] = {n: tensor_factors(getattr(tensor, n), n) for n in sorted(names)}
            found["context"] = self.value(context, 3)
        return found

    def _attributes(self, owner: object, depth: int, *, config: bool) -> dict[str, Json]:
        is_module = isinstance(owner, nn.Module)
        found: dict[str, Json] = {}
        for name, value in sorted(_state(owner).items(), key=lambda item: str(item[0])):
            if is_identity(name, config=config):
                continue
            if is_module and (name in MODULE_INTERNALS or name in SEATS or _is_derived(owner, name)):
                continue
            if name in OFF_UNLESS_TRUE and not value:
                continue
            if value is None and not hasattr(type(owner), name):
                continue  # switched off again (FreeU) is the same as never switched on
            if config and name in CONFIG_COUNT and isinstance(value, Mapping):
                found[name] = {"count": len(value)}
                continue
            inside = config or name in ("config", "_internal_dict") or name.endswith("_config")
            found[name] = self.value(value, depth, config=inside)
        return found

    def value(self, value: object, depth: int = MAX_DEPTH, *, config: bool = False) -> Json:
        """JSON of one value.

        In a config the order of keys and list against tuple say nothing: both change on a save and load.
        """
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (enum.Enum, str, int, float, complex, bytes, os.PathLike)):
            return _scalar(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
            return _torch_scalar(value)
        if isinstance(value, torch.Tensor):
            return {"tensor": {**tensor_factors(value, "attribute"), **self._subclass(value)}}
        if isinstance(value, nn.Module):
            self._references.append(value)
            return {"module": qualified_name(type(value))}
        if isinstance(value, weakref.ref):
            return {"weak": self.value(value(), depth, config=config)}
        if depth <= 0:
            return {"cut": qualified_name(type(value))}
        if isinstance(value, (Mapping, set, frozenset, list, tuple, deque)):
            return self._container(value, depth, config=config)
        if isinstance(value, (range, slice, re.Pattern, types.ModuleType)) or type(value).__module__ == "numpy":
            return self._constant(value, depth)
        if isinstance(value, type) or callable(value):
            described = self._callable(value, depth)
            if described is not None:
                return described
        return self._object(value, depth, config=config)

    def _captured(self, value: object, depth: int) -> Json:
        """A value that code carries along. Containers and objects there are often caches: their type only."""
        simple = (
            bool,
            int,
            float,
            complex,
            str,
            bytes,
            type(None),
            enum.Enum,
            torch.dtype,
            torch.Tensor,
            nn.Module,
        )
        if isinstance(value, simple) or (callable(value) and depth > 0 and not isinstance(value, type)):
            return self.value(value, depth)
        if isinstance(value, tuple) and depth > 0:
            return {"tuple": [self._captured(v, depth - 1) for v in value]}
        return {"type": qualified_name(value if isinstance(value, type) else type(value))}

    def _container(self, value: Any, depth: int, *, config: bool) -> Json:
        kind = type(value)
        bag = isinstance(value, Mapping) and kind is not dict and not known_by_name(kind.__module__)
        config = config or bag  # diffusers' FrozenDict
        items: list[Json]
        if isinstance(value, Mapping):
            items = self._pairs(value, depth, config=config)
            # Outside configs a forward may loop over a dict, so its order counts.
            tag = "config" if config else "dict"
        elif isinstance(value, (set, frozenset)):
            items = sorted((self.value(v, depth - 1) for v in value), key=canonical)
            tag = "set"
        else:
            items = [self.value(v, depth - 1, config=config) for v in value]
            tag = "list" if config or isinstance(value, (list, deque)) else "tuple"
        described: dict[str, Json] = {tag: items}
        if kind not in (dict, list, tuple, set, frozenset, torch.Size) and not config:
            described["type"] = qualified_name(kind)
        if len(items) > _DIGEST_ABOVE:
            return {"digest": digest_of(described), "length": len(items)}
        return self._keep(described) if len(items) > _INTERN_ABOVE else described

    def _pairs(self, value: Mapping[Any, Any], depth: int, *, config: bool) -> list[Json]:
        pairs: list[Json] = []
        for key, item in value.items():
            if isinstance(key, str) and is_identity(key, config=config):
                continue
            # JSON, where configs come from, has only text for keys.
            name: Json = str(key) if config and isinstance(key, (int, float)) else self.value(key, depth - 1)
            if config and key in CONFIG_COUNT and isinstance(item, Mapping):
                pairs.append([name, {"count": len(item)}])
            else:
                pairs.append([name, self.value(item, depth - 1, config=config)])
        return sorted(pairs, key=canonical) if config and type(value) is not OrderedDict else pairs

    def _constant(self, value: Any, depth: int) -> Json:
        if isinstance(value, types.ModuleType):
            return {"python_module": value.__name__}
        if isinstance(value, re.Pattern):
            return {"pattern": [str(value.pattern), int(value.flags)]}
        if isinstance(value, (range, slice)):
            return {type(value).__name__: [self.value(v, depth - 1) for v in (value.start, value.stop, value.step)]}
        if not hasattr(value, "tobytes") or not hasattr(value, "dtype"):
            return self._object(value, depth, config=False)
        if value.dtype.hasobject:  # its bytes are addresses
            return {"numpy": self.value(value.tolist(), depth - 1)}
        # An array that is no buffer is a constant of the graph: its values are part of the computation.
        return {"numpy": [list(value.shape), value.dtype.str, hashlib.sha256(value.tobytes()).hexdigest()]}

    def _callable(self, value: Any, depth: int) -> Json | None:
        """A function, method, partial or class; None for an object that merely can be called."""
        if isinstance(value, type):
            return {"class": qualified_name(value), "classes": self.code.classes(value, depth - 1)}
        if isinstance(value, types.FunctionType):
            return {"callable": self.code.function(value, depth)}
        if isinstance(value, (types.MethodType, types.MethodWrapperType)):
            owner = getattr(value, "__self__", None)
            function = getattr(value, "__func__", None)
            named: Json = qualified_name(value) if function is None else self.value(function, depth - 1)
            return {"method": named, "of": self.value(owner, depth - 1)}
        if isinstance(value, (functools.partial, functools.partialmethod)):
            arguments = [
                self.value(v, depth - 1) for v in (value.func, value.args, dict(sorted(value.keywords.items())))
            ]
            return {"partial": arguments}
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            owner = getattr(value, "__self__", None)
            bound = {} if owner is None or isinstance(owner, types.ModuleType) else {"of": self.value(owner, depth - 1)}
            return {"builtin": qualified_name(value), **bound}
        wrapped = getattr(value, "__wrapped__", None)  # functools.cache
        return {"cached": self.value(wrapped, depth - 1)} if wrapped is not None and callable(wrapped) else None

    def _object(self, value: object, depth: int, *, config: bool) -> Json:
        config = config or type(value).__name__.endswith("Config")
        key = (id(value), depth, config)
        if key not in self._seen:
            outer, self._references = self._references, []
            described = self._keep(self._helper(value, depth, config=config))
            # The object is kept alive beside its id, which nothing else can take meanwhile.
            self._seen[key] = (value, described, self._references)
            self._references = outer
        _, described, references = self._seen[key]
        self._references.extend(references)
        return described

    def _helper(self, value: object, depth: int, *, config: bool) -> dict[str, Json]:
        kind = type(value)
        described: dict[str, Json] = {"type": qualified_name(kind)}
        told = kind.__module__.startswith(_TORCH_SETTINGS) or isinstance(value, types.SimpleNamespace)
        if known_by_name(kind.__module__) and not told:
            return described  # locks, loggers, handles, generators
        try:
            described["classes"] = self.code.classes(kind, depth - 1)
        except UntunableError:
            described["opaque"] = True  # an extension type that is no module: nothing a traced graph computes from
        described["attributes"] = self._attributes(value, depth - 1, config=config)
        return described

    def _keep(self, described: dict[str, Json]) -> Json:
        digest = digest_of(described)
        self.objects.setdefault(digest, described)
        return {"object": digest}


def tensor_factors(tensor: torch.Tensor, name: str) -> dict[str, Json]:
    """Shape, dtype and layout of a tensor; neither values nor device nor whether it wants a gradient.

    Raises:
        UntunableError: a lazy parameter has no shape yet.
    """
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise UntunableError(f"{name!r} is lazy and has no shape yet; run the module once before it is tuned")
    found: dict[str, Json] = {"shape": [int(n) for n in tensor.shape], "dtype": str(tensor.dtype)}
    if tensor.layout is not torch.strided:
        found["layout"] = str(tensor.layout)
    return found


def _script_of(module: nn.Module) -> str | None:
    """Code that lives in the instance, not in a class: a traced graph or a scripted module."""
    if isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
        try:
            return str(module.code)
        except (AttributeError, RuntimeError):  # a scripted container has no forward
            return ""
    return None


def _state(owner: object) -> dict[str, Any]:
    """Instance attributes, those in ``__slots__`` too."""
    found: dict[str, Any] = {}
    for cls in type(owner).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else cast("Iterable[str]", slots):
            if name in ("__dict__", "__weakref__"):
                continue
            attribute = (
                f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            )
            if hasattr(owner, attribute):
                found[attribute] = getattr(owner, attribute)
    found.update(getattr(owner, "__dict__", {}))
    if isinstance(owner, torch.fx.GraphModule):  # told by its code
        found = {
            k: v for k, v in found.items() if k not in ("_graph", "_code", "_lineno_map", "_prologue_start", "meta")
        }
    return found


def _is_derived(owner: object, name: str) -> bool:
    """Whether an attribute is the stored result of a ``functools.cached_property``."""
    return isinstance(getattr(type(owner), name, None), functools.cached_property)


def _scalar(value: Any) -> Json:
    if isinstance(value, enum.Enum):
        return {
            "enum": f"{qualified_name(type(value))}.{value.name}",
            "value": _ADDRESS.sub("at 0x", str(value.value)),
        }
    if isinstance(value, str):
        return _text(str.__str__(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": repr(complex(value))}
    if isinstance(value, bytes):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    return {"path": type(value).__name__ if not isinstance(value, pathlib.PurePath) else "Path"}


def _text(value: str) -> Json:
    if _DEVICE.match(value):
        return {"device": "any"}
    if _ABSOLUTE.match(value):
        return {"path": "Path"}
    value = _ADDRESS.sub("at 0x", value)
    if len(value) > _TEXT_LIMIT:
        return {
            "text": hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest(),
            "start": value[:80],
        }
    return value


def _torch_scalar(value: object) -> Json:
    if isinstance(value, torch.device):
        return {"device": "any"}
    return {"torch": str(value)}
