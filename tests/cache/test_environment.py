from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aitune_hf.cache import Environment
from aitune_hf.cache.environment import cpu_isa_level, parse_cpu_features, public_version
from aitune_hf.errors import CacheError, ConfigError

MakeEnvironment = Callable[..., Environment]

V3_FLAGS = "sse4_2 ssse3 popcnt avx avx2 bmi1 bmi2 f16c fma abm movbe"
AVX512_FLAGS = f"{V3_FLAGS} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"


def facts(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "device_type": "cpu",
        "machine": "x86_64",
        "system": "Linux",
        "libc": ("glibc", "2.36"),
        "cpuinfo": f"processor\t: 0\nflags\t\t: fpu smep {AVX512_FLAGS}\n",
        "torch_capability": "AVX512",
        "torch_version": "2.13.0+cpu",
    }
    return {**values, **changes}


@pytest.mark.parametrize(
    ("changes", "tag"),
    [
        ({}, "torch2.13-cpu-avx512-x86_64-linux"),
        ({"cpuinfo": f"flags : {V3_FLAGS}"}, "torch2.13-cpu-avx2-x86_64-linux"),
        ({"cpuinfo": "flags : sse sse2"}, "torch2.13-cpu-sse-x86_64-linux"),
        (
            {"device_type": "cuda", "torch_version": "2.11.0+cu130", "cuda": "13.0", "sm": "sm90"},
            "torch2.11-cu130-sm90-x86_64-linux",
        ),
        ({"device_type": "cuda", "cuda": "rocm6.4", "sm": "gfx90a"}, "torch2.13-rocm64-gfx90a-x86_64-linux"),
        (
            {"machine": "arm64", "system": "Darwin", "cpuinfo": "", "torch_capability": "DEFAULT"},
            "torch2.13-cpu-neon-aarch64-darwin",
        ),
        (
            {"machine": "arm64", "system": "Darwin", "cpuinfo": "", "device_type": "mps"},
            "torch2.13-mps-aarch64-darwin",
        ),
        (
            {"machine": "aarch64", "cpuinfo": "Features : fp asimd sve", "torch_capability": "SVE256"},
            "torch2.13-cpu-sve256-aarch64-linux",
        ),
    ],
)
def test_tag_names_torch_device_level_architecture_and_os(changes: dict[str, Any], tag: str) -> None:
    assert Environment.from_facts(**facts(**changes)).tag == tag


@pytest.mark.parametrize(
    ("built", "sentence"),
    [
        ({}, None),
        ({"device_type": "cuda"}, "built for cuda, asked for cpu"),
        ({"arch": "aarch64"}, "built for aarch64, this machine has x86_64"),
        ({"os": "darwin"}, "built for darwin, this machine has linux"),
        ({"cpu_isa": "avx2"}, "built for avx2, this machine has avx512"),
        (
            {"cpu_isa": "avx2-portable"},
            "built as the portable variant avx2-portable, asked for avx512",
        ),
        ({"torch": "2.12.0"}, "built with torch 2.12, here 2.13"),
        ({"torch": "2.13.1"}, "built with torch 2.13.1, here 2.13.0"),
        ({"sm": "sm90"}, "built for sm90, this machine has none"),
        ({"cuda": "13.0"}, "built with CUDA 13.0, here none"),
        ({"libc": "glibc2.31"}, "built with glibc2.31, here glibc2.36"),
        ({"libc": None}, "built with an unknown libc, here glibc2.36"),
        (
            {"cpu_features": ("avx2", "avx512_vnni", "avx512f")},
            "built for a CPU with avx512_vnni, which this machine lacks",
        ),
        ({"cpu_features": ("avx2",)}, "built for a CPU without avx512f, which this machine has"),
    ],
)
def test_difference_names_the_first_factor_that_differs(
    make_environment: MakeEnvironment, built: dict[str, Any], sentence: str | None
) -> None:
    assert make_environment().difference(make_environment(**built)) == sentence


def test_a_machine_without_avx512_says_so(make_environment: MakeEnvironment) -> None:
    here = make_environment(cpu_isa="avx2", cpu_features=("avx2",))
    assert here.difference(make_environment()) == "built for avx512, this machine has avx2"


def test_round_trips_through_json_without_loss(make_environment: MakeEnvironment) -> None:
    environment = make_environment(sm="sm90", cuda="13.0")
    assert Environment.from_dict(environment.to_dict()) == environment


