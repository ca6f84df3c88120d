"""Whether something watches each operation, so that an engine must stay out of the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from aitune_hf.graph.torch_state import any_autocast_enabled, global_module_hooks_active, interceptor_active


class Watch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "flop counter": lambda: FlopCounterMode(display=False),
    "fake tensors": FakeTensorMode,
    "function mode": Watch,
    "dispatch mode": Dispatch,
    "forward-mode differentiation": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_is_noticed_while_it_is_on(mode: Callable[[], Any]) -> None:
    assert not interceptor_active()
    with mode():
        assert interceptor_active()
        with torch.no_grad():
            assert interceptor_active()
    assert not interceptor_active()


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[bool], object] = bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tell(interceptor_active())
        return x * 2


X = torch.ones(3)
RUNS: dict[str, Callable[[Asks], object]] = {
    "vmap": lambda module: torch.vmap(module)(X),
    "grad": lambda module: torch.func.grad(lambda x: module(x).sum())(X),
    "jvp": lambda module: torch.func.jvp(module, (X,), (X,)),
    "export": lambda module: torch.export.export(module, (X,), strict=False),
    "jit.trace": lambda module: torch.jit.trace(module, (X,), check_trace=False),
    "make_fx": lambda module: torch.fx.experimental.proxy_tensor.make_fx(module)(X),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_transform_or_trace_is_noticed(run: Callable[[Asks], object]) -> None:
    answers: list[bool] = []
    module = Asks()
    module.tell = answers.append
    run(module)
    assert answers
    assert all(answers)
    assert not interceptor_active()


def test_torch_compile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert interceptor_active()


def test_plain_running_is_not_interception() -> None:
    for manager in (torch.no_grad(), torch.inference_mode(), torch.enable_grad(), torch.autocast("cpu")):
        with manager:
            assert not interceptor_active()


def test_a_default_device_is_not_interception() -> None:
    with torch.device("meta"):
        assert not interceptor_active()
        with Watch():
            assert interceptor_active()
    torch.set_default_device("cpu")
    try:
        assert not interceptor_active()
    finally:
        torch.set_default_device(None)


def test_another_thread_has_its_own_modes() -> None:
    import threading

    answers: list[bool] = []
    with Dispatch():
        thread = threading.Thread(target=lambda: answers.append(interceptor_active()))
        thread.start()
        thread.join()
    assert answers == [False]


@pytest.mark.parametrize(
    "register",
    [nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook],
    ids=["forward", "pre"],
)
def test_global_hooks_are_noticed(register: Callable[..., Any]) -> None:
    assert not global_module_hooks_active()
    handle = register(lambda *args: None)
    try:
        assert global_module_hooks_active()
        assert not interceptor_active()
    finally:
        handle.remove()
    assert not global_module_hooks_active()


def test_hooks_of_one_module_are_not_global() -> None:
    nn.Linear(1, 1).register_forward_hook(lambda *args: None)
    assert not global_module_hooks_active()


def test_autocast_is_noticed() -> None:
    assert not any_autocast_enabled()
    with torch.autocast("cpu"):
        assert any_autocast_enabled()
