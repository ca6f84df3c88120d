"""Matrices of an ONNX graph as numbers of 8 bit, a scale per column; what they are multiplied with follows at run time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from aitune_hf.backends.onnx_export import OnnxExport
from aitune_hf.backends.onnx_scrub import scrub

if TYPE_CHECKING:
    import onnx

__all__ = ["quantised"]

#: Convolutions of 8 bit are slower on CPUs than those of 32, so they stay.
_OPERATORS = ["MatMul"]
#: How ONNX Runtime's own tool marks a graph that it has prepared. Ours needs no preparing, and it would warn.
_PREPARED = ("onnx.quant.pre_process", "onnxruntime.quant")


def quantised(export: OnnxExport) -> onnx.ModelProto:
    """The graph with matrices of 8 bit, and all weights in it.

    Raises:
        BuildError: if it is too large for one file.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = export.inlined()
    model.metadata_props.add(key=_PREPARED[0], value=_PREPARED[1])
    with tempfile.TemporaryDirectory(prefix="aitune-onnx-") as folder:
        file = Path(folder) / "model.onnx"
        quantize_dynamic(
            model, file, op_types_to_quantize=_OPERATORS, per_channel=True, weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        short = onnx.load(file)
    scrub(short)
    return short