@pytest.mark.parametrize(
    "damage",
    [
        {"torch": 2},
        {"torch": "../x"},
        {"cpu_features": "avx2"},
        {"extra": 1},
        {"os": None},
        {"device_type": "cuda:0"},
    ],
)
def test_refuses_a_damaged_record(make_environment: MakeEnvironment, damage: dict[str, Any]) -> None:
    with pytest.raises(CacheError):
        Environment.from_dict({**make_environment().to_dict(), **damage})


def test_a_device_index_is_refused(make_environment: MakeEnvironment) -> None:
    with pytest.raises(ConfigError, match="without an index"):
        make_environment(device_type="cuda:0")


def test_portable_environments_of_unlike_cpus_are_equal() -> None:
    one = Environment.from_facts(**facts())
    other = Environment.from_facts(**facts(cpuinfo=f"flags : {V3_FLAGS} gfni", torch_capability="AVX2"))
    assert one != other
    assert one.portable() == other.portable() == one.portable().portable()
    assert one.portable().tag == "torch2.13-cpu-avx2-portable-x86_64-linux"
    assert (one.march, one.portable().march) == ("native", "x86-64-v3")


def test_portable_is_refused_on_a_cpu_below_the_baseline() -> None:
    with pytest.raises(ConfigError, match="x86-64-v3"):
        Environment.from_facts(**facts(cpuinfo="flags : sse2")).portable()


def test_host_code_of_gpu_engines_is_portable_so_that_unlike_hosts_share_them() -> None:
    gpu = {"device_type": "cuda", "cuda": "13.0", "sm": "sm90"}
    one = Environment.from_facts(**facts(**gpu))
    other = Environment.from_facts(**facts(cpuinfo=f"flags : {V3_FLAGS}", **gpu))
    assert one == other
    assert one.march == "x86-64-v3"


def test_a_cpu_engine_does_not_depend_on_torchs_cuda() -> None:
    with_cuda = Environment.from_facts(**facts(torch_version="2.13.0+cu130", cuda="13.0", sm="sm90"))
    assert with_cuda == Environment.from_facts(**facts())


@pytest.mark.parametrize(
    ("version", "public"),
    [
        ("2.13.0+cpu", "2.13.0"),
        ("2.11.0+cu130", "2.11.0"),
        ("2.13.0.post1", "2.13.0.post1"),
        ("2.14.0a0+gitABC", "2.14.0a0-gitabc"),
        ("2.14.0.dev20260101", "2.14.0.dev20260101"),
    ],
)
def test_a_release_drops_its_local_version_and_a_prerelease_keeps_it(version: str, public: str) -> None:
    assert public_version(version) == public


def test_processor_flags_win_over_what_torch_was_told() -> None:
    assert cpu_isa_level("x86_64", set(AVX512_FLAGS.split()), "AVX2") == "avx512"
    assert cpu_isa_level("x86_64", frozenset(), "AVX2") == "avx2"
    assert cpu_isa_level("x86_64", frozenset(), "NO AVX") == "sse"


def test_only_extensions_a_compiler_uses_are_factors() -> None:
    assert parse_cpu_features("model name : X\nflags : smep vmx rdrand avx2 fma\n") == {"avx2", "fma"}
    assert parse_cpu_features("") == frozenset()


def test_this_machine_has_an_environment() -> None:
    environment = Environment.current("cpu")
    assert Environment.from_dict(environment.to_dict()) == environment
    assert environment.tag.startswith("torch")
    assert environment.cuda is None


def test_plans_have_an_environment_of_their_own() -> None:
    """They need a driver and their own runtime: neither torch nor the CPU beside the GPU matters, the GPU does."""
    whole = Environment(
        device_type="cuda",
        arch="x86_64",
        os="linux",
        torch="2.13.0",
        cuda="13.0",
        sm="sm89",
        cpu_isa="avx2",
        libc="glibc2.36",
    )
    plans = whole.for_plans()
    assert plans.tag == "cuda-sm89-x86_64-linux"
    assert not plans.is_data
    assert plans == replace(whole, torch="2.11.0", cuda="12.8", libc="glibc2.41").for_plans() == plans.for_plans()
    assert plans != replace(whole, sm="sm86").for_plans()
    assert Environment.from_dict(plans.to_dict()) == plans
    assert whole.for_data() != plans
