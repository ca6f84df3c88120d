"""Several processes that tune the same target at once, such as the ranks of a launch.

They share the cache folder and nothing else: no message is sent and no collective is entered, so a rank that dies or
never comes leaves no other waiting. What makes each engine built once, and all agree, are the locks of the cache, which
end with their owner. Here is what lets ranks start with different work, and choose the same modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import nn

from aitune_hf.cache import LocalStore
from aitune_hf.errors import ConfigError

__all__ = ["Rank", "agreed", "local_module", "shared_out", "spread_over_processes"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which of several processes this one is: number ``index`` of ``count``."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"rank {self.index} of {self.count} processes: ranks are 0 to {self.count - 1}")


def shared_out(units: Sequence[T], rank: Rank, *, structure: Callable[[T], str], size: Callable[[T], int]) -> list[T]:
    """All ``units``, in the order in which this rank works on them; as given where it is alone.

    Units of equal structure need one engine, so they stay together. Structures are dealt out in turn, the largest
    first; each rank begins with its own and goes on with those of the others, from the end, where they come last.
    The order must not depend on anything that differs between ranks, such as measured times.
    """
    if rank.count == 1:
        return list(units)
    groups: dict[str, list[T]] = {}
    for unit in units:
        groups.setdefault(structure(unit), []).append(unit)
    dealt = sorted(groups, key=lambda name: (-max(map(size, groups[name])), name))
    order = dealt[rank.index :: rank.count]
    for step in range(1, rank.count):
        other = (rank.index + step) % rank.count
        order += reversed(dealt[other :: rank.count])
    return [unit for name in order for unit in groups[name]]


def agreed(store: LocalStore, name: str, since: float, decide: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """What the first of the processes that work on the same thing now decided; all others take it.

    Args:
        name: of the record that they meet in.
        since: when this process began, in Unix time: what was decided before is an earlier launch's.
        decide: makes the decision where this process is the first.
    """
    with store.exclusive(name):
        record = store.read_record(name) or {}
        written, decision = record.get("written"), record.get("decision")
        if isinstance(written, (int, float)) and written >= since and isinstance(decision, dict):
            return decision
        made = decide()
        store.write_record(name, {"written": time.time(), "decision": made})
        return made


def local_module(module: nn.Module) -> nn.Module:
    """The module inside ``DistributedDataParallel``, which may send buffers around before each call; else itself."""
    return cast("nn.Module", module.module) if _is_one_of(module, {"DistributedDataParallel"}) else module


def spread_over_processes(module: nn.Module) -> str | None:
    """Why a module must stay eager because one process alone cannot run it, or None.

    Recording, checking and timing call a module as often as this process sees fit: what enters a collective in its
    forward would wait for the others there.
    """
    for name, part in module.named_modules():
        if _is_one_of(part, {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}):
            return f"{name or 'it'} is a {type(part).__name__}, whose forward waits for other processes"
    for name, tensor in module.named_parameters():
        if any(cls.__name__ == "DTensor" and cls.__module__.startswith("torch.") for cls in type(tensor).__mro__):
            return f"its parameter {name} is spread over several processes"
    return None


def _is_one_of(module: nn.Module, names: Container[str]) -> bool:
    """By name along the class hierarchy, so that nothing of torch.distributed is imported for it."""
    return any(cls.__name__ in names and cls.__module__.startswith("torch.") for cls in type(module).__mro__)
