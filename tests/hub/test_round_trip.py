"""Pushing and pulling: what goes in comes out on another machine, and what does not is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hub_server import FakeHub
from huggingface_hub import constants
from sharing_kit import Block, Machine, Many, PlainBackend, X, call, elsewhere

from aitune_hf import TuneConfig, pull_tuned, push_tuned, stats, tune
from aitune_hf.backends import registry
from aitune_hf.backends.base import Recipe
from aitune_hf.errors import ConfigError, HubError
from aitune_hf.hub.explain import explain_remote
from aitune_hf.hub.publish import push
from aitune_hf.hub.pull import pull
from aitune_hf.hub.remote import open_remote
from aitune_hf.hub.target import Target
from aitune_hf.hub.trust import Trust
from aitune_hf.tuning.hints import read_hints

REPO = "me/tuned"
Machines = Callable[[str], Machine]


def test_an_engine_tuned_here_answers_calls_there(hub: FakeHub, machine: Machines) -> None:
    module = Block()
    machine("mine").tuned(module)
    pushed = machine("mine").push(module, REPO)
    assert len(pushed.added) == 1
    assert pushed.commit == hub.repos[REPO].head.oid
    assert pushed.bytes > 0

    other = Block()
    result = machine("theirs").pull(other, REPO, trust=REPO)
    assert [outcome.answer for outcome in result.modules] == ["hit"]
    assert result.installed == 1
    assert result.bytes > 0

    # Nothing ran yet, and a pull does not claim it did. The first call is the check against eager.
    assert not result.confirm()
    assert "not called yet" in result.confirm().summary()
    call(other)
    assert not result.confirm()
    assert torch.equal(call(other), other.linear(X).relu())
    assert result.confirm()


def test_what_is_pushed_again_makes_no_commit(hub: FakeHub, machine: Machines) -> None:
    mine, module = machine("mine"), Block()
    mine.tuned(module)
    mine.push(module, REPO)
    before = hub.repos[REPO].head.oid
    with hub.counted() as requests:
        again = mine.push(module, REPO)
    assert (again.added, len(again.unchanged), again.url) == ((), 1, "")
    assert "nothing to commit" in again.summary()
    assert hub.repos[REPO].head.oid == before
    assert len(requests) == 2  # the head, and the record at it


def test_a_second_pull_fetches_nothing(hub: FakeHub, machine: Machines) -> None:
    module = Block()
    machine("mine").tuned(module)
    machine("mine").push(module, REPO)
    machine("theirs").pull(Block(), REPO)
    with hub.counted() as requests:
        again = machine("theirs").pull(Block(), REPO)
    assert len(requests) == 1
    assert [outcome.answer for outcome in again.modules] == ["local"]
    assert (again.installed, again.bytes) == (1, 0)


class Twins(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([Block(3), Block(3)])
        self.eval()


def test_engines_with_weights_go_to_the_modules_that_have_them(hub: FakeHub, machine: Machines) -> None:
    def baking(name: str) -> TuneConfig:
        backend = PlainBackend()
        backend.recipes = lambda device: [Recipe(effort="fast", weights="baked")]  # type: ignore[method-assign]
        return machine(name).config(backends=(backend,))

    module, mine = Twins(), baking("mine")
    for part in module.parts:
        tune(part, [X], mine)
    Target({"": module}, mine, "Twins").remember(["parts.0", "parts.1"])
    assert len(push_tuned(module, REPO, mine).added) == 2

    same = Twins()
    same.load_state_dict(module.state_dict())
    result = pull_tuned(same, REPO, baking("theirs"), trust=True)
    assert [outcome.answer for outcome in result.modules] == ["hit", "hit"], result.summary()
    for _ in range(2):
        for part in same.parts:
            call(part)
    assert result.confirm(), result.confirm().summary()

    others = pull_tuned(Twins(), REPO, baking("others"), trust=True)
    assert set(others.misses.values()) == {
        "it holds weights, and those of other ones; its recipe is kept, and tune() tries it first"
    }


def test_modules_of_equal_structure_share_one_download(hub: FakeHub, machine: Machines) -> None:
    module, target = Twins(), machine("mine").tuned(Block(3))
    whole = machine("mine").target(module)
    whole.remember(["parts.0", "parts.1"])
    machine("mine").push(module, REPO)
    assert len(target.verdicts(Block(3))[0].engines) == 1
    with hub.counted() as requests:
        result = machine("theirs").pull(Twins(), REPO)
    assert len(requests) == 3  # the record, and two files of one engine
    assert [outcome.answer for outcome in result.modules] == ["hit", "hit"]


def test_an_untrusted_engine_is_not_fetched_and_leaves_its_recipe(
    hub: FakeHub, machine: Machines, lines: Callable[[], list[str]]
) -> None:
    module = Block()
    mine = machine("mine").with_options(level=3)
    target = mine.tuned(module)
    mine.push(module, REPO)
    theirs = machine("theirs")
    with hub.counted() as requests:
        result = theirs.pull(Block(), REPO, trust=None)
    assert len(requests) == 1
    assert [outcome.answer for outcome in result.modules] == ["recipe"]
    assert "trusted" in result.misses[""]
    assert "tune() tries it first" in result.misses[""]
    verdict = target.verdicts(module)[0]
    hints = read_hints(theirs.target(module).store, verdict.hierarchy_hash, verdict.graph.key)
    assert [(hint.backend, hint.options) for hint in hints] == [("fake", {"level": 3})]
    (line,) = lines()
    assert "1 engines of me/tuned@" in line
    assert f"give trust='{REPO}@{hub.repos[REPO].head.oid}'" in line


def test_tune_builds_the_recipe_first(hub: FakeHub, machine: Machines) -> None:
    mine = machine("mine").with_options(level=3)
    mine.tuned(Block())
    mine.push(Block(), REPO)
    backend = PlainBackend()
    offered = [Recipe(effort="fast"), Recipe(options={"level": 3}, effort="max")]
    backend.recipes = lambda device: offered  # type: ignore[method-assign]
    config = machine("theirs").config(backends=(backend,), effort="fast")
    module = Block()
    assert pull_tuned(module, REPO, config).modules[0].answer == "recipe"
    tune(module, [X], config)
    assert backend.options[0] == {"level": 3}


def test_trust_in_one_commit_covers_no_other(hub: FakeHub, machine: Machines) -> None:
    module = Block()
    machine("mine").tuned(module)
    good = machine("mine").push(module, REPO).commit
    machine("mine").with_options(level=2).tuned(Block(2))
    machine("mine").push(Block(2), REPO)
    newest = machine("theirs").pull(Block(), REPO, trust=f"{REPO}@{good}", revision="main")
    assert [outcome.answer for outcome in newest.modules] == ["recipe"]
    pinned = machine("theirs").pull(Block(), REPO, trust=f"{REPO}@{good}", revision=good)
    assert [outcome.answer for outcome in pinned.modules] == ["hit"]


def test_a_repository_trusted_at_one_commit_is_read_there(hub: FakeHub, machine: Machines) -> None:
    machine("mine").tuned(Block())
    good = machine("mine").push(Block(), REPO).commit
    machine("mine").with_options(level=2).tuned(Block(2))
    later = machine("mine").push(Block(2), REPO).commit
    pinned = machine("theirs").pull(Block(), REPO, trust=f"{REPO}@{good}")
    assert [outcome.answer for outcome in pinned.modules] == ["hit"]
    assert pinned.repos == (f"{REPO}@{good[:12]}",)
    for trust in ([f"{REPO}@{good}", f"{REPO}@{later}"], [f"{REPO}@{good}", REPO], True, None):
        newest = machine("others").pull(Block(), REPO, trust=trust)
        assert newest.repos == (f"{REPO}@{later[:12]}",)


def test_a_name_may_say_the_commit(hub: FakeHub, machine: Machines) -> None:
    machine("mine").tuned(Block())
    good = machine("mine").push(Block(), REPO).commit
    hub.repos[REPO].commit({}, "all gone")
    for name in (f"{REPO}@{good}", f"https://huggingface.co/{REPO}@{good}", f"hf://{REPO}@{good}"):
        assert machine(name.replace("/", " ")).pull(Block(), name).repos == (f"{REPO}@{good[:12]}",)
        assert machine("theirs").look_up(Block(), name).hits
    later = hub.repos[REPO].commit(hub.repos[REPO].at(good).files, "back again").oid  # type: ignore[union-attr]
    both = machine("both").pull(Block(), f"{REPO}@{good}", f"{REPO}@{later}", trust=f"{REPO}@{later}")
    assert [outcome.answer for outcome in both.modules] == ["hit"]  # by the second name
    with pytest.raises(ConfigError, match="names a commit already"):
        machine("theirs").pull(Block(), f"{REPO}@{good}", revision="main")
    with pytest.raises(ConfigError, match="for a branch give revision="):
        machine("theirs").pull(Block(), f"{REPO}@main")
    with pytest.raises(ConfigError, match="cannot be added to"):
        machine("mine").push(Block(), f"{REPO}@{good}")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"cpu_isa": "avx2", "cpu_features": ("avx2",)}, "built for avx512, this machine has avx2"),
        ({"torch": "2.99.1"}, "built with torch 2.13, here 2.99"),
        ({"libc": "glibc2.17"}, "here glibc2.17"),
    ],
)
def test_an_engine_for_another_machine_is_a_named_miss(
    hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], said: str
) -> None:
    elsewhere(monkeypatch, cpu_isa="avx512", torch="2.13.0")
    module = Block()
    machine("mine").tuned(module)
    machine("mine").push(module, REPO)
    elsewhere(monkeypatch, **facts)
    with hub.counted() as requests:
        result = machine("theirs").pull(Block(), REPO)
    assert len(requests) == 1
    assert said in result.misses[""]
    assert result.installed == 0


class DataBackend(PlainBackend):
    """Its artefacts are data."""

    native = False

    def __init__(self) -> None:
        super().__init__("datafake")


def test_data_fits_every_machine_and_needs_no_trust(
    hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = SimpleNamespace(load=lambda: DataBackend)
    monkeypatch.setattr(registry, "_third_party", lambda: {"datafake": point})
    module, mine = Block(), machine("mine")
    tune(module, [X], mine.config(backends=("datafake",)))
    pushed = push(mine.target(module, backends=("datafake",)), open_remote(REPO))
    assert "/data-cpu/" in pushed.added[0]
    elsewhere(monkeypatch, cpu_isa="avx2", torch="2.99.0", libc="glibc2.17")
    other = Block()
    result = pull(machine("theirs").target(other, backends=("datafake",)), [open_remote(REPO)])
    assert [outcome.answer for outcome in result.modules] == ["hit"], result.summary()
    call(other)
    call(other)
    assert result.confirm()


def test_data_in_a_format_that_is_not_read_here_is_a_named_miss(
    hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Newer(DataBackend):
        format = 2

    point = SimpleNamespace(load=lambda: DataBackend)
    monkeypatch.setattr(registry, "_third_party", lambda: {"datafake": point})
    module, mine = Block(), machine("mine")
    tune(module, [X], mine.config(backends=("datafake",)))
    push(mine.target(module, backends=("datafake",)), open_remote(REPO))
    point.load = lambda: Newer
    result = pull(machine("theirs").target(Block(), backends=("datafake",)), [open_remote(REPO)])
    assert "in datafake's format 1, here 2 is read" in result.misses[""]
    assert result.installed == 0


def test_portable_engines_fit_machines_that_build_for_themselves(
    hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    v3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt", "sse4_2", "ssse3")
    elsewhere(monkeypatch, arch="x86_64", cpu_isa="avx512", cpu_features=(*v3, "avx512f"))
    module, mine = Block(), machine("mine")
    tune(module, [X], mine.config(portable=True))
    assert push(mine.target(module, portable=True), open_remote(REPO)).added
    elsewhere(monkeypatch, arch="x86_64", cpu_isa="avx2", cpu_features=v3)
    assert machine("theirs").pull(Block(), REPO).installed == 1
    elsewhere(monkeypatch, arch="x86_64", cpu_isa="sse", cpu_features=("sse4_2",))
    old = machine("old").pull(Block(), REPO)
    assert old.misses[""].startswith("built for x86-64-v3 CPUs, this machine has sse")


def test_machines_of_two_kinds_share_one_record(
    hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level in ("avx512", "avx2"):
        elsewhere(monkeypatch, cpu_isa=level)
        machine(level).tuned(Block())
        assert len(machine(level).push(Block(), REPO).added) == 1
    for level in ("avx512", "avx2"):
        elsewhere(monkeypatch, cpu_isa=level)
        result = machine(f"another {level}").pull(Block(), REPO)
        assert [outcome.answer for outcome in result.modules] == ["hit"]
        assert level in result.modules[0].engines[0]


def test_repositories_are_asked_in_order(hub: FakeHub, machine: Machines, lines: Callable[[], list[str]]) -> None:
    for number, name in enumerate(("me/first", "me/second")):
        mine = machine(name).with_options(level=number)
        mine.tuned(Block())
        mine.push(Block(), name)
    both = machine("theirs").pull(Block(), "me/first", "me/second")
    assert [outcome.repo for outcome in both.modules] == ["me/first"]
    hub.add("me/empty")
    late = machine("others").pull(Block(), "me/empty", "me/second")
    assert [outcome.repo for outcome in late.modules] == ["me/second"]
    assert lines() == []  # what one does not have and another has is no reason to warn
    only = machine("wary").pull(Block(), "me/first", "me/second", trust="me/second")
    assert [(outcome.answer, outcome.repo) for outcome in only.modules] == [("hit", "me/second")]


def test_another_structure_is_a_miss_and_explained(
    hub: FakeHub, machine: Machines, lines: Callable[[], list[str]]
) -> None:
    machine("mine").tuned(Block(4))
    machine("mine").push(Block(4), REPO)
    result = machine("theirs").pull(Block(5), REPO)
    assert result.modules == ()
    assert result.problems == (f"{REPO}: no engines for this pipeline structure",)
    assert len(lines()) == 1
    text = explain_remote(machine("theirs").target(Block(5)), open_remote(REPO))
    assert "of another structure: the model" in text
    assert "fits" in explain_remote(machine("theirs").target(Block(4)), open_remote(REPO))


def test_a_backend_that_is_not_in_use_is_a_named_miss(hub: FakeHub, machine: Machines) -> None:
    machine("mine").tuned(Block())
    machine("mine").push(Block(), REPO)
    found = machine("theirs").target(Block(), backends=("inductor",))
    result = pull(found, [open_remote(REPO)], trust=Trust(everything=True))
    assert "the backend fake is not in use here" in result.misses[""]


def test_a_decision_made_here_stands(hub: FakeHub, machine: Machines) -> None:
    machine("mine").with_options(level=1).tuned(Block())
    machine("mine").with_options(level=1).push(Block(), REPO)
    own = machine("theirs").with_options(level=2)
    own.tuned(Block())
    result = own.pull(Block(), REPO)
    assert [outcome.answer for outcome in result.modules] == ["local"]
    assert result.installed == 1


def test_a_target_that_was_never_tuned_has_nothing_to_push(hub: FakeHub, machine: Machines) -> None:
    with pytest.raises(HubError, match=r"no engines of Block to push.*Run tune"):
        machine("mine").push(Block(), REPO)
    assert REPO not in hub.repos
    assert hub.requests == []


def test_only_what_the_pipeline_uses_is_pushed(hub: FakeHub, machine: Machines) -> None:
    mine = machine("mine")
    mine.stock(Many(3))
    mine.tuned(Block(7))
    pushed = mine.push(Block(7), REPO)
    assert len(pushed.added) == 1
    manifests = [path for path in hub.repos[REPO].head.files if path.endswith("manifest.json")]
    assert len(manifests) == 1


def test_an_engine_that_is_gone_is_said_and_the_rest_is_pushed(hub: FakeHub, machine: Machines) -> None:
    target = machine("mine").stock(Many(3))
    victim = target.store.entries()[0]
    for path in Path(victim.path).iterdir():
        path.unlink()
    Path(victim.path).rmdir()
    gone = str(victim.manifest.key.entry_path)
    pushed = machine("mine").push(Many(3), REPO)
    uses_it = any(gone in line for line in pushed.missing)
    assert len(pushed.added) == (2 if uses_it else 3)


def test_large_files_come_from_another_host_without_the_token(hub: FakeHub, machine: Machines) -> None:
    machine("mine").stock(Many(1), data=b"\0" * 100_000)
    machine("mine").push(Many(1), REPO)
    assert hub.large
    result = machine("theirs").pull(Many(1), REPO)
    assert result.bytes > 100_000
    elsewhere_asked = [each for each in hub.requests if each.host.startswith("localhost")]
    assert elsewhere_asked
    assert all(each.authorization is None for each in elsewhere_asked)


def test_an_engine_that_answers_wrong_here_is_not_fetched_again(hub: FakeHub, machine: Machines) -> None:
    machine("mine").tuned(Block())
    machine("mine").push(Block(), REPO)
    wrong = PlainBackend(spoil=lambda leaves: [leaf + 1 for leaf in leaves])
    config = machine("theirs").config(backends=(wrong,))
    module = Block()
    result = pull_tuned(module, REPO, config, trust=True)
    assert result.installed == 1
    for _ in range(2):
        assert torch.equal(call(module), module.linear(X).relu())
    assert not result.confirm()
    with hub.counted() as requests:
        again = pull_tuned(Block(), REPO, config, trust=True)
    assert len(requests) == 1
    assert "it failed on this machine earlier: wrong in use" in again.misses[""]


def test_a_module_that_only_counts_its_calls_takes_an_engine(hub: FakeHub, machine: Machines) -> None:
    machine("mine").tuned(Block())
    machine("mine").push(Block(), REPO)
    module = Block()
    tune(module, [X], machine("theirs").config(min_parameters=10**9))
    assert stats(module).modules
    result = machine("theirs").pull(module, REPO)
    assert result.installed == 1
    call(module)
    call(module)
    assert result.confirm()


def test_offline_says_so_when_pushing(hub: FakeHub, machine: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("mine").tuned(Block())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        machine("mine").push(Block(), REPO)
    assert hub.requests == []
