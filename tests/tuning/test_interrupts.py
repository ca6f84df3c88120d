"""Whatever is raised while engines are chosen or taken from the cache, none stays loaded, and eager answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tuning_kit import QuickBackend, Waiting, settings

from aitune_hf import tune
from aitune_hf.backends.base import BuildRequest, LoadRequest
from aitune_hf.errors import BuildError
from aitune_hf.jit.patcher import patched_modules, unpatch_tree
from aitune_hf.tuning import decision
from aitune_hf.tuning.drive import restore_modules

SAMPLES = [torch.randn(rows, 4) for rows in (2, 3)]


def no_varying_axis(request: BuildRequest) -> Exception | None:
    varying = any(axis for row in request.axes for axis in row)
    return BuildError("one size per engine") if varying else None


class Interrupted(QuickBackend):
    """Builds one engine per size; loading is interrupted once ``left`` have been loaded."""

    left = 10**6

    def __init__(self) -> None:
        super().__init__("quick")
        self.fail = no_varying_axis

    def load(self, request: LoadRequest) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().load(request)


@pytest.fixture
def model() -> nn.Module:
    return Waiting().eval()


def assert_eager(model: nn.Module, backend: Interrupted) -> None:
    assert backend.engines
    assert not list(patched_modules(model))
    assert all(engine.closed for engine in backend.engines)
    with torch.no_grad():
        torch.testing.assert_close(model(SAMPLES[0]), Waiting.forward(model, SAMPLES[0]))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left")], ids=["interrupt", "full disk"])
def test_a_verdict_that_cannot_be_written_leaves_no_engine_loaded(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def failing(*args: Any) -> None:
        raise error

    monkeypatch.setattr(decision, "write_verdict", failing)
    backend = Interrupted()
    with pytest.raises(error if isinstance(error, type) else type(error)):
        tune(model, SAMPLES, settings(tmp_path, backend))
    assert_eager(model, backend)


@pytest.mark.parametrize(
    "take",
    [lambda model, config: restore_modules({"": model}, config), lambda model, config: tune(model, SAMPLES, config)],
    ids=["restored", "tuned again"],
)
def test_an_interrupt_while_engines_are_taken_from_the_cache_closes_those_that_were_loaded(
    tmp_path: Path, model: nn.Module, take: Callable[[nn.Module, Any], Any]
) -> None:
    backend = Interrupted()
    config = settings(tmp_path, backend)
    assert len(tune(model, SAMPLES, config).rows) >= 1
    assert sum(not engine.closed for engine in backend.engines) == 2
    unpatch_tree(model)
    backend.engines.clear()
    backend.left = 1
    with pytest.raises(KeyboardInterrupt):
        take(model, config)
    assert len(backend.engines) == 1
    assert_eager(model, backend)
