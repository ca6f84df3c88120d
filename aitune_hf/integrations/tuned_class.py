"""The real pipeline or model class with the methods of tuning."""

from __future__ import annotations

import functools
from typing import Any

from aitune_hf.jit.disguise import BASE_ATTRIBUTE, disguised

__all__ = ["tuned_class"]


def tuned_class(mixin: Any, base: Any) -> Any:
    """``base`` with ``mixin`` before it, passing for ``base``. The same two classes give the same class."""
    return base if BASE_ATTRIBUTE in base.__dict__ else _make(mixin, base)


@functools.cache
def _make(mixin: Any, base: Any) -> Any:
    if not hasattr(mixin, "_call_tuned"):
        return disguised(base, {}, (mixin,))

    @functools.wraps(base.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call_tuned(base.__call__, args, kwargs)

    namespace: dict[str, Any] = {"__call__": call}
    if hasattr(base, "to"):

        @functools.wraps(base.to)
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._move_tuned(base.to, args, kwargs)

        namespace["to"] = to
    return disguised(base, namespace, (mixin,))
