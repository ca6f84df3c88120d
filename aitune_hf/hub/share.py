"""Pushing and pulling by the names that users give."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from aitune_hf.config import TuneConfig
from aitune_hf.errors import ConfigError
from aitune_hf.hub.explain import explain_remote
from aitune_hf.hub.lookup import Lookup, look_up
from aitune_hf.hub.outcome import PullResult
from aitune_hf.hub.publish import PushResult, push
from aitune_hf.hub.pull import pull
from aitune_hf.hub.remote import Remote, open_remote
from aitune_hf.hub.target import Target
from aitune_hf.hub.trust import Trust

__all__ = ["base_repository", "explain_modules", "look_up_modules", "parse_sources", "pull_modules", "push_modules"]

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_SNAPSHOT = re.compile(r".*/models--([^/]+?)--([^/]+)/snapshots/[0-9a-f]{40}/?")


def push_modules(
    roots: Mapping[str, nn.Module],
    config: TuneConfig,
    repo: str | Path,
    *,
    name: str,
    base_model: str | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> PushResult:
    """Add the engines of some modules to a repository or URL; ``options`` as of :func:`~aitune_hf.hub.publish.push`."""
    target = Target(roots, config, name)
    return push(target, open_remote(repo, token=token), base_model=base_model, **options)


def pull_modules(
    roots: Mapping[str, nn.Module],
    config: TuneConfig,
    repos: str | Path | Sequence[str | Path],
    *,
    name: str,
    revision: str | None = None,
    trust: object = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> PullResult:
    """Take over engines for some modules from repositories or URLs, in order.

    Raises:
        ConfigError: if an argument is wrong. A remote that fails is no reason to raise.
    """
    remotes, trusted = parse_sources(repos, trust, token=token)
    target = Target(roots, config, name)
    return pull(target, remotes, revision=revision, trust=trusted, local_only=local_files_only)


def parse_sources(
    repos: str | Path | Sequence[str | Path], trust: object, *, token: str | bool | None = None
) -> tuple[list[Remote], Trust]:
    """What ``tuned=`` and ``trust=`` mean. Asks nobody, so that a wrong one is an error before anything is loaded.

    Raises:
        ConfigError: if one of them means nothing.
    """
    listed = [repos] if isinstance(repos, (str, Path)) else list(repos)
    if not listed:
        raise ConfigError("tuned names no repository: give 'owner/name', a folder or a URL, or a list of those")
    return [open_remote(repo, token=token) for repo in listed], Trust.parse(trust)


def look_up_modules(
    roots: Mapping[str, nn.Module],
    config: TuneConfig,
    repo: str | Path,
    *,
    name: str,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Lookup:
    """What a remote has for some modules, without fetching it."""
    return look_up(Target(roots, config, name), open_remote(repo, token=token), revision=revision)


def explain_modules(
    roots: Mapping[str, nn.Module],
    config: TuneConfig,
    repo: str | Path,
    *,
    name: str,
    revision: str | None = None,
    token: str | bool | None = None,
) -> str:
    """Why a remote has engines for some modules, or in what they differ from those that it has engines for."""
    return explain_remote(Target(roots, config, name), open_remote(repo, token=token), revision=revision)


def base_repository(name_or_path: object) -> str | None:
    """The Hub repository that weights were loaded from, by the name that their library noted; None if it was none."""
    if not isinstance(name_or_path, str) or not name_or_path:
        return None
    snapshot = _SNAPSHOT.fullmatch(name_or_path)
    if snapshot:
        return f"{snapshot[1]}/{snapshot[2]}"
    return name_or_path if _REPO.fullmatch(name_or_path) and not Path(name_or_path).exists() else None
