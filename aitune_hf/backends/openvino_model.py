"""An OpenVINO model as files that hold no weights, and as a model again.

In the files every constant that is a weight is an input of the model. Such files are an ordinary IR: XML for the graph,
and a small file with the constants that are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aitune_hf.backends.constant_map import ConstantMap, Slot
from aitune_hf.backends.openvino_convert import constant_nodes
from aitune_hf.backends.openvino_sdk import OV_TYPES, load_openvino
from aitune_hf.errors import EngineLoadError

__all__ = ["GRAPH", "REST", "ModelFiles", "take_weights_out", "write_model"]

GRAPH = "model.xml"
REST = "model.bin"


def take_weights_out(model: Any, constants: ConstantMap) -> None:
    """Turn each constant that the map fills into an input, which has its name."""
    ov = load_openvino()
    nodes = constant_nodes(model)
    for name in constants.slots:
        node = nodes[name]
        weight = ov.op.Parameter(node.get_element_type(), node.get_output_partial_shape(0))
        weight.set_friendly_name(name)
        _put_in_place(weight, node)
        model.add_parameters([weight])


def write_model(model: Any, folder: Path) -> list[str]:
    """Write a model into a folder and return the names of the files."""
    load_openvino().save_model(model, folder / GRAPH, compress_to_fp16=False)
    return [GRAPH, REST]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFiles:
    """What is in the files, kept because a cache may drop the files themselves.

    Attributes:
        graph: the XML.
        rest: the constants that are not weights.
    """

    graph: bytes
    rest: np.ndarray[Any, Any]

    @classmethod
    def read(cls, folder: Path, where: str) -> ModelFiles:
        """Read them.

        Raises:
            EngineLoadError: if they are not there.
        """
        try:
            return cls(graph=(folder / GRAPH).read_bytes(), rest=np.fromfile(folder / REST, dtype=np.uint8))
        except OSError as error:
            raise EngineLoadError(f"{where}: the model's files cannot be read: {error}") from error

    def model(
        self, constants: ConstantMap, live: Mapping[str, torch.Tensor], where: str
    ) -> tuple[Any, list[np.ndarray[Any, Any]]]:
        """The model with the ``live`` weights in it.

        Returns:
            The model, and the arrays that it reads weights from, where they are: most are the module's own memory. They
            must live as long as it, or what was compiled from it.

        Raises:
            EngineLoadError: if the files are no model, or not the one that the map was made for.
        """
        ov = load_openvino()
        try:
            values = constants.fill(live)
            # A copy: the model goes on reading these constants where they are, and would not keep the array alive.
            model = ov.Core().read_model(self.graph, ov.Tensor(self.rest, shared_memory=False))
            inputs = {node.get_friendly_name(): node for node in model.get_parameters()}
            for name, slot in constants.slots.items():
                weight = inputs[name]
                _put_in_place(_constant(ov, slot, values[name]), weight)
                model.remove_parameter(weight)
            model.validate_nodes_and_infer_types()
        except (RuntimeError, KeyError, AttributeError) as error:
            raise EngineLoadError(f"{where}: the files are not the model of this engine: {error}") from error
        return model, list(values.values())


def _constant(ov: Any, slot: Slot, value: np.ndarray[Any, Any]) -> Any:
    kind = getattr(ov.Type, OV_TYPES[getattr(torch, slot.dtype)])
    # Shared, as OpenVINO keeps all constants beside those that it has repacked.
    return ov.op.Constant(ov.Tensor(value, ov.Shape(slot.shape), kind), shared_memory=True)


def _put_in_place(new: Any, old: Any) -> None:
    for target in old.output(0).get_target_inputs():
        target.replace_source_output(new.output(0))
