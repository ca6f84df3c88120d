"""A place that engines are shared through: a repository on the Hub, or a folder anywhere.

What pushing and pulling need of it is small: read one file, list a prefix, fetch files whose digests are known, and
add files in one step that either happens whole or not at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from aitune_hf.cache import FileDigest
from aitune_hf.errors import ConfigError, HubError

__all__ = [
    "Addition",
    "Cause",
    "Head",
    "Landed",
    "Reading",
    "Remote",
    "RemoteConflictError",
    "RemoteError",
    "RemoteUncertainError",
    "is_commit",
    "open_remote",
    "redacted",
    "revision_of",
]

#: Why a remote did not answer.
Cause = Literal["offline", "denied", "gated", "absent", "limited", "unreachable", "broken"]

_HUB_URL = re.compile(r"https://(?:huggingface\.co|hf\.co)/")
_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# A password may hold an @ itself, and a query a signature.
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{8,}|(?<=[Bb]earer )\S+|(?<=://)[^/\s]+@")
_QUERY = re.compile(r"""(://[^\s?#'"]*)[?#][^\s'"]*""")


class RemoteError(HubError):
    """A remote did not do what was asked; ``cause`` says of what kind the failure is."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(redacted(message))
        self.cause: Cause = cause


class RemoteConflictError(RemoteError):
    """Somebody else has committed since the remote was read: read it again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "broken")


class RemoteUncertainError(RemoteError):
    """A commit got no answer, so it may or may not have landed: read the remote again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unreachable")


@dataclass(frozen=True, kw_only=True)
class Head:
    """The state that a read or a commit goes by.

    Attributes:
        commit: its name: a commit hash, or empty where the remote keeps no history.
        private: whether only some people can read the remote; None where nobody can tell.
    """

    commit: str
    private: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One file as it was read; ``data`` is None where there is no such file."""

    data: bytes | None
    commit: str


@dataclass(frozen=True, kw_only=True)
class Addition:
    """One file to add.

    Attributes:
        source: its bytes, or a file that holds them.
        replaces: for a file that others change too, the bytes that this version was made from; empty for none. None for
            a file of an engine, which is there with these very bytes or not at all.
        force: let a file of an engine replace one with other bytes.
    """

    path: str
    source: bytes | Path
    replaces: bytes | None = None
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Landed:
    """A commit that was made: its name, and where to look at it."""

    commit: str
    url: str


class Remote(Protocol):
    """A store of files that engines are shared through. All methods raise :class:`RemoteError`."""

    @property
    def url(self) -> str:
        """Its name, for messages and for who trusts what. Holds no secret."""

    @property
    def pinned(self) -> str | None:
        """The commit that its name says to read; None for the newest state."""

    def head(self, revision: str | None = None) -> Head | None:
        """The newest state of a revision; None where the repository or the revision does not exist."""

    def create(self, *, revision: str | None, private: bool | None) -> None:
        """Make the repository, or the revision in it, if it is not there."""

    def read(self, path: str, *, revision: str | None, max_bytes: int, local_only: bool = False) -> Reading:
        """One file, in one request. A larger one is an error; ``local_only`` reads copies on this machine alone."""

    def names(self, prefix: str, *, revision: str | None) -> list[str]:
        """The paths of all files below a folder; empty where there is no such folder."""

    def present(self, paths: Sequence[str], *, revision: str | None) -> set[str]:
        """Those of these files that are there, in few requests."""

    def fetch(self, files: Mapping[str, FileDigest], *, commit: str, folder: Path, local_only: bool = False) -> None:
        """Copy files into ``folder``, each under its own last name, having checked its digest."""

    def commit(
        self,
        additions: Iterable[Addition],
        *,
        parent: Head,
        revision: str | None,
        message: str,
        create_pr: bool = False,
    ) -> Landed:
        """Add files on top of ``parent``: all, or none.

        Raises:
            RemoteConflictError: if ``parent`` is not the newest state any more, or a file of an engine is there with
                other bytes.
            RemoteUncertainError: if it is unknown whether the commit was made.
        """


def open_remote(url: str | Path, *, token: str | bool | None = None) -> Remote:
    """The remote behind ``"owner/name"`` (the Hub), a folder, or any URL that fsspec knows (``s3://…``).

    Only the spelling is looked at; ``"owner/name@<40 hex digits>"`` is a repository at that commit.

    Raises:
        ConfigError: if ``url`` is none of these.
    """
    text = os.fspath(url)
    if isinstance(url, Path) or text.startswith(("/", "./", "../", "~")):
        text = Path(text).expanduser().absolute().as_uri()
    is_hub = text.startswith("hf://") or _HUB_URL.match(text) is not None
    name = _HUB_URL.sub("", text, count=1).rstrip("/") if is_hub else text
    name, at, commit = name.removeprefix("hf://").removeprefix("models/").partition("@")
    if _REPO_ID.fullmatch(name) and (not at or is_commit(commit)):
        from aitune_hf.hub.hub_remote import HubRemote

        return HubRemote(name, commit=commit or None, token=token)
    if _REPO_ID.fullmatch(name):
        raise ConfigError(
            f"{redacted(text)!r}: after the @ comes a full commit (40 hex digits); for a branch give revision="
        )
    if "://" in text and not is_hub:
        from aitune_hf.hub.fsspec_remote import FsspecRemote

        return FsspecRemote(text)
    raise ConfigError(
        f"{redacted(text)!r} is no place for engines: give a repository as 'owner/name', a folder as './name' or "
        "'/path', or a URL such as 's3://bucket/path'"
    )


def revision_of(remote: Remote, revision: str | None) -> str | None:
    """The revision to read: the one asked for, or the commit that the remote's name says.

    Raises:
        ConfigError: if they are two.
    """
    if revision is not None and remote.pinned not in (None, revision):
        raise ConfigError(f"{remote.url}@{remote.pinned} names a commit already: leave revision={revision!r} out")
    return revision or remote.pinned


def is_commit(revision: str | None) -> bool:
    """Whether a revision names one state for good."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def redacted(text: str) -> str:
    """``text`` without anything that looks like a secret."""
    return _QUERY.sub(r"\1", _SECRET.sub("***", text))
