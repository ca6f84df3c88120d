"""What a call of a module is: its signature, its leaves, its shapes, its identity. Knows torch only."""

from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.dynamic_shapes import BatchDim, DynamicDim, DynamicShapes, ShapeDefinition
from aitune_hf.graph.forward_signature import ForwardSignature
from aitune_hf.graph.graph_spec import GraphSpec
from aitune_hf.graph.hierarchy_hash import explain, hierarchy_hash
from aitune_hf.graph.locator import Locator
from aitune_hf.graph.sample_metadata import SampleMetadata
from aitune_hf.graph.sample_store import Sample, SampleStore
from aitune_hf.graph.tensor_spec import TensorSpec

__all__ = [
    "BatchDim",
    "CallContext",
    "DynamicDim",
    "DynamicShapes",
    "ForwardSignature",
    "GraphSpec",
    "Locator",
    "Sample",
    "SampleMetadata",
    "SampleStore",
    "ShapeDefinition",
    "TensorSpec",
    "explain",
    "hierarchy_hash",
]
