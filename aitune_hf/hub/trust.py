"""Whose engines may run here.

Loading a native engine (a shared library) runs its author's code, with all the rights of the process. So one that was
not built on this machine is loaded only if the user said whom to trust: a repo at one commit, a repo as it stands, a
key that signs manifests, or everybody. Artefacts that are data need none of this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from aitune_hf.errors import ConfigError
from aitune_hf.hub.signature import SIGNATURE_NAME, PublicKey, verify

__all__ = ["Decision", "Policy", "Source", "Trust", "TrustedRepo"]

#: By which rule an engine was trusted, the most exact first.
Policy = Literal["signed", "pinned", "listed", "explicit"]

_HUB = "https://huggingface.co/"
_MAX_FILE = 1 << 20
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?")
_LOOPBACK = frozenset({"localhost", "127.0.0.1"})
_FORMS = (
    "expected None or 'local', True, 'org/repo@<40 hex digits of a commit>', 'org/repo', the path of an allow-list "
    "file or of a public key, a public key, or a list of those"
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where an entry came from.

    Attributes:
        url: ``org/repo`` for a repo on the Hub that the user's settings name; ``https://host/org/repo`` for one
            elsewhere. Anything else, a folder for instance, is a source that no policy but ``True`` or a signature
            trusts. It may hold a token or a path of this machine: it is compared, and never written down.
        commit: the full commit the files were read at, as the Hub said it; None if unknown.
        signature: the bytes of ``manifest.json.sig``; None if there is none.
    """

    url: str
    commit: str | None = None
    signature: bytes | None = None

    @property
    def repo(self) -> str | None:
        """The repo in the one spelling in which repos are compared; None for a source that is no repo."""
        return _repo_of(self.url)

    @property
    def name(self) -> str:
        """The source in words that may be written down: no token, no path of this machine."""
        return self.repo or "a source that is no Hub repo"


@dataclass(frozen=True, kw_only=True)
class TrustedRepo:
    """A repo whose engines may run here: at one commit, or (None) whatever it holds."""

    repo: str
    commit: str | None = None

    @classmethod
    def parse(cls, text: str) -> TrustedRepo | None:
        """The repo that ``org/repo`` or ``org/repo@<commit>`` names; None for a text of another form.

        Raises ``ConfigError`` for a branch, a tag or a short commit: they can be moved, so they pin nothing.
        """
        # A user and a password before the host would hold an @ too; such an address is no repo.
        where, at, commit = text.rpartition("@") if "@" in text else (text, "", "")
        repo = _repo_of(where)
        if repo is None:
            return None
        if at and not _COMMIT.fullmatch(commit):
            raise ConfigError(
                f"trust={text!r}: {commit[:60]!r} is no full commit (40 lower-case hex digits). A branch, a tag or a "
                f"short commit can be moved; pin the commit, or write {where!r} to trust whatever the repo holds"
            )
        return cls(repo=repo, commit=commit or None)

    def __str__(self) -> str:
        return self.repo if self.commit is None else f"{self.repo}@{self.commit}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether a native engine may be loaded: by which ``policy``, or None; ``reason`` says why in a sentence.

    ``key`` is the one that signed it, where that is the policy.
    """

    policy: Policy | None
    reason: str
    key: PublicKey | None = None

    @property
    def trusted(self) -> bool:
        """Whether it may."""
        return self.policy is not None


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Whom the user trusts. Nobody by default: then only engines built here are loaded.

    Attributes:
        repos: repos, at one commit or as they stand.
        keys: keys whose signature over a manifest is trusted, whatever repo the entry lies in.
        everything: any source at all.
    """

    repos: tuple[TrustedRepo, ...] = ()
    keys: tuple[PublicKey, ...] = ()
    everything: bool = False

    @classmethod
    def parse(cls, value: object) -> Trust:
        """The trust that the value of a ``trust=`` argument means. Files are read at once.

        Args:
            value: None or ``"local"``: nobody. True: everybody. ``"org/repo@<commit>"``: a repo at that commit.
                ``"org/repo"``: a repo, whatever it holds. The path of a PEM public key, or a public key: what that key
                signed. The path of any other file: an allow-list, one repo a line, with or without commit, ``#`` begins
                a comment. A list of those: any of them.

        Raises:
            ConfigError: for anything else, for a file that cannot be read, and where a key is given and signatures
                cannot be checked because the extra ``signing`` is not installed.
        """
        if isinstance(value, Trust):
            return value
        if isinstance(value, (list, tuple, set, frozenset)):
            parts = [_one(item) for item in value]
        else:
            parts = [_one(value)]
        return cls(
            repos=tuple(dict.fromkeys(repo for part in parts for repo in part.repos)),
            keys=tuple(dict.fromkeys(key for part in parts for key in part.keys)),
            everything=any(part.everything for part in parts),
        )

    def commit_for(self, source: Source) -> str | None:
        """The commit to read a source at: the one at which alone its repo is trusted; None if there is no such one."""
        commits = {trusted.commit for trusted in self.repos if trusted.repo == source.repo}
        return commits.pop() if len(commits) == 1 and not self.everything else None

    def decide(self, source: Source, manifest_bytes: bytes) -> Decision:
        """Whether a native engine with this manifest may be loaded. Ask before its files are fetched, too."""
        if source.signature is not None:
            for key in self.keys:
                if verify(key, manifest_bytes, source.signature):
                    return Decision(policy="signed", reason=f"signed by the trusted key {key.fingerprint}", key=key)
        matching = [trusted for trusted in self.repos if trusted.repo == source.repo]
        if any(trusted.commit is not None and trusted.commit == source.commit for trusted in matching):
            return Decision(policy="pinned", reason=f"{source.name} is trusted at commit {source.commit}")
        if any(trusted.commit is None for trusted in matching):
            return Decision(policy="listed", reason=f"{source.name} is trusted")
        if self.everything:
            return Decision(policy="explicit", reason="every source is trusted (trust=True)")
        return Decision(policy=None, reason=" ".join(self._objections(source, matching)))

    def _objections(self, source: Source, matching: list[TrustedRepo]) -> Iterator[str]:
        if not self.repos and not self.keys:
            yield f"nobody but this machine is trusted, and this engine is from {source.name}."
        for trusted in matching:
            yield f"{source.name} is trusted at commit {trusted.commit}, this is {source.commit or 'an unknown one'}."
        if self.repos and not matching:
            yield f"{source.name} is not among the {len(self.repos)} trusted repos{self._look_alike(source)}."
        if self.keys and source.signature is None:
            yield f"There is no {SIGNATURE_NAME}."
        elif self.keys:
            yield f"{SIGNATURE_NAME} is not the signature of any of the {len(self.keys)} trusted keys over this manifest."

    def _look_alike(self, source: Source) -> str:
        for trusted in self.repos:
            if source.repo is not None and trusted.repo.casefold() == source.repo.casefold():
                return f" (it differs from {trusted.repo} by case)"
        return ""


