"""What an engine holds of a module's weights: those it has now, and none of those it had."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from aitune_hf.backends.base import BuildRequest, BuildResult
from aitune_hf.backends.registry import get_backend
from aitune_hf.errors import EngineLoadError

#: What takes up weights in each kind of engine.
FILLS = {
    "inductor": "aitune_hf.backends.aoti_package.AOTIPackage.bind",
    "openvino": "aitune_hf.backends.openvino_engine.CompiledGraph",
    "onnxruntime": "aitune_hf.backends.onnxruntime_engine.Session",
}
X = torch.randn(3, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    backend: Any
    request: BuildRequest
    result: BuildResult

    def load(self, module: nn.Module) -> Any:
        recorded: Any = importlib.import_module("backends_recorded")  # Registered by the conftest of this folder.
        return self.backend.load(recorded.load_request(self.request, self.result, module))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU()).eval()


@pytest.fixture(scope="module", params=FILLS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    backend = get_backend(request.param)
    if reason := backend.available():
        pytest.skip(reason)
    recorded: Any = importlib.import_module("backends_recorded")
    asked = recorded.request_for(net(), [{"input": X}], tmp_path_factory.mktemp(request.param))
    weights = backend.recipes(torch.device("cpu"))[0].weights
    asked = dataclasses.replace(asked, weights=weights)
    return Built(backend=backend, request=asked, result=backend.build(asked))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def assert_right(engine: Any, module: nn.Module) -> None:
    torch.testing.assert_close(engine([X.clone()])[0], module(X), atol=1e-5, rtol=1e-5)


def interrupted_once(actual: Callable[..., Any]) -> Callable[..., Any]:
    pending = [KeyboardInterrupt]

    def fill(*args: Any, **kwargs: Any) -> Any:
        if pending:
            raise pending.pop()
        return actual(*args, **kwargs)

    return fill


def test_rows_that_change_places_are_taken_up(built: Built) -> None:
    module = net()
    engine = built.load(module)
    module[0].weight[[4, 5]] = module[0].weight[[5, 4]]
    engine.rebind()
    assert_right(engine, module)


def test_weights_that_left_are_let_go_of_and_taken_up_when_they_are_back(built: Built) -> None:
    module = net()
    engine = built.load(module)
    kept = copy.deepcopy(module.state_dict())
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in module.parameters()]
    module.to("meta")
    with pytest.raises(EngineLoadError, match="meta device"):
        engine.rebind()
    gc.collect()
    assert all(one.expired() for one in memory)
    for _ in range(2):
        with pytest.raises(EngineLoadError, match=r"has no weights|meta device"):
            engine([X.clone()])
    module.load_state_dict(kept, assign=True)
    engine.rebind()
    assert_right(engine, module)


def interrupt_next_fill(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    name = built.backend.name
    monkeypatch.setattr(FILLS[name], interrupted_once(pkgutil.resolve_name(FILLS[name])))


def test_after_an_interrupt_the_next_rebind_is_whole(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    engine = built.load(module)
    interrupt_next_fill(built, monkeypatch)
    module[0].weight = nn.Parameter(torch.randn(32, 64))
    with pytest.raises(KeyboardInterrupt):
        engine.rebind()
    engine.rebind()
    assert_right(engine, module)
    engine.close()
    with pytest.raises(EngineLoadError, match="closed"):
        engine([X.clone()])


def test_a_call_after_an_interrupted_one_has_the_new_weights(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    engine = built.load(module)
    interrupt_next_fill(built, monkeypatch)
    module[0].weight.data.mul_(2)
    if built.backend.name != "inductor":  # It reads the module's own memory.
        with pytest.raises(KeyboardInterrupt):
            engine([X.clone()])
    assert_right(engine, module)
