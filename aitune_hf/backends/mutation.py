"""Which inputs of a captured graph it writes to. ``torch.export`` itself tells only after a costly rewrite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["written_placeholders"]


def written_placeholders(part: nn.Module) -> Iterator[str]:
    """Inputs of a graph that one of its operators writes to, also through a view."""
    for node in getattr(getattr(part, "graph", None), "nodes", ()):
        schema = getattr(node.target, "_schema", None)
        for index, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            source = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            while isinstance(source, torch.fx.Node) and source.op == "call_function" and _is_view(source):
                source = source.args[0]
            if isinstance(source, torch.fx.Node) and source.op == "placeholder":
                yield source.name


def _is_view(node: torch.fx.Node) -> bool:
    """True if the operator's result may be the memory of its first argument."""
    arguments: Any = getattr(getattr(node.target, "_schema", None), "arguments", ())
    return bool(arguments) and bool(node.args) and arguments[0].alias_info is not None
