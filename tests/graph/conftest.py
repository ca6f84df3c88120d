"""Makes the random inputs of this folder importable: tests are imported without their folder on the path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

_spec = importlib.util.spec_from_file_location("graph_strategies", Path(__file__).with_name("strategies.py"))
assert _spec is not None
assert _spec.loader is not None
strategies = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = strategies
_spec.loader.exec_module(strategies)

# The same examples in every run, and no clock: a loaded machine must not fail a test.
settings.register_profile(
    "graph", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("graph")
