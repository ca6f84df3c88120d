"""What the values of ``trust=`` mean, and which of them are refused at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aitune_hf.errors import ConfigError
from aitune_hf.hub.signature import KeyPair, PublicKey, generate_key, sign_manifest
from aitune_hf.hub.trust import Source, Trust, TrustedRepo

SHA = "0123456789abcdef0123456789abcdef01234567"
HERE = Source(url="org/repo", commit=SHA)


@pytest.fixture(scope="module")
def pair() -> KeyPair:
    return generate_key()


@pytest.mark.parametrize("value", [None, "local", False, [], (), ["local", None]])
def test_nobody_is_trusted_by_default(value: object) -> None:
    trust = Trust.parse(value)
    assert trust == Trust()
    decision = trust.decide(HERE, b"manifest")
    assert not decision.trusted
    assert "nobody but this machine is trusted" in decision.reason
    assert "org/repo" in decision.reason


def test_everybody() -> None:
    assert Trust.parse(True).decide(Source(url="/anything"), b"").policy == "explicit"


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("org/repo", "listed"),
        (f"org/repo@{SHA}", "pinned"),
        (f"https://huggingface.co/org/repo@{SHA}", "pinned"),
        ("https://huggingface.co/org/repo", "listed"),
        (["other/repo", "org/repo"], "listed"),
        (("org/repo", f"org/repo@{SHA}"), "pinned"),
        ([f"org/repo@{'0' * 40}", f"org/repo@{SHA}"], "pinned"),
        ([f"org/repo@{'0' * 40}", True], "explicit"),
        (f"org/repo@{'0' * 40}", None),
        ("other/repo", None),
    ],
)
def test_repos(value: object, policy: str | None) -> None:
    assert Trust.parse(value).decide(HERE, b"").policy == policy


def test_what_was_parsed_is_taken_as_it_is() -> None:
    trust = Trust.parse("org/repo")
    assert Trust.parse(trust) is trust
    assert Trust.parse([trust, "a/b"]).repos == (TrustedRepo(repo="org/repo"), TrustedRepo(repo="a/b"))


def test_an_allow_list(tmp_path: Path) -> None:
    path = tmp_path / "trusted.txt"
    path.write_text(f"# ours\n\norg/repo   # any commit\n  a/b@{SHA}\n")
    for value in (path, str(path), [path]):
        trust = Trust.parse(value)
        assert [str(repo) for repo in trust.repos] == ["org/repo", f"a/b@{SHA}"]
    path.write_text("# nobody yet\n")
    assert Trust.parse(path) == Trust()


def test_a_relative_path_needs_its_dot_where_it_looks_like_a_repo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "allowed").write_text("a/b")
    monkeypatch.chdir(tmp_path)
    assert str(Trust.parse("./keys/allowed").repos[0]) == "a/b"
    assert str(Trust.parse(Path("keys/allowed")).repos[0]) == "a/b"
    with pytest.raises(ConfigError, match=r"write '\./keys/allowed' for the file"):
        Trust.parse("keys/allowed")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "org",
        "yes",
        "true",
        "Local",
        "org/repo/",
        "org/re po",
        "org/repo@main",
        "a/b/c",
        "no/such/file.pem",
        "http://huggingface.co/org/repo",
        "https://user@huggingface.co/org/repo",
        "x" * 5000,
        "a\x00b",
        0,
        1,
        1.5,
        b"org/repo",
        object(),
        {"org/repo": True},
        ["org/repo", 1],
        [["org/repo"]],
    ],
)
def test_what_means_nothing_is_an_error_at_once(value: object) -> None:
    with pytest.raises(ConfigError, match="trust"):
        Trust.parse(value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"org/repo\nnot a repo\n", "line 2"),
        (b"org/repo@main", "no full commit"),
        (b"\xff\xfe\x00", "neither a PEM public key nor a text file"),
        (b"-----BEGIN PUBLIC KEY-----\nbroken\n-----END PUBLIC KEY-----\n", "is no PEM public key"),
        (b"org/repo\n" * 200_000, "more than"),
    ],
)
def test_an_unusable_file_is_an_error_at_once(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        Trust.parse(str(path))


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for value in (tmp_path / "none", tmp_path, str(tmp_path)):
        with pytest.raises(ConfigError):
            Trust.parse(value)


def test_keys(tmp_path: Path, pair: KeyPair) -> None:
    path = tmp_path / "publisher.pem"
    path.write_bytes(pair.public)
    key = PublicKey.from_pem(pair.public)
    signed = Source(url="anywhere/else", signature=sign_manifest(pair.private, b"manifest"))
    for value in (path, str(path), key, key.native(), [key, "a/b"]):
        decision = Trust.parse(value).decide(signed, b"manifest")
        assert (decision.policy, decision.key) == ("signed", key)
        assert not Trust.parse(value).decide(signed, b"another").trusted
        assert not Trust.parse(value).decide(HERE, b"manifest").trusted


def test_a_private_key_is_not_taken_for_a_public_one(tmp_path: Path, pair: KeyPair) -> None:
    path = tmp_path / "secret.pem"
    path.write_bytes(pair.private)
    with pytest.raises(ConfigError, match="private key") as caught:
        Trust.parse(path)
    assert pair.private.splitlines()[1].decode() not in str(caught.value)


def test_without_the_extra_a_key_is_an_error_at_once(
    tmp_path: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "publisher.pem").write_bytes(pair.public)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"aitune-hf\[signing\]"):
        Trust.parse(tmp_path / "publisher.pem")
    with pytest.raises(ConfigError, match=r"aitune-hf\[signing\]"):
        generate_key()
    assert Trust.parse(["org/repo"]).decide(HERE, b"").trusted


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("org/repo", "org/repo"),
        ("https://huggingface.co/org/repo", "org/repo"),
        ("http://127.0.0.1:8080/org/repo", "http://127.0.0.1:8080/org/repo"),
        ("https://user:hf_secret@huggingface.co/org/repo", "a source that is no Hub repo"),
        ("/home/somebody/cache", "a source that is no Hub repo"),
        ("s3://key:secret@bucket/path", "a source that is no Hub repo"),
    ],
)
def test_the_name_of_a_source_tells_nothing_private(url: str, name: str) -> None:
    assert Source(url=url).name == name
