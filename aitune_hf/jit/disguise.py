"""Subclasses that pass for the class they are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BASE_ATTRIBUTE", "disguised"]

#: Names the real class in classes that this package makes; structural hashes look through them.
BASE_ATTRIBUTE = "_aitune_base_class"


def disguised(base: Any, namespace: Mapping[str, Any], mixins: tuple[type, ...] = ()) -> Any:
    """A subclass of ``base`` with more attributes, under its name, qualified name, module and docstring.

    Configs that write their class's name and ``isinstance`` see ``base``; copies and pickles of instances are plain
    objects of ``base``, without instance attributes of this package.
    """
    plain_reduce: Any = base.__reduce_ex__

    def reduce_to_base(self: Any, protocol: Any) -> Any:
        _, (_, *arguments), *rest = plain_reduce(self, protocol)
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if not key.startswith("_aitune_")}
        # Not copyreg's own function: pickle insists that it makes an object of the very class it is given.
        return (object.__new__, (base, *arguments), *rest)

    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce_to_base,
        BASE_ATTRIBUTE: base,
        **namespace,
    }
    return type(base.__name__, (*mixins, base), body)
