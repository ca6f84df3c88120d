"""Whatever the Hub does, a pull returns, says why in one line, and leaves a pipeline that works."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from hub_server import FakeHub, Fault
from sharing_kit import TOKEN, Block, Machine, Many, X, call

from aitune_hf.errors import HubError
from aitune_hf.hub import hub_remote
from aitune_hf.hub import pull as pull_module
from aitune_hf.hub.hub_remote import HubRemote
from aitune_hf.hub.remote import RemoteError, redacted

REPO = "me/tuned"
Machines = Callable[[str], Machine]
RECORD = "GET .*/pipelines/"
ENGINE = "GET .*/engine.json"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    start = HubRemote.__init__

    def init(self: HubRemote, *args: object, **kwargs: object) -> None:
        start(self, *args, **{"sleep": waits.append, **kwargs})  # type: ignore[arg-type]

    monkeypatch.setattr(HubRemote, "__init__", init)
    return waits


@pytest.fixture
def pushed(hub: FakeHub, machine: Machines) -> str:
    machine("mine").tuned(Block())
    return machine("mine").push(Block(), REPO).commit


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(RECORD, status=401), "needs a valid token"),
        (Fault(RECORD, status=401, headers={"X-Error-Code": "RepoNotFound"}), "there is no me/tuned, or it is private"),
        (Fault(RECORD, status=401, headers={"X-Error-Code": "GatedRepo"}), "is gated"),
        (Fault(RECORD, status=403, headers={"X-Error-Code": "GatedRepo"}), "is gated"),
        (Fault(RECORD, status=403), "your token may not read"),
        (Fault(RECORD, status=404, headers={"X-Error-Code": "RepoNotFound"}), "there is no me/tuned"),
        (Fault(RECORD, status=404, headers={"X-Error-Code": "RevisionNotFound"}), "no such revision"),
        (Fault(RECORD, status=429, headers={"Retry-After": "3600"}), "try again in 3600 s"),
        (Fault(RECORD, status=500), "HTTP 500"),
        (Fault(RECORD, status=503), "HTTP 503"),
        (Fault(RECORD, "drops"), "did not answer, or stopped midway"),
        (Fault(RECORD, "cut"), "did not answer, or stopped midway"),
        (Fault(RECORD, "wrong"), "cannot be used"),
        (Fault(ENGINE, status=500), "HTTP 500"),
        (Fault(ENGINE, status=404, headers={"X-Error-Code": "EntryNotFound"}), "has no aitune/v1"),
        (Fault(ENGINE, "cut"), "did not answer, or stopped midway"),
        (Fault(ENGINE, "wrong"), "arrived with other bytes"),
    ],
    ids=lambda value: f"{value.kind}-{value.status}" if isinstance(value, Fault) else None,
)
def test_a_failing_hub_is_one_line_and_eager(
    hub: FakeHub,
    machine: Machines,
    pushed: str,
    lines: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    said: str,
) -> None:
    hub.faults = [fault]
    module = Block()
    result = machine("theirs").pull(module, REPO)
    assert result.installed == 0
    assert said in result.problems[0]
    assert len(lines()) == 1
    assert said in lines()[0]
    assert torch.equal(call(module), module.linear(X).relu())
    assert TOKEN not in caplog.text + result.summary()
    # The next time it works: nothing wrong was kept.
    hub.faults = []
    assert machine("theirs").pull(Block(), REPO).installed == 1


@pytest.mark.parametrize("route", [RECORD, ENGINE])
@pytest.mark.parametrize("kind", ["status", "drops", "wrong", "slow"])
def test_a_fault_that_passes_is_not_noticed(
    hub: FakeHub, machine: Machines, pushed: str, lines: Callable[[], list[str]], route: str, kind: str
) -> None:
    hub.faults = [Fault(route, kind, 503, times=1)]  # type: ignore[arg-type]
    assert machine("theirs").pull(Block(), REPO).installed == 1
    assert lines() == []


def test_a_limit_is_waited_for_as_long_as_asked(
    hub: FakeHub, machine: Machines, pushed: str, no_waiting: list[float]
) -> None:
    hub.faults = [Fault(RECORD, status=429, headers={"Retry-After": "7"}, times=1)]
    assert machine("theirs").pull(Block(), REPO).installed == 1
    assert no_waiting == [7.0]
    hub.faults = [Fault(RECORD, status=429, headers={"RateLimit": '"api";r=0;t=4'}, times=1)]
    assert machine("others").pull(Block(), REPO).installed == 1
    assert no_waiting == [7.0, 4.0]
    hub.faults = [Fault(RECORD, status=429, headers={"Retry-After": "999"})]
    assert machine("more").pull(Block(), REPO).installed == 0
    assert no_waiting == [7.0, 4.0]


def test_one_broken_engine_does_not_cost_the_others(hub: FakeHub, machine: Machines) -> None:
    machine("mine").stock(Many(3))
    machine("mine").push(Many(3), REPO)
    hub.faults = [Fault(f"GET /large/{next(iter(hub.large))}", "wrong")]
    result = machine("theirs").pull(Many(3), REPO)
    assert result.installed == 2
    assert len(result.misses) == 1


def test_a_hub_that_hangs_is_given_up(
    hub: FakeHub, machine: Machines, pushed: str, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(hub_remote, "_TIMEOUT_S", 0.05)
    hub.faults = [Fault(RECORD, "slow")]
    assert machine("theirs").pull(Block(), REPO).installed == 0
    assert "did not answer" in lines()[0]
    assert len(lines()) == 1


@pytest.mark.parametrize("route", [RECORD, ENGINE])
def test_a_hub_that_sends_byte_by_byte_is_given_up(
    hub: FakeHub,
    machine: Machines,
    pushed: str,
    monkeypatch: pytest.MonkeyPatch,
    lines: Callable[[], list[str]],
    route: str,
) -> None:
    monkeypatch.setattr(hub_remote, "_BASE_S", 0.1)
    monkeypatch.setattr(hub_remote, "_LEAST_BYTES_PER_S", 1e9)
    hub.faults = [Fault(route, "trickle")]
    with hub.counted() as requests:
        result = machine("theirs").pull(Block(), REPO)
    assert result.installed == 0
    assert "is too slow" in result.problems[0]
    assert len(lines()) == 1
    assert sum(bool(re.search(route, str(each))) for each in requests) == 1  # nor is it tried again


def test_a_hub_that_goes_silent_is_not_asked_again(
    hub: FakeHub, machine: Machines, lines: Callable[[], list[str]]
) -> None:
    machine("mine").stock(Many(8))
    machine("mine").push(Many(8), REPO)
    hub.faults = [Fault("GET .*(manifest.json|model.bin)", status=503)]
    with hub.counted() as requests:
        result = machine("theirs").pull(Many(8), REPO)
    assert len(requests) == 1 + 3  # the record; the manifest of one engine, three tries
    assert len(result.misses) == 8
    assert len(result.problems) == len(lines()) == 1


def test_an_error_that_nobody_thought_of_is_the_failure_of_one_remote(
    hub: FakeHub,
    machine: Machines,
    pushed: str,
    monkeypatch: pytest.MonkeyPatch,
    lines: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    look_up = pull_module.look_up

    def fail_at_the_first(target: object, remote: HubRemote, **options: object) -> object:
        if remote.url == "me/odd":
            raise ZeroDivisionError("a fault of ours")
        return look_up(target, remote, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pull_module, "look_up", fail_at_the_first)
    result = machine("theirs").pull(Block(), "me/odd", REPO)
    assert result.installed == 1
    assert "me/odd: a fault of ours" in result.problems[0]
    assert len(lines()) == 1
    assert any(each.exc_info and each.levelno == logging.DEBUG for each in caplog.records)


def test_a_second_repository_stands_in_for_one_that_fails(hub: FakeHub, machine: Machines, pushed: str) -> None:
    result = machine("theirs").pull(Block(), "me/gone", REPO)
    assert result.installed == 1
    assert "there is no me/gone" in result.problems[0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("GET /api/models/me/tuned", status=401), "needs a valid token"),
        (Fault("GET /api/models/me/tuned", status=429), "limits your requests"),
        (Fault("POST .*/preupload/", status=403), "your token may not write"),
        (Fault("POST .*/commit/", status=403), "your token may not write"),
        (Fault("POST .*/commit/", status=429, headers={"Retry-After": "60"}), "try again in 60 s"),
        (Fault(RECORD, status=500), "HTTP 500"),
    ],
)
def test_a_push_that_fails_raises_with_the_cause(
    hub: FakeHub, machine: Machines, caplog: pytest.LogCaptureFixture, fault: Fault, said: str
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.add(REPO)
    machine("mine").tuned(Block())
    hub.faults = [fault]
    with pytest.raises(HubError, match=said) as caught:
        machine("mine").push(Block(), REPO)
    assert TOKEN not in caplog.text + str(caught.value)
    assert len(hub.repos[REPO].history()) == 1


def test_secrets_are_taken_out_of_messages() -> None:
    error = RemoteError("hf_abcdefghijklmnop and https://me:secret@host/x and Bearer xyz", "broken")
    assert str(error) == redacted(str(error))
    assert not any(secret in str(error) for secret in ("hf_abc", "secret", "xyz"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:p@ss@host/x", "https://***host/x"),
        ("s3://key:se:cr@et@bucket/x: no", "s3://***bucket/x: no"),
        ("https://host/x?X-Amz-Signature=abc&t=1 failed", "https://host/x failed"),
        ("'https://host/x?token=abc'", "'https://host/x'"),
        ("https://me@host/a?b=c@d#e", "https://***host/a"),
        ("mail me@host, what?", "mail me@host, what?"),
    ],
)
def test_passwords_and_queries_are_taken_out_of_addresses(text: str, shown: str) -> None:
    assert redacted(text) == shown
