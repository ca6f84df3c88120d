"""Who may see what: nothing becomes more public than it is, and pushing goes where it was told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hub_server import FakeHub
from sharing_kit import Block, Machine, call

import aitune_hf
from aitune_hf import AITuneModel
from aitune_hf.errors import ConfigError, HubError
from aitune_hf.hub.publish import push
from aitune_hf.hub.pull import pull
from aitune_hf.hub.remote import open_remote
from aitune_hf.hub.share import base_repository

REPO, BASE = "me/tuned", "org/base"
Machines = Callable[[str], Machine]


@pytest.fixture
def mine(machine: Machines) -> Machine:
    machine("mine").tuned(Block())
    return machine("mine")


@pytest.mark.parametrize("settings", [{"private": True}, {"gated": True}], ids=str)
def test_engines_of_a_restricted_base_are_not_published(hub: FakeHub, mine: Machine, settings: dict[str, bool]) -> None:
    hub.add(BASE, **settings)
    word = next(iter(settings))
    with pytest.raises(HubError, match=f"org/base is {word}.*force=True"):
        mine.push(Block(), REPO, base_model=BASE)
    assert REPO not in hub.repos  # nor was anything made
    hub.add(REPO)
    with pytest.raises(HubError, match="is public"):
        mine.push(Block(), REPO, base_model=BASE)
    assert len(hub.repos[REPO].history()) == 1
    assert len(mine.push(Block(), REPO, base_model=BASE, force=True).added) == 1


def test_they_may_go_to_a_private_repository(hub: FakeHub, mine: Machine) -> None:
    hub.add(BASE, gated=True)
    assert mine.push(Block(), "me/new", base_model=BASE, private=True).added
    assert hub.repos["me/new"].private
    hub.add("me/old", private=True)
    assert mine.push(Block(), "me/old", base_model=BASE).added


def test_a_new_branch_is_as_public_as_its_repository(hub: FakeHub, mine: Machine) -> None:
    hub.add(BASE, gated=True)
    hub.add(REPO)
    with pytest.raises(HubError, match="me/tuned is public"):
        mine.push(Block(), REPO, base_model=BASE, revision="next", private=True)
    assert list(hub.repos[REPO].refs) == ["main"]  # nor was the branch made
    hub.add("me/closed", private=True)
    assert mine.push(Block(), "me/closed", base_model=BASE, revision="next").added
    assert mine.push(Block(), "me/new", base_model=BASE, revision="next", private=True).added
    assert hub.repos["me/new"].private


def test_what_was_made_public_in_spite_of_the_wish_gets_nothing(hub: FakeHub, mine: Machine) -> None:
    hub.add(BASE, private=True)
    hub.always_public = True
    with pytest.raises(HubError, match="me/new is public"):
        mine.push(Block(), "me/new", base_model=BASE, private=True)
    assert len(hub.repos["me/new"].history()) == 1


def test_a_base_that_cannot_be_seen_counts_as_private(hub: FakeHub, mine: Machine) -> None:
    with pytest.raises(HubError, match="private or gated, or gone"):
        mine.push(Block(), REPO, base_model="org/secret")


def test_the_card_takes_the_licence_of_the_base(hub: FakeHub, mine: Machine) -> None:
    hub.add(BASE, card={"license": "cc-by-4.0"})
    mine.push(Block(), REPO, base_model=BASE)
    card = hub.repos[REPO].head.files["README.md"][0].decode()
    for line in ("license: cc-by-4.0", "library_name: aitune-hf", "base_model: org/base", "- aitune-hf"):
        assert line in card.partition("\n---\n")[0].splitlines()


def test_a_private_repository_needs_a_token_to_pull(
    hub: FakeHub, mine: Machine, machine: Machines, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    mine.push(Block(), REPO, private=True)
    monkeypatch.delenv("HF_TOKEN")
    assert machine("theirs").pull(Block(), REPO).installed == 0
    assert "private" in lines()[0]
    monkeypatch.setenv("HF_TOKEN", "hf_wrongtokenwrongtoken")
    again = machine("theirs").pull(Block(), REPO)
    assert "valid token" in again.problems[0]


def test_pushing_without_a_token_says_to_log_in(hub: FakeHub, mine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="hf auth login"):
        mine.push(Block(), REPO)


def test_opening_a_remote_asks_nobody_and_needs_no_login(
    hub: FakeHub, mine: Machine, machine: Machines, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    hub.add(REPO)
    remote = open_remote(REPO, token=True)
    assert hub.requests == []
    result = pull(machine("theirs").target(Block()), [remote])
    assert result.problems == (f"cannot read {REPO}: token=True, and nobody is logged in: `hf auth login`",)
    assert len(lines()) == 1
    with pytest.raises(HubError, match="token=True, and nobody is logged in"):
        push(mine.target(Block()), remote)


def test_a_branch_is_made_and_pulled_from(hub: FakeHub, mine: Machine, machine: Machines) -> None:
    hub.add(REPO)
    mine.push(Block(), REPO, revision="next")
    assert len(hub.repos[REPO].history("next")) == 2
    assert len(hub.repos[REPO].history()) == 1
    assert machine("theirs").pull(Block(), REPO, revision="next").installed == 1
    assert machine("others").pull(Block(), REPO).installed == 0


def test_a_pull_request_leaves_main_alone(hub: FakeHub, mine: Machine) -> None:
    hub.add(REPO)
    result = mine.push(Block(), REPO, create_pr=True)
    assert result.url.endswith("/discussions/1")
    assert len(hub.repos[REPO].history()) == 1
    assert len(hub.repos[REPO].history("refs/pr/1")) == 2


def test_a_model_shares_by_its_own_methods(hub: FakeHub, machine: Machines) -> None:
    from sharing_kit import X

    model = AITuneModel.from_model(Block(), config=machine("mine").config())
    model.tune([X])
    assert len(model.push_to_hub(REPO).added) == 1
    with pytest.raises(ConfigError, match="no push_to_hub of its own"):
        model.push_to_hub(REPO, weights=True)

    other = AITuneModel.from_model(Block(), config=machine("theirs").config())
    assert other.pull_tuned(REPO).misses[""].startswith("nobody but this machine is trusted")
    result = other.pull_tuned([REPO], trust=REPO)
    call(other)
    call(other)
    assert result.confirm()

    third = Block()
    assert aitune_hf.pull_tuned(third, REPO, machine("more").config(), trust=True).installed == 1
    assert aitune_hf.push_tuned(third, "me/copy", machine("more").config()).added


@pytest.mark.parametrize("repo", ["nothing", "a/b/c", "https//x", "", "-a/b"])
def test_what_is_no_place_is_an_error_at_once(hub: FakeHub, machine: Machines, repo: str) -> None:
    with pytest.raises(ConfigError, match="is no place for engines"):
        machine("mine").pull(Block(), repo)


@pytest.mark.parametrize(
    "repo",
    ["https://huggingface.co/me/tuned", "https://huggingface.co/me/tuned/", "https://hf.co/me/tuned", "hf://me/tuned"],
)
def test_the_address_of_a_repository_is_its_name(repo: str) -> None:
    assert open_remote(repo).url == "me/tuned"


@pytest.mark.parametrize("repo", ["https://huggingface.co/me", "https://huggingface.co/datasets/me/x", "hf://me/x/y"])
def test_other_addresses_of_the_hub_are_no_places(repo: str) -> None:
    with pytest.raises(ConfigError, match="is no place for engines"):
        open_remote(repo)


def test_the_base_is_read_from_what_the_library_noted(tmp_path: object) -> None:
    assert base_repository("org/name") == "org/name"
    snapshot = "/home/me/hub/models--org--name/snapshots/" + "0" * 40
    assert base_repository(snapshot) == "org/name"
    assert base_repository(str(tmp_path)) is None
    assert base_repository("") is None
    assert base_repository(None) is None


def test_what_a_trusted_key_signed_is_taken_from_anywhere(hub: FakeHub, mine: Machine, machine: Machines) -> None:
    pytest.importorskip("cryptography")
    from aitune_hf.hub.signature import PublicKey, generate_key

    ours, others = generate_key(), generate_key()
    mine.push(Block(), REPO, signing_key=ours.private)
    assert any(path.endswith("manifest.json.sig") for path in hub.repos[REPO].head.files)
    wary = machine("wary").pull(Block(), REPO, trust=PublicKey.from_pem(others.public))
    assert [outcome.answer for outcome in wary.modules] == ["recipe"]
    assert "not the signature of any of the 1 trusted keys" in wary.misses[""]
    assert not any(each.path.endswith("engine.json") for each in hub.requests)
    result = machine("theirs").pull(Block(), REPO, trust=PublicKey.from_pem(ours.public))
    assert [outcome.answer for outcome in result.modules] == ["hit"]
    assert result.installed == 1
