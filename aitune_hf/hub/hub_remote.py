"""A repository on the Hugging Face Hub as a remote.

Files are fetched by plain requests of our own, one per file, and not through the client's download functions: those
ask for a file's metadata first, do not check what arrives against a digest, have no upper bound, and would keep a
second copy of every engine. What the client's cache holds already (after ``hf download``) is taken from there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined] # re-exported late

from aitune_hf.cache import FileDigest
from aitune_hf.cache.digests import copy_verified
from aitune_hf.errors import CorruptEntryError
from aitune_hf.hub.hub_failure import HTTP_ERROR, RETRIED, failure, pause_s, refusal, status_sentence, wait_s
from aitune_hf.hub.remote import (
    Addition,
    Head,
    Landed,
    Reading,
    RemoteConflictError,
    RemoteError,
    RemoteUncertainError,
    is_commit,
)
from aitune_hf.version import __version__

__all__ = ["BaseModel", "HubRemote"]

T = TypeVar("T")
#: Waits between tries of one request are this long together, whatever a server asks for.
PATIENCE_S = 20.0
_ATTEMPTS = 3
_TIMEOUT_S = 10.0
_THREADS = 4
#: An answer may take this long, and more for each byte of it.
_BASE_S = 30.0
_LEAST_BYTES_PER_S = 32_000
#: Paths asked for in one request.
_PATHS = 500


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """What the Hub says about the model that engines were tuned for: ``restricted`` is why not all may see it."""

    name: str
    restricted: str | None = None
    license: str | None = None


class HubRemote:
    """A model repository. ``token`` as everywhere in huggingface_hub: None is the one that is logged in."""

    def __init__(
        self,
        repo_id: str,
        *,
        commit: str | None = None,
        token: str | bool | None = None,
        endpoint: str | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.repo_id = repo_id
        self.pinned = commit
        self._api = HfApi(endpoint=endpoint, token=token, library_name="aitune-hf", library_version=__version__)
        self._token = token
        self._sleep = sleep

    @cached_property
    def _headers(self) -> dict[str, str]:
        """Made at the first request: looking for the token that is logged in may fail."""
        headers = build_hf_headers(token=self._token, library_name="aitune-hf", library_version=__version__)
        # Sizes are bounds, so they must be those of the file.
        return {**headers, "Accept-Encoding": "identity"}

    @property
    def url(self) -> str:
        """``owner/name``."""
        return self.repo_id

    def head(self, revision: str | None = None) -> Head | None:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        try:
            with self._explained("read"):
                info = self._api.model_info(
                    self.repo_id, revision=revision, timeout=_TIMEOUT_S, expand=["sha", "private"]
                )
        except RemoteError as error:
            if error.cause == "absent":
                return None
            raise
        return Head(commit=str(info.sha), private=bool(info.private))

    def create(self, *, revision: str | None, private: bool | None) -> None:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        with self._explained("create"):
            self._api.create_repo(self.repo_id, private=private, exist_ok=True)
            if revision not in (None, "main"):
                self._api.create_branch(self.repo_id, branch=str(revision), exist_ok=True)

    def read(self, path: str, *, revision: str | None, max_bytes: int, local_only: bool = False) -> Reading:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        offline = local_only or constants.HF_HUB_OFFLINE
        if offline or is_commit(revision):
            cached = try_to_load_from_cache(self.repo_id, path, revision=revision)
            if isinstance(cached, str):
                return Reading(data=_bounded(Path(cached), max_bytes), commit=_snapshot(cached))
        if offline:
            raise RemoteError(f"{self.repo_id}: offline, and {path} is not in the local Hub cache", "offline")
        data, commit = self._get(path, revision, lambda response: b"".join(_body(response, max_bytes)))
        return Reading(data=data, commit=commit)

    def names(self, prefix: str, *, revision: str | None) -> list[str]:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        try:
            with self._explained("list"):
                tree = self._api.list_repo_tree(self.repo_id, prefix, recursive=True, revision=revision)
                return [item.path for item in tree if hasattr(item, "size")]
        except RemoteError as error:
            if isinstance(error.__cause__, EntryNotFoundError):
                return []
            raise

    def present(self, paths: Sequence[str], *, revision: str | None) -> set[str]:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        found: set[str] = set()
        with self._explained("list"):
            for start in range(0, len(paths), _PATHS):
                some = list(paths[start : start + _PATHS])
                found |= {each.path for each in self._api.get_paths_info(self.repo_id, some, revision=revision)}
        return found

    def fetch(self, files: Mapping[str, FileDigest], *, commit: str, folder: Path, local_only: bool = False) -> None:
        """See :class:`~aitune_hf.hub.remote.Remote`."""

        def fetch_one(item: tuple[str, FileDigest]) -> None:
            path, expected = item
            target = folder / PurePosixPath(path).name
            if not self._from_cache(path, expected, commit, target):
                if local_only or constants.HF_HUB_OFFLINE:
                    raise RemoteError(f"{self.repo_id}: offline, and {path} is not in the local Hub cache", "offline")
                self._download(path, expected, commit, target)

        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(fetch_one, files.items()):
                pass

    def commit(
        self,
        additions: Iterable[Addition],
        *,
        parent: Head,
        revision: str | None,
        message: str,
        create_pr: bool = False,
    ) -> Landed:
        """See :class:`~aitune_hf.hub.remote.Remote`."""
        operations = [
            CommitOperationAdd(each.path, each.source if isinstance(each.source, bytes) else str(each.source))
            for each in additions
        ]
        try:
            # Large files are uploaded first, and then one commit names them all: nothing is seen before it.
            info = self._api.create_commit(
                self.repo_id,
                operations,
                commit_message=message,
                parent_commit=parent.commit,
                revision=revision,
                create_pr=create_pr,
            )
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (409, 412):
                raise RemoteConflictError(f"{self.repo_id} was changed by somebody else meanwhile") from error
            if status in RETRIED and status != 429:
                raise RemoteUncertainError(f"{self.repo_id}: {status_sentence(status)}") from error
            raise failure(self.repo_id, "write", error) from error
        except (OSError, RuntimeError, ValueError, HTTP_ERROR) as error:
            known = (OfflineModeIsEnabled, LocalTokenNotFoundError, RuntimeError, ValueError)
            if isinstance(error, known):  # nothing was committed
                raise failure(self.repo_id, "write", error) from error
            raise RemoteUncertainError(f"{self.repo_id}: no answer to a commit ({type(error).__name__})") from error
        return Landed(commit=str(info.oid), url=str(info.pr_url or info.commit_url))

    def base_model(self, name: str) -> BaseModel:
        """What the Hub says about another model, in one request. One that cannot be seen counts as private."""
        try:
            with self._explained("read"):
                info = self._api.model_info(name, timeout=_TIMEOUT_S, expand=["private", "gated", "cardData"])
        except RemoteError as error:
            if error.cause in ("absent", "denied", "gated"):
                return BaseModel(name=name, restricted="private or gated, or gone", license=None)
            raise
        card: Any = info.card_data
        word = "private" if info.private else "gated" if info.gated else None
        return BaseModel(name=name, restricted=word, license=getattr(card, "license", None) if card else None)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _download(self, path: str, expected: FileDigest, commit: str, target: Path) -> None:
        def take(response: Any) -> FileDigest:
            hasher, size = hashlib.sha256(), 0
            with target.open("wb") as out:
                for chunk in _body(response, expected.size):
                    hasher.update(chunk)
                    size += len(chunk)
                    out.write(chunk)
            return FileDigest(sha256=hasher.hexdigest(), size=size)

        for _ in range(2):
            found, _ = self._get(path, commit, take)
            if found is None:
                raise RemoteError(f"{self.repo_id} has no {path} at {commit[:12]}", "broken")
            if found == expected:
                return
        target.unlink(missing_ok=True)
        raise RemoteError(f"{self.repo_id}: {path} arrived with other bytes than its record says", "broken")

    def _from_cache(self, path: str, expected: FileDigest, commit: str, target: Path) -> bool:
        cached = try_to_load_from_cache(self.repo_id, path, revision=commit)
        if not isinstance(cached, str):
            return False
        try:
            copy_verified(Path(cached).resolve(), target, expected)
        except (CorruptEntryError, OSError):
            return False
        return True

    def _get(self, path: str, revision: str | None, take: Callable[[Any], T]) -> tuple[T | None, str]:
        """What ``take`` makes of a file's open answer, and the commit it is of; None where there is no such file."""
        at = quote(revision or constants.DEFAULT_REVISION, safe="")
        url = f"{self._api.endpoint}/{self.repo_id}/resolve/{at}/{quote(path)}"
        left = PATIENCE_S
        with self._explained("read"):
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    with get_session().stream(
                        "GET", url, headers=self._headers, timeout=_TIMEOUT_S, follow_redirects=True
                    ) as response:
                        status = response.status_code
                        if status < 400:
                            return take(response), _commit_of(response)
                        if response.headers.get("X-Error-Code") == "EntryNotFound":
                            return None, _commit_of(response)
                        wait = wait_s(response, attempt)
                        if status not in RETRIED or attempt == _ATTEMPTS or wait > left:
                            raise refusal(self.repo_id, "read", status, response.headers)
                except HTTP_ERROR:
                    if attempt == _ATTEMPTS:
                        raise
                    wait = pause_s(attempt)
                self._sleep(wait)
                left -= wait
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RemoteError:
            raise
        except (OSError, ValueError, EntryNotFoundError, HTTP_ERROR) as error:
            raise failure(self.repo_id, what, error) from error


