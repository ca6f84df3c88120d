"""Where what is known of a target is kept, and where its engines must be valid."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from aitune_hf.cache import Environment, canonical_json
from aitune_hf.config import TuneConfig
from aitune_hf.graph.hierarchy_hash import hierarchy_hash

__all__ = ["device_of", "environment_of", "pipeline_hash", "target_record_name"]


def pipeline_hash(roots: Mapping[str, nn.Module]) -> str:
    """Identity of a whole target: its modules' structures by path. Equal for every machine and checkpoint."""
    parts = {path: hierarchy_hash(root) for path, root in roots.items()}
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def target_record_name(pipeline: str, ending: str) -> str:
    """The record that lists the tuned modules of a target, by its hash and what else the list holds for."""
    return f"pipelines/{pipeline}-{ending}.json"


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first tensor lies; the CPU if it has none."""
    tensors = (*module.parameters(), *module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def environment_of(module: nn.Module, config: TuneConfig) -> Environment:
    """Where a module's engines must be valid."""
    here = Environment.current(device_of(module).type)
    return here.portable() if config.portable and here.device_type == "cpu" else here
