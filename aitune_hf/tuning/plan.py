"""What to tune of a module: the whole, or its repeated blocks, each structure once."""

from __future__ import annotations

from collections import defaultdict

from aitune_hf.config import TuneConfig
from aitune_hf.graph.hierarchy_hash import hierarchy_factors
from aitune_hf.jit.hierarchy import walk
from aitune_hf.jit.patched_module import PatchedModule

__all__ = ["repeated_blocks"]

#: ``granularity="auto"`` prefers blocks from this many equal ones on…
AUTO_BLOCKS = 8
#: …if blocks take at least this share of the module's recorded time.
AUTO_SHARE = 0.75


def repeated_blocks(head: PatchedModule, config: TuneConfig) -> list[PatchedModule]:
    """The blocks to tune instead of ``head`` itself; empty if it is to be tuned as a whole.

    Blocks are modules below it, of equal structure by their hash, that were called; of blocks within blocks the ones
    whose group takes the most time are taken. One engine serves all blocks of a structure, each with its own weights.
    """
    if config.granularity == "whole":
        return []
    groups = sorted(_groups(head), key=lambda group: -sum(block.recorder.seconds for block in group))
    chosen: list[PatchedModule] = []
    covered: set[int] = set()
    largest = 0
    for group in groups:
        below = {id(one) for block in group for one in walk([block])}
        # Neither within blocks that are taken, nor around them.
        if covered.isdisjoint(map(id, group)) and below.isdisjoint(map(id, chosen)):
            chosen += group
            covered |= below
            largest = max(largest, len(group))
    if config.granularity == "auto":
        total = head.recorder.seconds or 1.0
        share = sum(block.recorder.seconds for block in chosen) / total
        if largest < AUTO_BLOCKS or share < AUTO_SHARE:
            return []
    return chosen


def _groups(head: PatchedModule) -> list[list[PatchedModule]]:
    """Called modules below ``head``, two or more of equal structure together."""
    module = head.module
    names = {id(child): name for name, child in module.named_modules()}
    factors = hierarchy_factors(module)
    found: dict[str, list[PatchedModule]] = defaultdict(list)
    for patched in walk(head.children):
        name = names.get(id(patched.module))
        if name is not None and patched.recorder.graphs:
            found[factors.at(name).digest].append(patched)
    return [group for group in found.values() if len(group) > 1]