def _body(response: Any, max_bytes: int) -> Iterator[bytes]:
    """The bytes of an answer: not more than ``max_bytes``, and not slower than any line that is of use."""
    url = response.request.url
    announced = response.headers.get("Content-Length", "")
    size = min(int(announced), max_bytes) if announced.isdecimal() else max_bytes
    seconds = _BASE_S + size / _LEAST_BYTES_PER_S
    deadline = time.monotonic() + seconds
    size = 0
    # As they come: a chunk of a given size would be waited for, and each byte may take as long as a timeout.
    for chunk in response.iter_bytes():
        size += len(chunk)
        if size > max_bytes:
            raise RemoteError(f"{url.path} is larger than the {max_bytes} bytes expected", "broken")
        if time.monotonic() > deadline:
            raise RemoteError(f"{url.host} is too slow: {size} bytes of {url.path} in {seconds:.0f} s", "unreachable")
        yield chunk


def _commit_of(response: Any) -> str:
    """The Hub names the commit in its own answer, which may be a redirect to where the bytes are."""
    answers = (*response.history, response)
    return next((str(each.headers["X-Repo-Commit"]) for each in answers if "X-Repo-Commit" in each.headers), "")


def _bounded(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise RemoteError(f"{path.name} is larger than the {max_bytes} bytes expected", "broken")
    return data


def _snapshot(cached: str) -> str:
    """The commit in a path of the client's cache, ``…/snapshots/<commit>/…``."""
    parts = Path(cached).parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else ""
