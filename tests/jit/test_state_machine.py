"""Random sequences of everything a user may do to a module, compared with an eager twin after every step."""

from __future__ import annotations

import copy
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from jit_kit import Bench, FrozenBackend, Leaf, assert_same, state, untune
from torch import nn

from aitune_hf.jit.patcher import patched_of
from aitune_hf.jit.session import pipeline_call


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leaf(x) + x


class Whole(nn.Module):
    """Raises on request, after one of its parts has run."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Part()
        self.two = Part()
        self.boost = 1.0
        self.eval()

    def forward(self, x: torch.Tensor, fail: bool = False, gain: float = 1.0) -> dict[str, torch.Tensor]:
        y = self.one(x)
        if fail:
            raise LookupError("on request")
        return {"y": self.two(y) * self.boost * gain}


class Counting(ModelHook):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.log.append("accelerate")
        return args, kwargs


PLACES = st.sampled_from(["", "one", "two.leaf", "two.leaf.linear"])
INNER = st.sampled_from(["one.leaf", "two.leaf"])
BATCHES = st.integers(1, 4)


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.folder = tempfile.TemporaryDirectory()
        self.bench = Bench(Path(self.folder.name))
        self.ours = Whole()
        self.twin = copy.deepcopy(self.ours)
        self.logs: tuple[list[str], list[str]] = ([], [])
        self.hooks: list[tuple[Any, Any]] = []
        self.hooked: set[str] = set()
        self.session: Any = None

    @property
    def pair(self) -> tuple[Any, Any]:
        return self.ours, self.twin

    def compare(self, x: torch.Tensor, **kwargs: Any) -> None:
        for log in self.logs:
            log.clear()
        with torch.no_grad():
            assert_same(self.ours(x, **kwargs), self.twin(x, **kwargs))
        assert self.logs[0] == self.logs[1]

    @rule(batch=BATCHES, gain=st.sampled_from([1.0, 2.0]), scoped=st.booleans())
    def call(self, batch: int, gain: float, scoped: bool) -> None:
        if scoped:
            with pipeline_call():
                self.compare(torch.randn(batch, 4), gain=gain)
                self.compare(torch.randn(batch, 4), gain=gain)
        else:
            self.compare(torch.randn(batch, 4), gain=gain)

    @rule()
    def raise_inside(self) -> None:
        for log in self.logs:
            log.clear()
        x = torch.randn(2, 4)
        for module in self.pair:
            try:
                module(x, fail=True)
            except LookupError:
                continue
            raise AssertionError("it did not raise")
        assert self.logs[0] == self.logs[1]

    @rule(refuse=st.sampled_from([(), ("Whole",), ("Whole", "Part"), ("Whole", "Part", "Leaf")]), fresh=st.booleans())
    def tune(self, refuse: tuple[str, ...], fresh: bool) -> None:
        kinds = "".join(name[0] for name in refuse)
        self.bench.backend = FrozenBackend(
            refuse, name=f"frozen{kinds}{len(self.bench.backend.builds) if fresh else ''}"
        )
        mutes = [log[:] for log in self.logs]
        self.bench.tune(self.ours, torch.randn(2, 4), torch.randn(3, 4))
        for log, mute in zip(self.logs, mutes, strict=True):
            log[:] = mute
        self.session = None

    @rule(samples=st.integers(1, 3))
    def watch(self, samples: int) -> None:
        """Go over to tuning in the course of calls."""
        untune(self.ours)
        self.session = self.bench.session(self.ours, min_samples=samples)

    @rule()
    def untune(self) -> None:
        untune(self.ours)
        assert all(patched_of(module) is None for module in self.ours.modules())

    @rule(place=PLACES)
    def hook(self, place: str) -> None:
        handles = []
        for module, log in zip(self.pair, self.logs, strict=True):
            target = module.get_submodule(place)
            one = target.register_forward_hook(lambda m, a, o, log=log, place=place: log.append(f"hook {place}"))
            two = target.register_forward_pre_hook(lambda m, a, log=log, place=place: log.append(f"pre {place}"))
            handles.append((one, two))
        self.hooks.append((handles[0], handles[1]))

    @precondition(lambda self: self.hooks)
    @rule(data=st.data())
    def unhook(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.hooks) - 1))
        for handles in self.hooks.pop(index):
            for handle in handles:
                handle.remove()

    @rule(place=PLACES)
    def accelerate_hook(self, place: str) -> None:
        for module, log in zip(self.pair, self.logs, strict=True):
            add_hook_to_module(module.get_submodule(place), Counting(log))
        self.hooked.add(place)

    @precondition(lambda self: self.hooked)
    @rule()
    def accelerate_unhook(self) -> None:
        place = sorted(self.hooked)[0]
        self.hooked.remove(place)
        for module in self.pair:
            remove_hook_from_module(module.get_submodule(place))

    @precondition(lambda self: not self.hooks and not self.hooked)
    @rule(keep_copy=st.booleans())
    def deepcopy(self, keep_copy: bool) -> None:
        other = copy.deepcopy(self.ours)
        assert all(patched_of(module) is None for module in other.modules())
        x = torch.randn(2, 4)
        with torch.no_grad():
            assert_same(other(x), self.twin(x))
        if keep_copy:
            self.ours = other
            self.session = None

    @rule(batch=BATCHES)
    def threads(self, batch: int) -> None:
        x = torch.randn(batch, 4)
        with torch.no_grad():
            answer = self.twin(x)["y"]
        wrong: list[float] = []

        def work() -> None:
            with torch.no_grad():
                for _ in range(5):
                    ours = self.ours(x)["y"]
                    if not torch.allclose(ours, answer, atol=1e-4):
                        wrong.append(float((ours - answer).abs().max()))

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []

    @rule(place=INNER, factor=st.sampled_from([0.5, -1.0, 2.0]))
    def edit_in_place(self, place: str, factor: float) -> None:
        with torch.no_grad():
            for module in self.pair:
                module.get_submodule(place).linear.weight.mul_(factor)

    @rule(place=INNER, how=st.sampled_from(["data", "parameter", "buffer"]))
    def replace_weights(self, place: str, how: str) -> None:
        new = torch.randn(4, 4)
        for module in self.pair:
            leaf = module.get_submodule(place)
            if how == "data":
                leaf.linear.weight.data = new.clone()
            elif how == "parameter":
                leaf.linear.weight = nn.Parameter(new.clone())
            else:
                leaf.shift = new[0].clone()

    @rule(place=INNER, what=st.sampled_from(["flag", "scale", "boost"]))
    def flip(self, place: str, what: str) -> None:
        for module in self.pair:
            leaf = module.get_submodule(place)
            if what == "flag":
                leaf.flag = not leaf.flag
            elif what == "scale":
                leaf.scale = 3.0 - leaf.scale
            else:
                module.boost = 3.0 - module.boost

    @rule(place=INNER)
    def swap_child(self, place: str) -> None:
        new = nn.Linear(4, 4)
        for module in self.pair:
            module.get_submodule(place).linear = copy.deepcopy(new)
        self.hooks = [pair for pair in self.hooks if pair]
        if place == "two.leaf":
            self.hooked.discard("two.leaf.linear")

    @rule(batch=BATCHES)
    def gradients(self, batch: int) -> None:
        x = torch.randn(batch, 4)
        grads = []
        for module in self.pair:
            module.zero_grad()
            module(x)["y"].sum().backward()
            grads.append([parameter.grad for parameter in module.parameters()])
        assert_same(*grads)

    @invariant()
    def equals_the_twin(self) -> None:
        self.compare(torch.randn(2, 4))
        for place in ("", "one", "two"):
            assert type(self.ours.get_submodule(place)) is type(self.twin.get_submodule(place))
        assert list(self.ours.state_dict()) == list(self.twin.state_dict())
        assert not self.ours.training
        if self.session is not None:
            assert len(self.session.stack) == 0
        assert state(self.ours) in (None, "init", "recording", "tuned", "eager", "skipped")

    def teardown(self) -> None:
        self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