def _one(value: object) -> Trust:
    if value is None or value is False or value == "local":
        return Trust()
    if value is True:
        return Trust(everything=True)
    if isinstance(value, Trust):
        return value
    if isinstance(value, PublicKey):
        return Trust(keys=(value,))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Path):
        return _file(value)
    if type(value).__module__.partition(".")[0] == "cryptography":
        return Trust(keys=(PublicKey.of(value, "trust"),))
    raise ConfigError(f"trust={value!r:.80}: {_FORMS}")


def _text(value: str) -> Trust:
    repo, path = TrustedRepo.parse(value), Path(value).expanduser()
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # too long, or a NUL in it
        is_file = False
    if repo is not None and is_file:
        raise ConfigError(f"trust={value!r} may be a repo or the file of that name: write './{value}' for the file")
    if repo is not None:
        return Trust(repos=(repo,))
    if not is_file:
        raise ConfigError(f"trust={value!r:.200} is neither a repo nor a file that is there: {_FORMS}")
    return _file(path)


def _file(path: Path) -> Trust:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"trust: {path} cannot be read: {error.strerror or error}") from error
    if len(data) > _MAX_FILE:
        raise ConfigError(f"trust: {path} has more than {_MAX_FILE} bytes: it is neither a key nor an allow-list")
    if b"-----BEGIN " in data:
        return Trust(keys=(PublicKey.from_pem(data, f"trust: {path}"),))
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"trust: {path} is neither a PEM public key nor a text file with repos") from error
    repos: list[TrustedRepo] = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        repo = TrustedRepo.parse(entry)
        if repo is None:
            raise ConfigError(f"trust: {path}, line {number}: {entry[:80]!r} is not of the form org/repo[@<commit>]")
        repos.append(repo)
    return Trust(repos=tuple(repos))


def _repo_of(url: str) -> str | None:
    """``org/repo``, or ``https://host/org/repo`` for a host other than the Hub; None for anything else.

    Nothing is repaired: another case, a trailing slash, an escape or a letter that only looks right is another name.
    """
    if _is_repo_name(url):
        return url
    if not url.isascii() or not re.match("https?://", url):
        return None
    scheme, rest = url.split("://", 1)
    host, _, name = rest.partition("/")
    if not _HOST.fullmatch(host) or not _is_repo_name(name):
        return None
    if scheme == "http" and urlsplit(url).hostname not in _LOOPBACK:
        return None  # anybody on the way could have written what comes from there
    return name if url.startswith(_HUB) else url


def _is_repo_name(text: str) -> bool:
    return _REPO.fullmatch(text) is not None and ".." not in text and "--" not in text
