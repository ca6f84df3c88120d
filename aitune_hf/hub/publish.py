"""Putting the engines that a pipeline uses where others can pull them from."""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from aitune_hf.cache import EngineKey
from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.errors import CorruptEntryError, HubError
from aitune_hf.hub.bundle import Bundle, collect
from aitune_hf.hub.card import CARD_PATH, render_card
from aitune_hf.hub.hub_remote import BaseModel, HubRemote
from aitune_hf.hub.record import PipelineRecord
from aitune_hf.hub.remote import Addition, Head, Landed, Remote, RemoteConflictError, RemoteUncertainError
from aitune_hf.hub.target import Target

__all__ = ["PushResult", "push"]

logger = logging.getLogger("aitune_hf")
#: With ten writers at once, one of them gets through each time; the slowest needs ten tries.
_ATTEMPTS = 24
_MAX_CARD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """What a push did.

    Attributes:
        url: of the commit; empty where nothing had to be committed.
        commit: its hash; empty on a remote that keeps no history.
        added: engines that are new in the remote; unchanged: engines that it had already; missing: engines that won here
            and are not in the local cache any more.
        bytes: of the files uploaded.
    """

    repo: str
    url: str = ""
    commit: str = ""
    added: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    bytes: int = 0

    def summary(self) -> str:
        """What was done, in one line."""
        if not self.url:
            text = f"{self.repo}: nothing to commit, its {len(self.unchanged)} engines are up to date"
        else:
            text = (
                f"{self.repo}: {len(self.added)} engines added ({self.bytes / 1e6:.2f} MB), {len(self.unchanged)} were "
                f"there; {self.url}"
            )
        return text + (f"; {len(self.missing)} are not in the local cache any more" if self.missing else "")


