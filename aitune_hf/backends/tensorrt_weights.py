"""How a TensorRT plan comes by its weights.

``inputs``: they are inputs of the network beside the call's own, so a plan holds none of them, needs no driver to be
built, and runs on the module's live tensors, whichever they are. This is how engines are made for GPUs that are not
there, and how one plan serves all modules of a structure.
``refit``: they are filled into the loaded engine, which may lay them out as it likes. Needs a driver to be built.
``plan``: they are part of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from aitune_hf.backends.constants import Constant, lookup, resolve
from aitune_hf.backends.probes import pinned_constants, tensor_digest, values_of
from aitune_hf.errors import BuildError, EngineLoadError

if TYPE_CHECKING:
    import onnx

    from aitune_hf.backends.export import CapturedGraph
    from aitune_hf.backends.onnx_export import OnnxExport

__all__ = ["Delivery", "PlanWeights", "weights_as_inputs", "weights_of"]

Delivery = Literal["inputs", "refit", "plan"]


@dataclass(frozen=True, kw_only=True)
class PlanWeights:
    """Which tensors of a module a plan takes, and which it relies on.

    Attributes:
        delivery: how it comes by them.
        constants: the module's tensors, by the plan's name for each.
        dtype: what they are cast to; None leaves them as they are, so that no copy is needed.
        pinned: tables whose values are part of the plan: their places in the module, and digests.
    """

    delivery: Delivery
    constants: Mapping[str, Constant]
    dtype: str | None
    pinned: tuple[tuple[Constant, str], ...]

    @property
    def copies(self) -> bool:
        """Whether the engine has values of its own, which edits of the module do not reach."""
        return self.delivery != "inputs" or self.dtype is not None

    def live(self, module: nn.Module, where: str, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors by the plan's names, cast where it wants another type.

        Raises:
            EngineLoadError: naming the first that is missing or has another form.
        """
        if self.delivery == "plan":
            return {}
        found = resolve(list(self.constants.values()), module, {}, where, device)
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        return {name: _as_wanted(found[constant.name], dtype) for name, constant in self.constants.items()}

    def tables(self, module: nn.Module, where: str) -> list[tuple[torch.Tensor, int]]:
        """The tables that the plan relies on, each with its version: it has to be looked at again when that changes.

        Raises:
            EngineLoadError: naming the first that is missing or has other values.
        """
        found: list[tuple[torch.Tensor, int]] = []
        for constant, digest in self.pinned:
            table = lookup(module, constant.path)
            problem = None
            if table is None:
                problem = "is not there"
            elif table.is_inference():
                problem = "was made in inference mode, where edits leave no trace"
            elif table.is_meta or tensor_digest(table) != digest:
                problem = "has other values than when the engine was built"
            if problem or table is None:
                raise EngineLoadError(
                    f"{where}: {constant.name} {problem}. It is a table that became part of the engine; tune again for "
                    "this module"
                )
            found.append((table, table._version))
        return found

    def to_json(self) -> dict[str, Any]:
        """JSON form; holds no values."""
        return {
            "delivery": self.delivery,
            "constants": {name: constant.to_json() for name, constant in sorted(self.constants.items())},
            "dtype": self.dtype,
            "pinned": [[constant.to_json(), digest] for constant, digest in self.pinned],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanWeights:
        """Inverse of :meth:`to_json`."""
        return cls(
            delivery=data["delivery"],
            constants={name: Constant.from_json(item) for name, item in data["constants"].items()},
            dtype=data["dtype"],
            pinned=tuple((Constant.from_json(item), digest) for item, digest in data["pinned"]),
        )


def weights_of(
    graph: CapturedGraph, export: OnnxExport, delivery: Delivery, dtype: str | None, *, for_cuda: bool, where: str
) -> PlanWeights:
    """What a plan made from ``export`` takes from the module.

    Args:
        dtype: what float32 weights are cast to, if anything.
        for_cuda: the graph was recorded on another device than it will run on.

    Raises:
        BuildError: if weights are to be read in place and cannot be.
    """
    known = {constant.name: constant for constant in graph.constants}
    values = values_of(graph.program)
    names = {id(tensor): name for name, tensor in values.items()}
    constants = {name: known[names[id(tensor)]] for name, tensor in export.weights.items()}
    if delivery == "inputs" and dtype is None:
        for constant in constants.values():
            if not _is_contiguous(constant):
                raise BuildError(
                    f"{where}: the weight {constant.name} is not contiguous (strides {list(constant.stride)}), so TensorRT "
                    "cannot read it in place"
                )
    if for_cuda:
        constants = {name: replace(constant, device_type="cuda") for name, constant in constants.items()}
    pinned = pinned_constants(graph) & _read(graph)
    tables = tuple(
        (constant, tensor_digest(values[constant.name]))
        for constant in graph.constants
        if constant.name in pinned and constant.kind != "residual"
    )
    return PlanWeights(delivery=delivery, constants=constants, dtype=dtype, pinned=tables)


def weights_as_inputs(export: OnnxExport) -> onnx.ModelProto:
    """The graph with its weights as inputs behind its own, under their own names."""
    from onnx import ModelProto, helper

    model = ModelProto()
    model.CopyFrom(export.model)
    graph = model.graph
    weights = [tensor for tensor in graph.initializer if tensor.name in export.weights]
    others = [tensor for tensor in graph.initializer if tensor.name not in export.weights]
    graph.input.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in weights
    )
    del graph.initializer[:]
    graph.initializer.extend(others)
    return model


def _as_wanted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    plain = tensor.detach()
    if dtype is None or plain.dtype != torch.float32:
        return plain
    limits = torch.finfo(dtype)
    return plain.clamp(limits.min, limits.max).to(dtype).contiguous()


def _is_contiguous(constant: Constant) -> bool:
    expected, step = [], 1
    for size in reversed(constant.shape):
        expected.append(step)
        step *= size
    pairs = zip(constant.shape, constant.stride, reversed(expected), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs) or 0 in constant.shape


def _read(graph: CapturedGraph) -> set[str]:
    """Names of the constants that the program makes use of."""
    read = {node.name for node in graph.program.graph.nodes if node.op == "placeholder" and node.users}
    specs = graph.program.graph_signature.input_specs
    return {str(spec.target) for spec in specs if spec.target is not None and spec.arg.name in read}
