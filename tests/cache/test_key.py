from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from aitune_hf.cache import EngineKey
from aitune_hf.errors import CacheError, ConfigError

MakeKey = Callable[..., EngineKey]


def test_entry_path_shows_module_graph_environment_backend_and_options(make_key: MakeKey) -> None:
    key = make_key(hierarchy_hash="cd" * 32)
    expected = f"aitune/v1/cd/{'cd' * 32}/{'ab' * 8}/torch2.13-cpu-avx512-x86_64-linux/inductor-{key.options8}"
    assert str(key.entry_path) == expected
    assert len(key.options8) == 8


@pytest.mark.parametrize(
    "change",
    [
        {"hierarchy_hash": "e" * 64},
        {"graph_key": "12345678"},
        {"environment": {"torch": "2.13.1"}},
        {"environment": {"libc": "glibc2.31"}},
        {"environment": {"cpu_features": ("avx2",)}},
        {"backend": "openvino"},
        {"backend_version": "2.13.1"},
        {"options": {"max_autotune": True, "level": 2}},
        {"options": {"max_autotune": 0, "level": 2}},
        {"options": {"max_autotune": False, "level": 2.0}},
        {"weights_digest": "f" * 64},
    ],
)
def test_every_factor_makes_another_key_and_path(make_key: MakeKey, change: dict[str, Any]) -> None:
    one, other = make_key(), make_key(**change)
    assert one != other
    assert one.digest != other.digest
    assert one.entry_path != other.entry_path
    assert one.difference(other)
    assert one.difference(make_key()) is None


def test_order_of_options_and_kind_of_sequence_do_not_matter(make_key: MakeKey) -> None:
    one = make_key(options={"a": (1, 2), "b": None})
    other = make_key(options={"b": None, "a": [1, 2]})
    assert one == other
    assert hash(one) == hash(other)


def test_a_key_keeps_its_options_when_the_callers_change(make_key: MakeKey) -> None:
    options = {"a": [1]}
    key = make_key(options=options)
    options["a"].append(2)
    assert key.options == {"a": [1]}


def test_survives_json_copy_and_pickle(make_key: MakeKey) -> None:
    key = make_key(weights_digest="a" * 64, options={"a": (1, {"b": 2.5})})
    assert EngineKey.from_dict(key.to_dict()) == copy.deepcopy(key) == pickle.loads(pickle.dumps(key)) == key


def test_paths_are_the_same_in_every_process(make_key: MakeKey) -> None:
    code = (
        "import json, sys; from aitune_hf.cache import EngineKey;"
        "print(EngineKey.from_dict(json.load(sys.stdin)).entry_path)"
    )
    key = make_key()
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(key.to_dict()),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == str(key.entry_path)


def test_options8_is_a_golden_value(make_key: MakeKey) -> None:
    factors = (
        '{"backend_version":"2.13.0","environment":{"arch":"x86_64","cpu_features":["avx2","avx512f"],'
        '"cpu_isa":"avx512","cuda":null,"device_type":"cpu","libc":"glibc2.36","os":"linux","sm":null,'
        '"torch":"2.13.0"},"options":{"level":2,"max_autotune":false},"weights_digest":null}'
    )
    assert make_key().options8 == hashlib.sha256(factors.encode()).hexdigest()[:8]


@pytest.mark.parametrize(
    "wrong",
    [
        {"hierarchy_hash": "E" * 64},
        {"hierarchy_hash": "../" + "a" * 61},
        {"graph_key": "../../x"},
        {"graph_key": ""},
        {"backend": "In/ductor"},
        {"backend_version": ""},
        {"options": {"x": float("nan")}},
        {"options": {"x": object()}},
        {"weights_digest": "short"},
    ],
)
def test_malformed_factors_are_refused(make_key: MakeKey, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_key(**wrong)
    if "options" not in wrong:
        with pytest.raises(CacheError):
            EngineKey.from_dict({**make_key().to_dict(), **wrong})


@pytest.mark.parametrize("data", [None, [], {}, {"hierarchy_hash": 1}])
def test_records_that_are_no_keys_are_refused(data: object) -> None:
    with pytest.raises(CacheError):
        EngineKey.from_dict(data)