def push(
    target: Target,
    remote: Remote,
    *,
    base_model: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
    force: bool = False,
    signing_key: bytes | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> PushResult:
    """Add a pipeline's engines to a remote, in one commit. What others put there stays.

    Args:
        base_model: repository of the weights that the pipeline was loaded with, if it has one.
        private: for a repository that is made now: whether it is private.
        force: publish engines of a private or gated base to a public repository; replace a damaged record.
        signing_key: a private key as PEM text; each manifest is signed with it.

    Raises:
        HubError: if there is nothing to push, if it may not be pushed there, or if the remote fails.
    """
    with tempfile.TemporaryDirectory(prefix="aitune-push-") as folder:
        bundle = collect(target, Path(folder), signing_key)
        if not bundle.folders:
            lost = f" {len(bundle.missing)} engines that won are gone: {bundle.missing[0]}." if bundle.missing else ""
            raise HubError(
                f"there are no engines of {target.name} to push: the local cache {target.store.root} has none that won for "
                f"this structure, these settings and this machine.{lost} Run tune() first, with the same settings."
            )
        head = remote.head(revision)
        base = _checked_base(remote, base_model, head, private=private, force=force)
        if head is None:
            remote.create(revision=revision, private=private)
        attempt = _Attempt(
            bundle=bundle, remote=remote, base=base, revision=revision, message=message, pr=create_pr, force=force
        )
        return attempt.until_landed(head, sleep)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """The loop of a push: read what is there, add to it, commit on top of just that; again if somebody was faster."""

    bundle: Bundle
    remote: Remote
    base: BaseModel | None
    revision: str | None
    message: str | None
    pr: bool
    force: bool

    def until_landed(self, head: Head | None, sleep: Callable[[float], object]) -> PushResult:
        doubtful: PushResult | None = None  # what a commit without an answer would have done
        for number in range(1, _ATTEMPTS + 1):
            head = head or self.remote.head(self.revision)
            if head is None:
                raise HubError(f"{self.remote.url} is not there although it was made just now: try again")
            theirs, old = self._record_at(head)
            merged = theirs.merged(self.bundle.record) if theirs else self.bundle.record
            if theirs is not None and merged.to_bytes() == old:
                if doubtful is not None:
                    return replace(doubtful, commit=head.commit)
                known = theirs.engines()
                names = tuple(str(key.entry_path) for key in self.bundle.folders if key in known)
                return PushResult(repo=self.remote.url, unchanged=names, missing=self.bundle.missing)
            try:
                return self._commit(head, theirs, old, merged)
            except RemoteConflictError:
                logger.debug("%s was changed meanwhile, try %d", self.remote.url, number)
            except RemoteUncertainError as error:
                if number == _ATTEMPTS or self.pr:
                    raise
                logger.debug("%s, try %d", error, number)
                doubtful = self._result(Landed(commit="", url=self.remote.url), theirs, 0)
            sleep(random.uniform(0.0, min(2.0, 0.1 * 2 ** min(number, 5))))
            head = None
        raise HubError(
            f"{self.remote.url} was changed by others each of {_ATTEMPTS} times that a commit was tried; try again later"
        )

    def _record_at(self, head: Head) -> tuple[PipelineRecord | None, bytes]:
        record = self.bundle.record
        data = self.remote.read(record.path, revision=head.commit or None, max_bytes=MAX_JSON_BYTES).data
        if data is None:
            return None, b""
        try:
            return PipelineRecord.from_bytes(record.pipeline_hash, data), data
        except CorruptEntryError as error:
            if self.force:
                return None, data
            raise HubError(
                f"{self.remote.url}: {record.path} cannot be read, so it cannot be added to: {error}. Repair or remove it, "
                "or give force=True to replace it."
            ) from error

    def _commit(self, head: Head, theirs: PipelineRecord | None, old: bytes, merged: PipelineRecord) -> PushResult:
        known = theirs.engines() if theirs else {}
        new = [key for key in self.bundle.folders if key not in known]
        additions = [addition for key in new for addition in _files(key, self.bundle.folders[key])]
        size = sum(each.source.stat().st_size for each in additions if isinstance(each.source, Path))
        at = head.commit or None
        card = self.remote.read(CARD_PATH, revision=at, max_bytes=_MAX_CARD_BYTES).data or b""
        text = render_card(
            merged,
            repo=self.remote.url,
            base_model=self.base.name if self.base else None,
            license=self.base.license if self.base else None,
            existing=card.decode("utf-8", "replace"),
        )
        additions.append(Addition(path=CARD_PATH, source=text.encode(), replaces=card))
        additions.append(Addition(path=merged.path, source=merged.to_bytes(), replaces=old))
        landed = self.remote.commit(
            additions,
            parent=head,
            revision=self.revision,
            message=self.message or f"Add {len(new)} tuned engines for {merged.pipeline}",
            create_pr=self.pr,
        )
        if not landed.commit:  # No history, so maybe no lock either: see that nobody has written over it.
            now, data = self._record_at(head)
            if now is None or now.merged(merged).to_bytes() != data:
                raise RemoteConflictError(f"{self.remote.url} was written to by somebody else meanwhile")
        return self._result(landed, theirs, size)

    def _result(self, landed: Landed, theirs: PipelineRecord | None, size: int) -> PushResult:
        known = theirs.engines() if theirs else {}
        return PushResult(
            repo=self.remote.url,
            url=landed.url,
            commit=landed.commit,
            added=tuple(str(key.entry_path) for key in self.bundle.folders if key not in known),
            unchanged=tuple(str(key.entry_path) for key in self.bundle.folders if key in known),
            missing=self.bundle.missing,
            bytes=size,
        )


def _checked_base(
    remote: Remote, base_model: str | None, head: Head | None, *, private: bool | None, force: bool
) -> BaseModel | None:
    """What the Hub says about the base; raises where its engines would become more public than it is."""
    if base_model is None or not isinstance(remote, HubRemote):
        return BaseModel(name=base_model, restricted=None, license=None) if base_model else None
    base = remote.base_model(base_model)
    becomes_private = head.private if head is not None else private
    if base.restricted and not becomes_private and not force:
        raise HubError(
            f"{base_model} is {base.restricted}, and {remote.url} {'is' if head else 'would be'} public: engines and card "
            "would show what its owner shows only to some. Push to a private repository (private=True for a new one), or "
            "give force=True if you may publish them."
        )
    return base


def _files(key: EngineKey, folder: Path) -> Iterator[Addition]:
    for path in sorted(folder.iterdir()):
        yield Addition(path=str(key.entry_path / path.name), source=path)
