"""Classes made on the fly: the real class plus the methods of tuning, under the real class's name."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["BASE_ATTRIBUTE", "tuned_class"]

#: Names the real class in classes that this package makes; structural hashes look through them.
BASE_ATTRIBUTE = "_aitune_base_class"


def tuned_class(mixin: Any, base: Any) -> Any:
    """``base`` with ``mixin`` before it, under the name, qualified name and module of ``base``.

    Configs that write their class's name, ``isinstance`` and signatures are those of ``base``; copies and pickles are
    plain objects of ``base``. The same two classes give the same class.
    """
    return base if BASE_ATTRIBUTE in base.__dict__ else _make(mixin, base)


@functools.cache
def _make(mixin: Any, base: Any) -> Any:
    plain_reduce: Any = base.__reduce_ex__

    def reduce_to_base(self: Any, protocol: Any) -> Any:
        _, (_, *arguments), *rest = plain_reduce(self, protocol)
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if not key.startswith("_aitune_")}
        # Not copyreg's own function: pickle insists that it makes an object of the very class it is given.
        return (object.__new__, (base, *arguments), *rest)

    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce_to_base,
        BASE_ATTRIBUTE: base,
    }
    if hasattr(mixin, "_call_tuned"):

        @functools.wraps(base.__call__)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call_tuned(base.__call__, args, kwargs)

        namespace["__call__"] = call
    return type(base.__name__, (mixin, base), namespace)
