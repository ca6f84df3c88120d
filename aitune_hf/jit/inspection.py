"""JSON-ready snapshots of what was seen of a module."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ModuleInspectionReport"]


@dataclass(frozen=True, kw_only=True)
class ModuleInspectionReport:
    """What is known of one module.

    Attributes:
        fq_name: unique name in the call hierarchy.
        path: path in the object that was patched, ``""`` for its root.
        class_name: qualified name of the module's class.
        level: depth in the call hierarchy; 0 is the top, -1 is never called.
        parameters: number of parameters of the module and all below it.
        dtypes: of parameters and buffers.
        seconds: spent in its forward while recording.
        graphs: ``GraphSpec.to_dict()`` of each graph seen.
        reasons: graph name, or ``"module"`` → why it is not, or cannot be, tuned.
    """

    fq_name: str
    path: str
    class_name: str
    level: int
    state: str
    call_count: int
    parameters: int
    dtypes: list[str]
    seconds: float
    graphs: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)
