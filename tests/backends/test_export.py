"""Capturing a graph: which shapes the program takes, and what is said when it cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf.backends.base import AxisRange, BuildRequest
from aitune_hf.backends.export import CapturedGraph, capture, capture_problem
from aitune_hf.errors import BuildError, GraphBreakException
from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.shape_envelope import Extent

RequestFor = Callable[..., BuildRequest]
UP_TO_8 = AxisRange(min=1, max=8)


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return self.function(x) if y is None else self.function(x, y)


@pytest.fixture
def captured(request_for: RequestFor, tmp_path: Path) -> Callable[..., CapturedGraph]:
    def capture_it(
        function: Callable[..., Any], ranges: Mapping[tuple[str, int], AxisRange], *calls: tuple[torch.Tensor, ...]
    ) -> CapturedGraph:
        keyword = [dict(zip(("x", "y"), call, strict=False)) for call in calls]
        return capture(request_for(Lambda(function).eval(), keyword, tmp_path, ranges))

    return capture_it


Captured = Callable[..., CapturedGraph]


def test_fixed_shapes(captured: Captured) -> None:
    graph = captured(lambda x: x + 1, {}, (torch.ones(3, 4),))
    assert graph.envelope.is_static
    assert graph.envelope.inputs == ((Extent(3), Extent(4)),)


def test_equal_axes_share_a_symbol(captured: Captured) -> None:
    graph = captured(lambda x, y: x + y, {("x", 0): UP_TO_8, ("y", 0): UP_TO_8}, (torch.ones(3, 4), torch.ones(3, 4)))
    assert graph.envelope.inputs == ((Extent(0, "d0"), Extent(4)),) * 2
    assert graph.envelope.ranges == {"d0": (1, 8)}


def test_a_multiple_of_another_axis(captured: Captured) -> None:
    ranges = {("x", 0): UP_TO_8, ("y", 0): AxisRange(min=2, max=16)}
    graph = captured(lambda x, y: torch.cat([x, x]) + y, ranges, (torch.ones(3, 4), torch.ones(6, 4)))
    (first, _), (second, _) = graph.envelope.inputs
    assert (first, second) == (Extent(0, "d0"), Extent(0, "d0", 2))
    assert graph.envelope.mismatch([(1, 4), (2, 4)]) is None
    assert graph.envelope.mismatch([(3, 4), (5, 4)])


def test_one_more_than_another_axis(captured: Captured) -> None:
    ranges = {("x", 0): UP_TO_8, ("y", 0): AxisRange(min=1, max=99)}
    graph = captured(lambda x, y: torch.cat([x, x[:1]]) + y, ranges, (torch.ones(3, 4), torch.ones(4, 4)))
    assert graph.envelope.inputs[1][0] == Extent(1, "d0", 1)


def test_a_divisor_in_the_code(captured: Captured) -> None:
    graph = captured(lambda x: x.view(-1, 8).sum(1), {("x", 0): AxisRange(min=1, max=640)}, (torch.ones(16),))
    assert graph.envelope.inputs == ((Extent(0, "d0", 8),),)
    assert graph.envelope.ranges == {"d0": (1, 80)}


def test_a_divisor_asked_for(captured: Captured) -> None:
    wanted = AxisRange(min=8, max=64, multiple_of=8, name="height")
    graph = captured(lambda x: x + 1, {("x", 0): wanted}, (torch.ones(16),))
    assert graph.envelope.inputs == ((Extent(0, "height", 8),),)
    assert graph.envelope.ranges == {"height": (1, 8)}


def test_a_branch_on_a_size(captured: Captured) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 10 else x - 1

    wanted = {("x", 0): AxisRange(min=1, max=64)}
    assert captured(function, wanted, (torch.ones(16),)).envelope.ranges == {"d0": (11, 64)}
    with pytest.raises(BuildError, match=r"leaves out a recorded call: x axis 0 has size 4.*fixed shapes"):
        captured(function, wanted, (torch.ones(16),), (torch.ones(4),))


def test_a_branch_on_two_sizes(captured: Captured) -> None:
    wanted = {("x", 0): AxisRange(min=2, max=64), ("x", 1): AxisRange(min=2, max=64)}
    with pytest.raises(BuildError, match="different combinations of x axis 0 and x axis 1"):
        captured(lambda x: x + 1 if x.shape[0] > x.shape[1] else x, wanted, (torch.ones(16, 4),))


def test_names_tie_what_the_forward_does_not(captured: Captured) -> None:
    calls = (torch.ones(3, 4), torch.ones(3, 2))
    same = AxisRange(min=1, max=8, name="batch")
    graph = captured(lambda x, y: (x + 1, y + 1), {("x", 0): same, ("y", 0): same}, calls)
    assert graph.envelope.ranges == {"batch": (1, 8)}
    other = AxisRange(min=1, max=8, name="rows")
    graph = captured(lambda x, y: (x + 1, y + 1), {("x", 0): same, ("y", 0): other}, calls)
    assert graph.envelope.ranges == {"batch": (1, 8), "rows": (1, 8)}


def test_unnamed_axes_are_tied_unless_a_call_says_otherwise(captured: Captured) -> None:
    ranges = {("x", 0): UP_TO_8, ("y", 0): UP_TO_8}
    calls = [(torch.ones(3, 4), torch.ones(3, 2)), (torch.ones(3, 4), torch.ones(2, 2))]
    assert len(captured(lambda x, y: (x + 1, y + 1), ranges, calls[0]).envelope.ranges) == 1
    assert len(captured(lambda x, y: (x + 1, y + 1), ranges, *calls).envelope.ranges) == 2


def test_an_axis_that_the_forward_fixes(captured: Captured) -> None:
    with pytest.raises(BuildError, match=r"^model: x axis 0 is fixed by the forward at 3.*fixed shapes"):
        captured(lambda x: x + torch.ones(3, 4), {("x", 0): UP_TO_8}, (torch.ones(3, 4),))


def test_a_relation_that_is_not_affine(captured: Captured) -> None:
    ranges = {("x", 0): UP_TO_8, ("x", 1): UP_TO_8, ("y", 0): AxisRange(min=2, max=64)}
    with pytest.raises(BuildError, match=r"y axis 0 must be .* for this forward"):
        captured(lambda x, y: x.flatten() + y, ranges, (torch.ones(3, 4), torch.ones(12)))


def by_data(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x


def test_a_branch_on_data(captured: Captured) -> None:
    with pytest.raises(GraphBreakException, match=r"test_export.py:\d+ in by_data: return x \+ 1 if") as info:
        captured(by_data, {}, (torch.ones(3, 4),))
    assert "\n" not in str(info.value)
    assert len(str(info.value)) < 500


def test_capture_problem(request_for: RequestFor, tmp_path: Path) -> None:
    for function, expected in ((by_data, "cannot be captured"), (torch.relu, None)):
        r = request_for(Lambda(function).eval(), [{"x": torch.ones(2)}], tmp_path)
        problem = capture_problem(r.path, r.module, r.forward, r.graph, r.example)
        assert problem is None if expected is None else expected in str(problem)


class Stateful(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0
        self.cache: Any = {}
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.kind == "cache":
            self.cache["last"] = x
        if self.kind == "buffer":
            self.mean.add_(x.mean(0))
        if self.kind == "input":
            x.add_(1)
        return x + self.mean


@pytest.mark.parametrize(("kind", "reason"), [("cache", "cache"), ("buffer", "mean"), ("input", "x")])
def test_state_is_refused_and_put_back(kind: str, reason: str, request_for: RequestFor, tmp_path: Path) -> None:
    module: Any = Stateful(kind).eval()
    request = request_for(module, [{"x": torch.ones(3, 2)}], tmp_path)
    module.cache, calls, mean = {}, module.calls, module.mean.clone()
    with pytest.raises(GraphBreakException, match=reason):
        capture(request)
    assert (module.cache, module.calls) == ({}, calls)
    assert torch.equal(module.mean, mean)
    assert torch.equal(request.example.inputs[0], torch.ones(3, 2) + (kind == "input"))


def test_outputs_must_be_those_recorded(request_for: RequestFor, tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> Any:
        return (x, 1) if torch.compiler.is_exporting() else (x, 2)

    request = request_for(Lambda(function).eval(), [{"x": torch.ones(2)}], tmp_path)
    with pytest.raises(GraphBreakException, match=r"returns .*=1.* but .*=2.* was recorded"):
        capture(request)


def test_autocast_is_part_of_the_program(request_for: RequestFor, tmp_path: Path) -> None:
    module = nn.Linear(4, 4).eval()
    call = {"input": torch.randn(3, 4)}
    request = request_for(module, [call], tmp_path, context=CallContext(autocast="bfloat16"))
    program = capture(request).program
    (output,) = program.module()(call["input"])
    assert output.dtype == request.example.outputs[0].dtype == torch.bfloat16
    assert torch.equal(output, request.example.outputs[0])


def test_inference_mode_around_it(request_for: RequestFor, tmp_path: Path) -> None:
    module = nn.Linear(4, 4).eval()
    with torch.inference_mode():
        request = request_for(module, [{"input": torch.randn(3, 4)}], tmp_path)
        program = capture(request).program
    assert list(program.state_dict) == ["weight", "bias"]


def test_real_models_of_any_size(request_for: RequestFor, tmp_path: Path) -> None:
    """A conditional UNet takes every multiple of its factor, independent of each other; a decoder every size."""
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        norm_num_groups=4,
        attention_head_dim=4,
    ).eval()
    call = {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor(5),
        "encoder_hidden_states": torch.randn(2, 3, 8),
    }
    size = AxisRange(min=2, max=64)
    ranges = {("sample", 0): UP_TO_8, ("encoder_hidden_states", 0): UP_TO_8, ("sample", 2): size, ("sample", 3): size}
    request = request_for(unet, [call], tmp_path, ranges)
    envelope = capture(request).envelope
    for fits, shape in ((True, (1, 4, 2, 64)), (True, (8, 4, 6, 10)), (False, (1, 4, 15, 16))):
        shapes = {"sample": shape, "timestep": (), "encoder_hidden_states": (shape[0], 3, 8)}
        assert (envelope.mismatch([shapes[str(place)] for place in request.graph.input_spec.tensors]) is None) is fits

    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
    ).eval()
    ranges = {("sample", 0): UP_TO_8, ("sample", 2): size, ("sample", 3): size}
    envelope = capture(request_for(vae.decoder, [{"sample": torch.randn(2, 4, 8, 8)}], tmp_path, ranges)).envelope
    assert [extent.symbol for extent in envelope.inputs[0]] == ["d0", None, "d1", "d2"]
    assert envelope.ranges == {"d0": (1, 8), "d1": (2, 64), "d2": (2, 64)}
