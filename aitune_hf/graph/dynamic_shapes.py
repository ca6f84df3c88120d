"""What a user says about the sizes an input may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aitune_hf.errors import ConfigError
from aitune_hf.graph.locator import Locator

__all__ = ["BatchDim", "DynamicDim", "DynamicShapes", "ShapeDefinition"]


@dataclass(frozen=True)
class DynamicDim:
    """An axis whose size may vary: ``min <= size <= max`` elements, a multiple of ``multiple_of``.

    Axes of one call that carry the same ``name`` always have the same size. ``opt`` is the size to optimise for
    (``max`` if not given).

    Raises:
        ConfigError: if the bounds contradict each other.
    """

    name: str
    min: int
    max: int
    opt: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        opt = self.max if self.opt is None else self.opt
        sizes = (self.min, opt, self.max)
        if any(type(size) is not int for size in (*sizes, self.multiple_of)):
            raise ConfigError(f"dynamic dimension {self.name!r}: sizes are integers, got {sizes}")
        if not (self.name and 1 <= self.min <= opt <= self.max and self.multiple_of >= 1):
            raise ConfigError(f"dynamic dimension {self.name!r}: need 1 <= min <= opt <= max, got {sizes}")
        if any(size % self.multiple_of for size in sizes):
            raise ConfigError(f"dynamic dimension {self.name!r}: {sizes} are not all multiples of {self.multiple_of}")

    @property
    def optimum(self) -> int:
        """The size to optimise for."""
        return self.max if self.opt is None else self.opt

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "kind": "batch" if isinstance(self, BatchDim) else "dim",
            "name": self.name,
            "min": self.min,
            "max": self.max,
            "opt": self.opt,
            "multiple_of": self.multiple_of,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> DynamicDim:
        """Inverse of :meth:`to_dict`."""
        cls = BatchDim if data["kind"] == "batch" else DynamicDim
        return cls(**{key: value for key, value in data.items() if key != "kind"})


@dataclass(frozen=True)
class BatchDim(DynamicDim):
    """The batch axis; ``multiple_of`` is the number of rows a batch item takes (2 under guidance)."""

    name: str = "batch"
    min: int = 1
    max: int = 1


#: Axis → how it may vary. Negative axes count from the end.
ShapeDefinition = dict[int, DynamicDim]


class DynamicShapes(dict[str, ShapeDefinition]):
    """Input (as ``str(Locator)``, so a parameter's name for plain arguments) → :data:`ShapeDefinition`.

    Example: ``DynamicShapes(sample={0: BatchDim(min=1, max=8), 2: DynamicDim("height", min=8, max=64)})``.
    """

    def definition(self, locator: Locator) -> ShapeDefinition | None:
        """The definition for the input at ``locator``, if there is one."""
        return self.get(str(locator))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {name: {str(axis): dim.to_dict() for axis, dim in axes.items()} for name, axes in sorted(self.items())}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DynamicShapes:
        """Inverse of :meth:`to_dict`."""
        return cls(
            {name: {int(axis): DynamicDim.from_dict(dim) for axis, dim in axes.items()} for name, axes in data.items()}
        )
