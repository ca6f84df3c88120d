"""Repos whose names only look like a trusted one."""

from __future__ import annotations

import pytest
from attack_kit import COMMIT, Victim, native_key

from aitune_hf.errors import ConfigError
from aitune_hf.hub.trust import Source, Trust

LOOK_ALIKES = [
    "Org/tuned",
    "org/Tuned",
    "org/tuned/",
    "org//tuned",
    "/org/tuned",
    "org/tuned ",
    " org/tuned",
    "org/tuned\n",
    "org/tuned\x00",
    "\u043erg/tuned",  # a Cyrillic letter
    "org/tune\u0501",
    "org/tuned\u200b",
    "\uff4frg/tuned",
    "org/tuned.git",
    "org/tuned@main",
    f"org/tuned@{COMMIT}",
    "org%2Ftuned",
    "org/./tuned",
    "org/../org/tuned",
    "org\\tuned",
    "org-/tuned",
    "datasets/org/tuned",
    "org/tuned/tree/main",
    "org",
    "tuned",
    "",
    "/home/user/org/tuned",
    "file:///org/tuned",
    "https://evil.example/org/tuned",
    "https://huggingface.co.evil.example/org/tuned",
    "https://huggingface.co@evil.example/org/tuned",
    "https://huggingface.co:8443/org/tuned",
    "http://huggingface.co/org/tuned",
    "HTTPS://huggingface.co/org/tuned",
    "https://huggingface.co//org/tuned",
    "https://huggingface.co/org/tuned?x=1",
    "https://huggingface.co/org/tuned#x",
    "https://huggingface.co/x/../org/tuned",
    "https://hugg\u0456ngface.co/org/tuned",
    "https://evil.example\\@huggingface.co/org/tuned",
]


@pytest.mark.parametrize("url", LOOK_ALIKES)
@pytest.mark.parametrize("trust", ["org/tuned", f"org/tuned@{COMMIT}"])
def test_a_look_alike_is_another_repo(victim: Victim, engine: bytes, url: str, trust: str) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "untrusted", "trusted", trust=trust, source=Source(url=url, commit=COMMIT))


def test_another_case_is_pointed_out(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    victim.refused(native_key(), "untrusted", "by case", trust="Org/tuned")


@pytest.mark.parametrize("value", [name for name in LOOK_ALIKES if name.isprintable() and not name.isascii()])
def test_letters_that_only_look_right_cannot_be_trusted_by_mistake(value: str) -> None:
    with pytest.raises(ConfigError):
        Trust.parse(value)


def test_a_repo_of_another_host_is_trusted_by_its_full_address_only(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": engine})
    source = Source(url="https://hub.example/org/tuned", commit=COMMIT)
    victim.refused(native_key(), "untrusted", "https://hub.example/org/tuned", trust="org/tuned", source=source)
    assert victim.admitted(native_key(), trust="https://hub.example/org/tuned", source=source).policy == "listed"
