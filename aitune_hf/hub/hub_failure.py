"""What a Hub that says no means, in words that say what to do, and how long to wait before asking again."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from aitune_hf.hub.remote import Cause, RemoteError

__all__ = ["HTTP_ERROR", "RETRIED", "failure", "pause_s", "refusal", "status_sentence", "wait_s"]

#: Answers after which the same request may work.
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
#: The client's HTTP library changed its name between versions of the client; its errors are the parents of the client's.
HTTP_ERROR: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def failure(repo: str, what: str, error: Exception) -> RemoteError:
    """An exception of the client, met when trying to ``what`` a repository, as ours."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        return failure(repo, what, error.__cause__)  # what the client says of an upload that failed
    if isinstance(error, HfHubHTTPError):
        return refusal(repo, what, error.response.status_code, error.response.headers, error)
    if isinstance(error, LocalTokenNotFoundError):
        return RemoteError(f"cannot {what} {repo}: token=True, and nobody is logged in: `hf auth login`", "denied")
    if isinstance(error, OfflineModeIsEnabled):
        return RemoteError(f"{repo}: HF_HUB_OFFLINE is set; unset it to {what} it", "offline")
    if isinstance(error, (HTTP_ERROR, ConnectionError, TimeoutError)):
        kind = type(error).__name__
        return RemoteError(f"{repo}: the Hub did not answer, or stopped midway ({kind})", "unreachable")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return RemoteError(f"cannot {what} {repo}: {first}", "broken")


def refusal(
    repo: str, what: str, status: int, headers: Mapping[str, str], error: Exception | None = None
) -> RemoteError:
    """An answer with an error status as ours."""
    code = headers.get("X-Error-Code", "")
    cause: Cause
    if isinstance(error, GatedRepoError) or code == "GatedRepo":
        cause, text = "gated", f"{repo} is gated: ask for access on its page, then `hf auth login`"
    elif isinstance(error, RevisionNotFoundError) or code == "RevisionNotFound":
        cause, text = "absent", f"{repo} has no such revision"
    elif code == "RepoNotFound" or status == 404:
        cause, text = "absent", f"there is no {repo}, or it is private and your token may not see it"
    elif status == 401:
        cause, text = "denied", f"{repo} needs a valid token to {what} it: `hf auth login`"
    elif status == 403:
        cause, text = "denied", f"your token may not {what} {repo}"
    elif status == 429:
        after = headers.get("Retry-After")
        wait = f"try again in {after} s" if after else "try again later"
        cause, text = "limited", f"{repo}: the Hub limits your requests; {wait}"
    else:
        cause, text = "unreachable", f"{repo}: {status_sentence(status)}"
    return RemoteError(f"{text} (HTTP {status})", cause)


def status_sentence(status: int) -> str:
    """What an error status is."""
    return f"the Hub failed with HTTP {status}" if status >= 500 else f"the Hub answered HTTP {status}"


def wait_s(response: Any, attempt: int) -> float:
    """Seconds to wait before the next attempt: what the Hub asks for, else a little."""
    text = response.headers.get("Retry-After", "")
    if response.status_code == 429 and not text.isdecimal():
        found = re.search(r"t\s*=\s*(\d+)", response.headers.get("RateLimit", ""))
        text = found[1] if found else ""
    return float(text) if text.isdecimal() else pause_s(attempt)


def pause_s(attempt: int) -> float:
    """A little longer after each attempt, and never the same for two clients."""
    return random.uniform(0.5, 1.0) * 0.25 * float(2**attempt)
