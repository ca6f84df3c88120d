"""From an ONNX graph to a TensorRT plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aitune_hf.backends.tensorrt_sdk import Sdk
from aitune_hf.errors import BuildError

__all__ = ["Plan", "PlanOrder", "make_plan"]

Shape = tuple[int, ...]
#: What builds of this process have measured, by package and GPU: the next one need not measure it again.
_timings: dict[tuple[str, str], bytes] = {}


@dataclass(frozen=True, kw_only=True)
class PlanOrder:
    """What a plan is to be.

    Attributes:
        shapes: input → smallest, typical and largest shape.
        target: GPU generation such as ``"sm89"``; None is the GPU at hand.
        tf32: round the factors of float32 products to 10 bits.
        refit: leave the weights out of the plan, to be filled in after it is loaded. Needs a driver to build.
    """

    shapes: Mapping[str, tuple[Shape, Shape, Shape]]
    target: str | None = None
    tf32: bool = False
    refit: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan and what is known of it.

    Attributes:
        content: the serialised engine.
        inputs: names of the graph's inputs that it uses.
    """

    content: bytes
    inputs: tuple[str, ...]


def make_plan(sdk: Sdk, model: bytes | Path, order: PlanOrder, where: str) -> Plan:
    """Build a plan.

    Args:
        model: the ONNX graph, or its file where its weights lie beside it.
        where: the module's path, for messages.

    Raises:
        BuildError: naming the operator and the node that the parser refuses, or with what the builder says.
    """
    package = sdk.load()
    said: list[str] = []
    builder = package.Builder(sdk.log(said))
    network = builder.create_network(_network_flags(package))
    _parse(sdk, package, network, model, said, where)
    _loosen_attention(package, network)
    config = builder.create_builder_config()
    _configure(package, config, order)
    inputs = _add_profile(builder, config, network, order, where)
    cache = None
    if order.target is None:
        here = (sdk.name, torch.cuda.get_device_name())
        cache = config.create_timing_cache(_timings.get(here, b""))
        config.set_timing_cache(cache, ignore_mismatch=False)
    content = builder.build_serialized_network(network, config)
    if content is None:
        raise BuildError(f"{where}: {sdk.title} cannot build this graph{_aim(order)}: {_complaint(said)}")
    if cache is not None:
        _timings[here] = bytes(cache.serialize())
    return Plan(content=bytes(content), inputs=inputs)


def _network_flags(package: Any) -> int:
    """Types are those of the graph: TensorRT 10 has to be told so, later ones know nothing else."""
    return 1 << int(package.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def _parse(sdk: Sdk, package: Any, network: Any, model: bytes | Path, said: list[str], where: str) -> None:
    parser = package.OnnxParser(network, sdk.log(said))
    done = parser.parse_from_file(str(model)) if isinstance(model, Path) else parser.parse(model)
    if done:
        return
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if not errors:
        raise BuildError(f"{where}: {sdk.title} cannot read the graph: {_complaint(said)}")
    # Errors that follow from the first name other nodes.
    first = errors[0]
    others = sorted({error.node_operator() for error in errors[1:]} - {first.node_operator()})
    more = f"; it also refuses {', '.join(others)}" if others else ""
    raise BuildError(
        f"{where}: {sdk.title} does not take the operator {first.node_operator()} (node {first.node_name()})"
        f"{_told(first)}{more}"
    )


def _told(error: Any) -> str:
    """What the parser says of an error, where that is more than the text of a failed assertion."""
    text = " ".join(str(error.desc()).split())
    return "" if text in ("", "false") else f": {text[:300]}"


def _loosen_attention(package: Any, network: Any) -> None:
    """Let attention be taken apart where no kernel of its own fits its sizes and type; otherwise the build fails."""
    kind = getattr(package.LayerType, "ATTENTION_OUTPUT", None)
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if kind is not None and layer.type == kind:
            # The network hands out every layer as the base class, and its Python API knows no other cast.
            layer.__class__ = package.IAttentionOutputLayer
            layer.attention.decomposable = True


def _configure(package: Any, config: Any, order: PlanOrder) -> None:
    if order.tf32:
        config.set_flag(package.BuilderFlag.TF32)
    else:
        config.clear_flag(package.BuilderFlag.TF32)
    if order.refit:
        config.set_flag(package.BuilderFlag.REFIT)
        config.set_flag(package.BuilderFlag.STRIP_PLAN)
    if order.target is None:
        return
    config.num_compute_capabilities = 1
    config.set_compute_capability(package.ComputeCapability.__members__[order.target.upper()], 0)


def _add_profile(builder: Any, config: Any, network: Any, order: PlanOrder, where: str) -> tuple[str, ...]:
    profile = builder.create_optimization_profile()
    names = []
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.is_shape_tensor:
            raise BuildError(
                f"{where}: the values of input {tensor.name} decide about shapes, which is not supported: give the graph "
                "fixed shapes"
            )
        names.append(tensor.name)
        if tensor.name in order.shapes and -1 in tuple(tensor.shape):
            profile.set_shape(tensor.name, *order.shapes[tensor.name])
    config.add_optimization_profile(profile)
    return tuple(names)


def _aim(order: PlanOrder) -> str:
    return f" for {order.target}" if order.target else ""


def _complaint(said: Sequence[str]) -> str:
    lines = [" ".join(text.split()) for text in said]
    return lines[0][:400] if lines else "it does not say why"
