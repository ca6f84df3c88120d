"""TensorRT plans on a GPU: those built for it here, and those built as if it were not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf import TuneConfig, build_for, stats, tune
from aitune_hf.backends.base import Recipe
from aitune_hf.backends.tensorrt import TensorRTBackend, TensorRTRTXBackend
from aitune_hf.tuning.drive import restore_modules

pytestmark = pytest.mark.gpu
Make = Callable[..., nn.Module]
CLOSE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def only(backend: TensorRTBackend, **options: Any) -> TensorRTBackend:
    """The backend with one recipe."""

    class Only(type(backend)):  # type: ignore[misc]
        isolated = False  # A class that is local to a test cannot be sent to a child process.

        def recipes(self, device: torch.device) -> list[Recipe]:
            return [Recipe(options=options, weights="filled" if options.get("refit") else "bound", effort="fast")]

    return Only()


def usable(backend: TensorRTBackend) -> TensorRTBackend:
    reason = backend.available()
    if reason:
        pytest.skip(reason)
    return backend


def settings(folder: Path, *backends: TensorRTBackend) -> TuneConfig:
    return TuneConfig(cache_dir=folder, backends=backends, strategy="first_working", effort="fast", progress=False)


def sample(device: torch.device, dtype: torch.dtype = torch.float32, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 128, 256, device=device, dtype=dtype)


@pytest.mark.parametrize("refit", [False, True], ids=["inputs", "refit"])
@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("kind", [TensorRTBackend, TensorRTRTXBackend])
def test_a_plan_gives_eagers_answers(
    kind: type[TensorRTBackend], dtype: torch.dtype, refit: bool, make: Make, device: torch.device, tmp_path: Path
) -> None:
    backend = only(usable(kind()), **({"refit": True} if refit else {}))
    module, twin = make(dtype), make(dtype)
    report = tune(module, [sample(device, dtype, 2), sample(device, dtype, 4)], settings(tmp_path, backend))
    assert report.rows[0].backend.startswith(backend.name), str(report)
    for batch in (1, 3, 4):
        x = sample(device, dtype, batch)
        assert float((module(x).float() - twin(x).float()).abs().max()) < CLOSE[dtype]
    other = make(dtype, seed=2)
    module.load_state_dict(other.state_dict())
    x = sample(device, dtype)
    assert float((module(x).float() - other(x).float()).abs().max()) < CLOSE[dtype]
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        answer = module(x * 2)
    side.synchronize()
    assert float((answer.float() - other(x * 2).float()).abs().max()) < CLOSE[dtype]
    assert stats(module).engine_calls == 5


def test_a_plan_from_a_machine_without_the_gpu(make: Make, device: torch.device, tmp_path: Path) -> None:
    """The whole way of ``build_for``: recorded on the CPU, built without the GPU, checked at its first call here."""
    backend = usable(TensorRTRTXBackend())
    sm = "sm" + "".join(map(str, torch.cuda.get_device_capability(device)))
    if sm not in backend.targets():
        pytest.skip(f"{backend.name} builds for {', '.join(backend.targets())} from elsewhere, this is {sm}")
    config = TuneConfig(cache_dir=tmp_path, progress=False)
    report = build_for(make(torch.float16).cpu(), [sample(torch.device("cpu"), torch.float16)], [f"rtx:{sm}"], config)
    assert report.engines, str(report)
    module, twin = make(torch.float16, seed=1), make(torch.float16, seed=1)
    assert restore_modules({"": module}, config) == 1
    x = sample(device, torch.float16)
    for _ in range(3):
        assert float((module(x).float() - twin(x).float()).abs().max()) < CLOSE[torch.float16]
    assert stats(module).engine_calls == 2
