"""Captured programs as ONNX graphs: the same function, with nothing of the weights or the machine in them."""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_hf.backends.base import AxisRange, BuildRequest
from aitune_hf.backends.export import CapturedGraph
from aitune_hf.backends.onnx_export import OnnxExport, export_onnx, missing_exporter
from aitune_hf.backends.probes import pinned_constants, with_probes
from aitune_hf.errors import BuildError

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

Requests = Callable[..., BuildRequest]
BATCH = AxisRange(min=1, max=8)


@torch.library.custom_op("aitune_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Everything(nn.Module):
    """What is easily lost or mixed up on the way: names, untouched tensors, folded weights."""

    def __init__(self) -> None:
        super().__init__()
        self.in0 = nn.Parameter(torch.randn(4))  # Called like an input of the graph.
        self.out1 = nn.Parameter(torch.randn(4))
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4), persistent=False)

    def forward(self, x: torch.Tensor, ignored: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(self.linear(x.unsqueeze(1)).squeeze(1)) * (self.in0 + 1) * scale
        return x, y + self.out1, y > 0, self.in0, self.table, y + self.out1


def everything_call(batch: int = 3) -> dict[str, Any]:
    return {"x": torch.randn(batch, 4), "ignored": torch.ones(2, dtype=torch.int32), "scale": torch.tensor(2.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def request_everything(folder: Path) -> BuildRequest:
    torch.manual_seed(0)
    request: BuildRequest = sys.modules["backends_recorded"].request_for(
        Everything().eval(), [everything_call()], folder, {("x", 0): BATCH}
    )
    return request


@pytest.fixture(scope="module")
def everything(request_everything: BuildRequest) -> CapturedGraph:
    return request_everything.capture()


@pytest.fixture(scope="module")
def exported(everything: CapturedGraph) -> OnnxExport:
    return export_onnx(everything, opset=23)


def run(model: Path | bytes, call: dict[str, Any]) -> list[Any]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(model)
    outputs: list[Any] = session.run(None, {f"in{i}": leaf.numpy() for i, leaf in enumerate(call.values())})
    return outputs


def assert_equal(outputs: list[Any], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_the_graph_is_the_same_function(exported: OnnxExport, request_everything: BuildRequest, batch: int) -> None:
    call = everything_call(batch)
    with torch.no_grad():
        assert_equal(run(exported.inlined().SerializeToString(), call), request_everything.module(**call))


def test_inputs_and_outputs_are_all_there_and_in_order(exported: OnnxExport) -> None:
    assert exported.inputs == ("in0", "in1", "in2")
    assert exported.outputs == tuple(f"out{i}" for i in range(6))
    produced = [name for node in exported.model.graph.node for name in node.output]
    assert set(exported.outputs) <= set(produced)
    assert len(produced) == len(set(produced))


def test_sizes_have_the_names_of_the_envelope(exported: OnnxExport, everything: CapturedGraph) -> None:
    def sizes(value: Any) -> list[Any]:
        return [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]

    (symbol,) = everything.envelope.ranges
    first, second, third = exported.model.graph.input
    assert (sizes(first), sizes(second), sizes(third)) == ([symbol, 4], [2], [])
    assert sizes(exported.model.graph.output[1]) == [symbol, 4]
    inner = {size for value in exported.model.graph.value_info for size in sizes(value) if isinstance(size, str)}
    assert inner <= {symbol}


def test_each_weight_is_an_initialiser_of_its_own(exported: OnnxExport, request_everything: BuildRequest) -> None:
    """Nothing is folded into or fused with another one, so that other weights can take their place."""
    state = request_everything.module.state_dict()
    found = [
        next(key for key, own in state.items() if own.data_ptr() == value.data_ptr())
        for value in exported.weights.values()
    ]
    assert sorted(found) == sorted(
        [
            "in0",
            "out1",
            "linear.weight",
            "linear.bias",
            "norm.weight",
            "norm.bias",
            "norm.running_mean",
            "norm.running_var",
        ]
    )
    assert not any(tensor.raw_data for tensor in exported.model.graph.initializer if tensor.name in exported.weights)
    assert exported.constants().keys() == {tensor.name for tensor in exported.model.graph.initializer}


def test_the_structure_does_not_depend_on_weights(exported: OnnxExport, everything: CapturedGraph) -> None:
    assert export_onnx(with_probes(everything, 1), opset=23).structure() == exported.structure()


def test_the_structure_is_that_of_a_new_capture(exported: OnnxExport, folder: Path) -> None:
    """Torch counts symbols and constants anew; nothing of that is in the bytes."""
    request = sys.modules["backends_recorded"].request_for(
        Everything().eval(), [everything_call(5)], folder, {("x", 0): BATCH}
    )
    assert export_onnx(request.capture(), opset=23).structure() == exported.structure()


def test_nothing_tells_of_the_machine_or_the_code(exported: OnnxExport) -> None:
    content = exported.structure()
    for text in (sys.prefix, Path.home(), Path.cwd(), tempfile.gettempdir() + "/", "site-packages", ".py", "torch"):
        assert str(text).encode() not in content, text


def test_weights_beside_the_graph(exported: OnnxExport, request_everything: BuildRequest, tmp_path: Path) -> None:
    files = exported.save(tmp_path / "graph.onnx")
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert files[0].stat().st_size < len(exported.structure()) + 2000
    call = everything_call(2)
    with torch.no_grad():
        assert_equal(run(files[0], call), request_everything.module(**call))


def test_too_large_for_one_file(exported: OnnxExport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitune_hf.backends.onnx_export._LARGEST_FILE", 1000)
    with pytest.raises(BuildError, match="does not fit into one ONNX file"):
        exported.inlined()


@pytest.mark.parametrize("opset", [18, 23])
def test_attention(opset: int, request_for: Requests, tmp_path: Path) -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keep)

    keep = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    call = {"x": torch.randn(2, 2, 5, 8), "keep": keep}
    request = request_for(Attention().eval(), [call], tmp_path)
    export = export_onnx(request.capture(), opset=opset)
    assert [item.version for item in export.model.opset_import if item.domain == ""] == [opset]
    assert ("Attention" in [node.op_type for node in export.model.graph.node]) == (opset >= 23)
    assert_equal(run(export.inlined().SerializeToString(), call), (request.module(**call),))


def test_bfloat16_weights_keep_their_bits(request_for: Requests, tmp_path: Path) -> None:
    module = nn.Linear(4, 3).to(torch.bfloat16).eval()
    request = request_for(module, [{"input": torch.randn(2, 4, dtype=torch.bfloat16)}], tmp_path)
    export = export_onnx(request.capture(), opset=23)
    stored = {tensor.name: tensor.raw_data for tensor in export.inlined().graph.initializer}
    assert stored["weight"] == module.weight.detach().view(torch.uint16).numpy().tobytes()


def test_weights_can_be_folded(everything: CapturedGraph, request_everything: BuildRequest) -> None:
    export = export_onnx(everything, opset=23, fold_weights=True)
    assert "Transpose" not in [node.op_type for node in export.model.graph.node]
    call = everything_call(4)
    with torch.no_grad():
        assert_equal(run(export.inlined().SerializeToString(), call), request_everything.module(**call))


def test_what_is_pinned_is_worked_out_once_for_all_weights(
    everything: CapturedGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at every constant, so once per weight would take time with the square of their number."""
    asked: list[CapturedGraph] = []

    def pinned(graph: CapturedGraph) -> frozenset[str]:
        asked.append(graph)
        return pinned_constants(graph)

    monkeypatch.setattr("aitune_hf.backends.onnx_export.pinned_constants", pinned)
    export_onnx(everything, opset=18)
    assert asked == [everything]


def test_an_operator_without_a_word_in_onnx_is_named(request_for: Requests, tmp_path: Path) -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flipped: torch.Tensor = turned(x)
            return flipped * 2

    request = request_for(Turned().eval(), [{"x": torch.randn(2, 2)}], tmp_path)
    with pytest.raises(BuildError, match=r"^encoder\.0: .*aitune_tests\.turned"):
        export_onnx(request.capture(), opset=23, path="encoder.0")


def test_it_is_quiet(
    everything: CapturedGraph, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        export_onnx(everything, opset=18)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_exporter() is None
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert re.fullmatch(r"onnxscript not found: pip install aitune-hf\[onnx\]", str(missing_exporter()))
