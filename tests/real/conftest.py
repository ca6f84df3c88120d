"""Tuned models with real engines. Compiling is what takes the time, so all of them share one cache."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from real_kit import (
    BERT_SAMPLES,
    Drawing,
    Tuned,
    answers,
    config_for,
    tiny_bert,
    tiny_stable_diffusion,
    tuned_with_twin,
)

import aitune_hf
from aitune_hf import AITunePipeline, TuneConfig
from aitune_hf.backends.inductor import InductorBackend


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    missing = InductorBackend().available()
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def config(engine_cache: Path) -> TuneConfig:
    return config_for(engine_cache)


@pytest.fixture
def tune(config: TuneConfig) -> Callable[..., Tuned]:
    """Tunes a module on samples and hands it back with its eager twin."""

    def run(module: nn.Module, samples: Any) -> Tuned:
        return tuned_with_twin(module, samples, config)

    return run


@pytest.fixture
def bert(config: TuneConfig) -> Tuned:
    """A fresh BERT with its engine; only the first one is compiled."""
    return tuned_with_twin(tiny_bert(), BERT_SAMPLES, config)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabulary")


def _tuned_pipeline(config: TuneConfig, vocabulary: Path) -> Drawing:
    plain = tiny_stable_diffusion(vocabulary)
    twin = copy.deepcopy(plain)
    pipe = AITunePipeline.from_pipe(plain, config=config)
    pipe.tune([Drawing.arguments(*call) for call in Drawing.CALLS])
    return Drawing(pipe, twin)


@pytest.fixture(scope="session")
def _shared_drawing(config: TuneConfig, vocabulary: Path) -> Drawing:
    return _tuned_pipeline(config, vocabulary)


@pytest.fixture
def drawing(_shared_drawing: Drawing) -> Iterator[Drawing]:
    """The pipeline that the tests share. What a test switches it must switch back; here that is checked."""
    yield _shared_drawing
    with answers(_shared_drawing.pipe) as seen:
        _shared_drawing.same(32, 32)
    assert (seen.engines, seen.eager) == (5, {}), "this test left the shared pipeline changed"


@pytest.fixture
def own_drawing(_shared_drawing: Drawing, config: TuneConfig, vocabulary: Path) -> Drawing:
    """A pipeline for a test that cannot undo what it does; the engines are those of the shared one."""
    drawing = _tuned_pipeline(config, vocabulary)
    assert aitune_hf.stats(drawing.pipe).builds == 0
    return drawing
