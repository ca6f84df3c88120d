"""Which modules are intercepted, and which are left alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from aitune_hf.config import TuneConfig

__all__ = ["BUILTIN_EXCLUDE", "is_excluded", "is_skipped", "patchable"]

#: Dotted prefixes of modules, or exact qualified class names, that are never intercepted. Single layers are not worth an
#: engine of their own; traced and quantised modules are compiled or opaque already; the first are our own tools.
BUILTIN_EXCLUDE = (
    "aitune_hf",
    "torch.nn.modules",
    "torch.nn.parallel",
    "torch.nn.utils",
    "torch.ao",
    "torch.fx",
    "torch.jit",
    "torch._dynamo",
    "torch._inductor",
    "torch.export",
)
#: Containers from the list above that do have a forward worth tuning.
_CONTAINERS = ("torch.nn.modules.container.Sequential", "torch.nn.modules.transformer")


def _matches(qualified: str, pattern: str) -> bool:
    return qualified == pattern or qualified.startswith(pattern + ".")


def is_excluded(cls: type, config: TuneConfig) -> bool:
    """True if modules of ``cls`` must not be intercepted."""
    qualified = f"{cls.__module__}.{cls.__qualname__}"
    if any(_matches(qualified, pattern) for pattern in config.patch_exclude):
        return True
    if any(_matches(qualified, pattern) for pattern in _CONTAINERS):
        return False
    return any(_matches(qualified, pattern) for pattern in BUILTIN_EXCLUDE)


def is_skipped(cls: type, config: TuneConfig) -> bool:
    """True if the configuration names this class to be skipped, with all below it."""
    return cls.__name__ in config.skip_modules


def patchable(root: nn.Module, config: TuneConfig, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of a tree to intercept, with their paths: ``root`` always, then those not excluded."""
    for name, module in root.named_modules():
        if module is not root and is_excluded(type(module), config):
            continue
        yield ".".join(part for part in (prefix, name) if part), module
