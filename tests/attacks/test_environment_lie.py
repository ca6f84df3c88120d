"""An engine for another machine that says it is for this one, and the other way round."""

from __future__ import annotations

from typing import Any

import pytest
from attack_kit import Victim, environment, native_key


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_isa": "avx2"},
        {"cpu_features": ("avx2", "avx512f", "amx_tile")},
        {"torch": "2.12.0"},
        {"libc": "musl1.2"},
        {"arch": "aarch64"},
        {"device_type": "cuda", "sm": "sm90", "cuda": "13.0"},
    ],
)
def test_an_engine_of_another_machine_is_refused(victim: Victim, engine: bytes, change: dict[str, Any]) -> None:
    victim.lay_entry(native_key(environment=environment(**change)), {"model.pt2": engine})
    victim.refused(native_key(), "foreign", "manifest.json is of another engine")


def test_what_the_rest_of_the_manifest_claims_does_not_count(victim: Victim, engine: bytes) -> None:
    other = native_key(environment=environment(torch="2.12.0"))
    claims = {"environment": native_key().environment.to_dict(), "key": native_key().to_dict()}
    victim.lay_entry(other, {"model.pt2": engine}, factors=claims, provenance={"torch": "2.13.0"}, engine=claims)
    victim.refused(native_key(), "foreign", "torch 2.12")


def test_a_machine_code_of_another_kind_is_caught_by_the_trial(victim: Victim) -> None:
    # The key lies about the bytes; only running them can tell, and that is the trial's task.
    victim.lay_entry(native_key(), {"model.bin": b"\x7fELF of another CPU"})

    def illegal_instruction() -> None:
        raise OSError("its process was killed by SIGILL")

    victim.refused(native_key(), "crashed", "model.bin failed its first load", meddles=illegal_instruction)
