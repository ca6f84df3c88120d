"""OpenVINO models in 8 bits, made by NNCF. Their weights are rounded together with what they are made of: baked."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aitune_hf.backends.base import BuildRequest
from aitune_hf.backends.constant_map import plain_array
from aitune_hf.backends.openvino_sdk import load_nncf
from aitune_hf.errors import BuildError

if TYPE_CHECKING:
    from aitune_hf.graph.shape_envelope import ShapeEnvelope

__all__ = ["bake"]


def bake(model: Any, options: Mapping[str, Any], request: BuildRequest) -> Any:
    """The model with its weights, or all it computes, in 8 bits.

    Raises:
        BuildError: if NNCF cannot do it, or there is no call to calibrate with.
    """
    with _quiet():
        nncf = load_nncf()
        try:
            if options["quantize"]:
                calls = list(_calls(request, request.capture().envelope))
                if not calls:
                    raise BuildError(f"{request.path}: there is no recorded call of these shapes to calibrate with")
                return nncf.quantize(model, nncf.Dataset(calls), subset_size=len(calls), **_kind(nncf, request))
            return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        except BuildError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BuildError(f"{request.path}: NNCF cannot bring this graph to 8 bits: {lines[0][:300]}") from error


def _kind(nncf: Any, request: BuildRequest) -> dict[str, Any]:
    attends = any("attention" in str(node.target) for node in request.capture().program.graph.nodes)
    return {"model_type": nncf.ModelType.TRANSFORMER} if attends else {}


def _calls(request: BuildRequest, envelope: ShapeEnvelope) -> Iterator[list[np.ndarray[Any, Any]]]:
    """The recorded calls that the model takes."""
    for sample in (request.example, *request.samples):
        if envelope.mismatch(sample.shapes) is None and all(leaf.dtype != torch.bfloat16 for leaf in sample.inputs):
            yield [plain_array(leaf.detach().contiguous()) for leaf in sample.inputs]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """NNCF draws progress bars and tells what it did."""
    logger = logging.getLogger("nncf")
    level = logger.level
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
