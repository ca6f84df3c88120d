"""Putting the engines that a pipeline uses where others can pull them from."""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.errors import ConfigError, CorruptEntryError, HubError
from aitune_hf.hub.bundle import Bundle, collect
from aitune_hf.hub.card import CARD_PATH, render_card
from aitune_hf.hub.hub_remote import BaseModel, HubRemote
from aitune_hf.hub.record import PipelineRecord
from aitune_hf.hub.remote import Addition, Head, Landed, Remote, RemoteConflictError, RemoteUncertainError
from aitune_hf.hub.target import Target
from aitune_hf.hub.upload import Upload, plan_upload

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
            and are not in the local cache any more; unsigned: engines that it had with bytes of somebody else's, which a
            push with a signing key does not sign.
        bytes: of the files uploaded.
    """

    repo: str
    url: str = ""
    commit: str = ""
    added: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unsigned: tuple[str, ...] = ()
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
        if self.unsigned:
            text += f"; {len(self.unsigned)} are somebody else's and got no signature (force=True replaces them)"
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
    first: Callable[[], object] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> PushResult:
    """Add a pipeline's engines to a remote, in one commit. What others put there stays, and so do engines that are there.

    Args:
        base_model: repository of the weights that the pipeline was loaded with, if it has one.
        private: for a repository that is made now: whether it is private.
        force: publish engines of a private or gated base to a public repository; replace a damaged record, and engines
            that are there already.
        signing_key: a private key as PEM text; each manifest is signed with it, also those that are there already.
        first: done once the engines are collected and may go there, before they do: uploads what belongs to them.

    Raises:
        HubError: if there is nothing to push, if it may not be pushed there, or if the remote fails.
    """
    if remote.pinned is not None:
        raise ConfigError(f"{remote.url}@{remote.pinned} is one commit, which cannot be added to: leave it out")
    with tempfile.TemporaryDirectory(prefix="aitune-push-") as folder:
        bundle = collect(target, Path(folder), signing_key)
        if not bundle.folders:
            lost = f" {len(bundle.missing)} engines that won are gone: {bundle.missing[0]}." if bundle.missing else ""
            raise HubError(
                f"there are no engines of {target.name} to push: the local cache {target.store.root} has none that won for "
                f"this structure, these settings and this machine.{lost} Run tune() first, with the same settings."
            )
        head = remote.head(revision)
        base = _base(remote, base_model)
        attempt = _Attempt(
            bundle=bundle, remote=remote, base=base, revision=revision, message=message, pr=create_pr, force=force
        )
        if head is None:
            # A new revision is as public as its repository.
            repository = remote.head() if revision is not None else None
            attempt.check_audience(Head(commit="", private=private) if repository is None else repository)
            remote.create(revision=revision, private=private)
            head = remote.head(revision)
        if first is not None and head is not None:
            attempt.check_audience(head)
            attempt.plan(head)  # What is wrong with the remote is found before anything is uploaded.
            first()
            head = None  # It may have moved on.
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

    def check_audience(self, head: Head) -> None:
        """Raise ``HubError`` where engines would become more public than their base is."""
        base = self.base
        if base is not None and base.restricted and not head.private and not self.force:
            raise HubError(
                f"{base.name} is {base.restricted}, and {self.remote.url} {'is' if head.commit else 'would be'} public: "
                "engines and card would show what its owner shows only to some. Push to a private repository (private=True "
                "for a new one), or give force=True if you may publish them."
            )

    def until_landed(self, head: Head | None, sleep: Callable[[float], object]) -> PushResult:
        doubtful: PushResult | None = None  # what a commit without an answer would have done
        changed = ""
        for number in range(1, _ATTEMPTS + 1):
            head = head or self.remote.head(self.revision)
            if head is None:
                raise HubError(f"{self.remote.url} is not there although it was made just now: try again")
            self.check_audience(head)  # By what the remote says, not by what was asked for when it was made.
            theirs, old, upload = self.plan(head)
            if theirs is not None and upload.record.to_bytes() == old and (doubtful or not upload.additions):
                if doubtful is not None:
                    return replace(doubtful, commit=head.commit)
                return self._result(Landed(commit="", url=""), theirs, upload)
            try:
                return self._commit(head, theirs, old, upload)
            except RemoteConflictError as error:
                logger.debug("%s, try %d", error, number)
                changed = str(error)
            except RemoteUncertainError as error:
                if number == _ATTEMPTS or self.pr:
                    raise
                logger.debug("%s, try %d", error, number)
                doubtful = self._result(Landed(commit="", url=self.remote.url), theirs, replace(upload, bytes=0))
            sleep(random.uniform(0.0, min(2.0, 0.1 * 2 ** min(number, 5))))
            head = None
        raise HubError(
            f"{self.remote.url} was changed by others each of {_ATTEMPTS} times that a commit was tried; try again later. "
            f"The last time: {changed}"
        )

    def plan(self, head: Head) -> tuple[PipelineRecord | None, bytes, Upload]:
        """The remote's record, its bytes, and what to add. Raises ``HubError`` where something there is damaged."""
        theirs, old = self._record_at(head)
        return theirs, old, plan_upload(self.bundle, theirs, self.remote, head, force=self.force)

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

    def _commit(self, head: Head, theirs: PipelineRecord | None, old: bytes, upload: Upload) -> PushResult:
        merged = upload.record
        card = self.remote.read(CARD_PATH, revision=head.commit or None, max_bytes=_MAX_CARD_BYTES).data or b""
        text = render_card(
            merged,
            repo=self.remote.url,
            base_model=self.base.name if self.base else None,
            license=self.base.license if self.base else None,
            existing=card.decode("utf-8", "replace"),
        )
        shared = [
            Addition(path=CARD_PATH, source=text.encode(), replaces=card),
            Addition(path=merged.path, source=merged.to_bytes(), replaces=old),
        ]
        new = set(self.bundle.folders) - set(theirs.engines() if theirs else ())
        landed = self.remote.commit(
            [*upload.additions, *shared],
            parent=head,
            revision=self.revision,
            message=self.message or f"Add {len(new)} tuned engines for {merged.pipeline}",
            create_pr=self.pr,
        )
        if not landed.commit:  # No history, so maybe no lock either: see that nobody has written over it.
            now, data = self._record_at(head)
            if now is None or now.merged(merged).to_bytes() != data:
                raise RemoteConflictError(f"{self.remote.url} was written to by somebody else meanwhile")
        return self._result(landed, theirs, upload)

    def _result(self, landed: Landed, theirs: PipelineRecord | None, upload: Upload) -> PushResult:
        known = theirs.engines() if theirs else {}
        return PushResult(
            repo=self.remote.url,
            url=landed.url,
            commit=landed.commit,
            added=tuple(str(key.entry_path) for key in self.bundle.folders if key not in known),
            unchanged=tuple(str(key.entry_path) for key in self.bundle.folders if key in known),
            missing=self.bundle.missing,
            unsigned=upload.unsigned,
            bytes=upload.bytes,
        )


def _base(remote: Remote, name: str | None) -> BaseModel | None:
    """What the Hub says about the base. Another remote is nobody's but its owner's."""
    if name is None:
        return None
    return remote.base_model(name) if isinstance(remote, HubRemote) else BaseModel(name=name)
