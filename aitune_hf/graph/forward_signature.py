"""A forward's signature: every spelling of a call brought to one form, and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aitune_hf.errors import UntunableError
from aitune_hf.graph.values import decode_value, encode_value, is_value, same_value

__all__ = ["ForwardSignature", "Parameter"]

_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter of a forward: its name, its kind (as in :class:`inspect.Parameter`) and its default, if any.

    Two parameters are equal when their JSON is, so ``x=1`` is not ``x=True``.
    """

    name: str
    kind: str
    has_default: bool = False
    default: Any = None

    def is_default(self, value: Any) -> bool:
        """True if ``value`` is this parameter's default, as far as that can be told for sure."""
        if not self.has_default or isinstance(value, torch.device):  # The index counts here, not in `same_value`.
            return self.has_default and bool(value == self.default)
        return value is self.default or same_value(value, self.default)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Parameter) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.name, self.kind, self.has_default))

    def to_dict(self) -> dict[str, Any]:
        """JSON form; a default that is not a plain value is kept as its type's name."""
        data: dict[str, Any] = {"name": self.name, "kind": self.kind}
        if self.has_default:
            if is_value(self.default):
                data["default"] = encode_value(self.default)
            elif isinstance(self.default, OpaqueDefault):
                data["default"] = {"t": "opaque", "v": self.default.type_name}
            else:
                data["default"] = {"t": "opaque", "v": type(self.default).__qualname__}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Parameter:
        """Inverse of :meth:`to_dict`; an opaque default comes back as :class:`OpaqueDefault`."""
        if "default" not in data:
            return cls(data["name"], data["kind"])
        encoded = data["default"]
        default = OpaqueDefault(encoded["v"]) if encoded["t"] == "opaque" else decode_value(encoded)
        return cls(data["name"], data["kind"], True, default)


@dataclass(frozen=True)
class OpaqueDefault:
    """Stands for a default value that is not plain, in a signature read from a file."""

    type_name: str


@dataclass(frozen=True)
class ForwardSignature:
    """The parameters of a forward, in order, without ``self``."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def from_callable(cls, forward: Callable[..., Any]) -> ForwardSignature:
        """Read the signature of a bound forward.

        Raises:
            UntunableError: if it has none.
        """
        try:
            signature = inspect.signature(forward)
        except (TypeError, ValueError) as error:
            raise UntunableError(f"{forward!r} has no signature that can be read") from error
        return cls(
            tuple(
                Parameter(p.name, p.kind.name, p.default is not _EMPTY, None if p.default is _EMPTY else p.default)
                for p in signature.parameters.values()
            )
        )

    @functools.cached_property
    def as_inspect(self) -> inspect.Signature:
        """The same as an :class:`inspect.Signature`."""
        return inspect.Signature(
            [
                inspect.Parameter(
                    p.name, getattr(inspect.Parameter, p.kind), default=p.default if p.has_default else _EMPTY
                )
                for p in self.parameters
            ]
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bring a call to its one form: parameter name → value, defaults applied, in signature order.

        ``*args`` becomes a tuple under its parameter's name, ``**kwargs`` a dict.

        Raises:
            TypeError: as Python would, if the call does not fit.
        """
        # A name of a positional-only parameter is free for **kwargs, which `inspect` of some Pythons does not know.
        free = self._free_names.intersection(kwargs)
        named = {name: value for name, value in kwargs.items() if name not in free} if free else kwargs
        bound = self.as_inspect.bind(*args, **named)
        bound.apply_defaults()
        if free:
            more = bound.arguments[self.parameters[-1].name]
            more = {name: value for name, value in kwargs.items() if name in free or name in more}
            bound.arguments[self.parameters[-1].name] = more
        return dict(bound.arguments)

    @functools.cached_property
    def _free_names(self) -> frozenset[str]:
        if not self.parameters or self.parameters[-1].kind != "VAR_KEYWORD":
            return frozenset()
        return frozenset(p.name for p in self.parameters if p.kind == "POSITIONAL_ONLY")

    def unbind(self, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inverse of :meth:`bind`, spelled as decorators of a forward expect it.

        Arguments go by name wherever they can, and those that have their default's value are left out: a decorator that
        fills in or looks for a keyword must find what it finds in the calls of users.
        """
        last = max((i for i, p in enumerate(self.parameters) if self._goes_by_position(p, bound)), default=-1)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for index, parameter in enumerate(self.parameters):
            name = parameter.name
            if name not in bound:
                continue
            value = bound[name]
            if parameter.kind == "VAR_POSITIONAL":
                args.extend(value)
            elif parameter.kind == "VAR_KEYWORD":
                kwargs.update(value)
            elif index <= last and parameter.kind != "KEYWORD_ONLY":
                args.append(value)
            elif not parameter.is_default(value):
                kwargs[name] = value
        return tuple(args), kwargs

    @staticmethod
    def _goes_by_position(parameter: Parameter, bound: Mapping[str, Any]) -> bool:
        """True for what has no name in a call: all before it must then go by position too."""
        if parameter.name not in bound:
            return False
        value = bound[parameter.name]
        if parameter.kind == "VAR_POSITIONAL":
            return bool(value)
        return parameter.kind == "POSITIONAL_ONLY" and not parameter.is_default(value)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"parameters": [parameter.to_dict() for parameter in self.parameters]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ForwardSignature:
        """Inverse of :meth:`to_dict`."""
        return cls(tuple(Parameter.from_dict(item) for item in data["parameters"]))
