"""Settings: checked at once, read from the environment, never changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from aitune_hf import TuneConfig
from aitune_hf.errors import AITuneError, ConfigError
from aitune_hf.strategy import LatencyBudget, MaxThroughput, OneBackend


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "lazy"),
        ("strategy", "best"),
        ("granularity", "layers"),
        ("min_samples", 0),
        ("min_speedup", 0.5),
        ("min_share", 1.0),
        ("timing_pairs", 1),
        ("max_depth_level", -1),
        ("dry_run_failure_probability", 2.0),
        ("skip_modules", "BertModel"),
        ("backends", "inductor"),
        ("effort", "some"),
        ("precision", "loose"),
        ("candidate_timeout_s", 0.0),
        ("batch_sizes", (1, 0)),
        ("batch_sizes", (1.5,)),
        ("strategy", object()),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_setting(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        TuneConfig(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AITuneError)


def test_it_is_immutable_and_replaced() -> None:
    config = TuneConfig(skip_modules=["A"], cache_dir="~/somewhere")  # type: ignore[arg-type]
    assert config.skip_modules == ("A",)
    assert config.cache_dir == Path("~/somewhere").expanduser()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.min_samples = 3  # type: ignore[misc]
    assert dataclasses.replace(config, min_samples=3).min_samples == 3


def test_the_environment_is_read_and_arguments_win() -> None:
    environ = {
        "AITUNE_HF_MIN_SAMPLES": "5",
        "AITUNE_HF_PROGRESS": "false",
        "AITUNE_HF_SKIP_MODULES": "A, B,",
        "AITUNE_HF_MIN_SPEEDUP": "1.5",
        "AITUNE_HF_STRATEGY": "first_working",
        "AITUNE_HF_MAX_DEPTH_LEVEL": "2",
        "AITUNE_HF_CACHE": "/elsewhere",
        "HOME": "/root",
    }
    config = TuneConfig.from_env(environ, min_samples=7)
    assert config.min_samples == 7
    assert config.progress is False
    assert config.skip_modules == ("A", "B")
    assert config.min_speedup == 1.5
    assert config.strategy == "first_working"
    assert config.max_depth_level == 2
    assert config.cache_dir is None


@pytest.mark.parametrize("variable", ["AITUNE_HF_PROGRESS", "AITUNE_HF_MIN_SAMPLES", "AITUNE_HF_TOLERANCE"])
def test_what_cannot_be_read_is_named(variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        TuneConfig.from_env({variable: "perhaps"})


def test_a_variable_that_is_no_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="AITUNE_HF_SPEED names no setting"):
        TuneConfig.from_env({"AITUNE_HF_SPEED": "1"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "latency_budget"}, "needs latency_budget_ms"),
        ({"strategy": "latency_budget", "latency_budget_ms": -1.0}, "latency_budget_ms must be more than 0"),
        ({"strategy": "one_backend"}, "exactly one name in backends"),
        ({"strategy": "one_backend", "backends": ("a", "b")}, "exactly one name in backends"),
        ({"precision": "relaxed"}, "needs a budget"),
    ],
)
def test_what_does_not_say_enough_is_an_error_at_once(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneConfig(**settings)


def test_strategies_by_name_or_as_objects() -> None:
    assert TuneConfig().chosen_strategy == MaxThroughput()
    named = TuneConfig(strategy="latency_budget", latency_budget_ms=5.0)
    assert named.chosen_strategy == LatencyBudget(latency_budget_ms=5.0)
    assert TuneConfig(strategy="one_backend", backends=("inductor",)).chosen_strategy == OneBackend()
    given = OneBackend(backend="openvino")
    assert TuneConfig(strategy=given).chosen_strategy is given
    read = TuneConfig.from_env(
        {
            "AITUNE_HF_STRATEGY": "latency_budget",
            "AITUNE_HF_LATENCY_BUDGET_MS": "2.5",
            "AITUNE_HF_EFFORT": "max",
            "AITUNE_HF_PRECISION": "strict",
            "AITUNE_HF_BATCH_SIZES": "1, 4",
            "AITUNE_HF_CANDIDATE_TIMEOUT_S": "60",
            "AITUNE_HF_DEBUG": "1",
        }
    )
    assert read.chosen_strategy == LatencyBudget(latency_budget_ms=2.5)
    assert (read.effort, read.precision, read.batch_sizes, read.debug) == ("max", "strict", (1, 4), True)
    assert read.candidate_timeout_s == 60


def test_a_build_that_hangs_does_not_hang_for_ever_unless_that_is_asked_for() -> None:
    assert TuneConfig().candidate_timeout_s == 1800
    assert TuneConfig(candidate_timeout_s=None).candidate_timeout_s is None


def test_batch_sizes_are_swept_with_the_highest_effort_or_when_named() -> None:
    assert TuneConfig().swept_batch_sizes == ()
    assert TuneConfig(effort="max").swept_batch_sizes == (1, 2, 4, 8)
    assert TuneConfig(effort="max", batch_sizes=()).swept_batch_sizes == ()
    assert TuneConfig(batch_sizes=[3]).swept_batch_sizes == (3,)  # type: ignore[arg-type]
