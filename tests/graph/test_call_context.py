"""What surrounds a call: recognised, kept, and brought about again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from aitune_hf.graph.call_context import CallContext, autocast_dtypes, autocast_state


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    # torch.autocast("cuda") turns itself off on a machine without one.
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [None, "bfloat16", "cpu=bfloat16,cuda=float16"])
def test_a_context_survives_json(training: bool, autocast: str | None) -> None:
    context = CallContext(training=training, needs_grad=not training, autocast=autocast)
    assert CallContext.from_dict(json.loads(json.dumps(context.to_dict()))) == context


def test_autocast_is_named_by_its_dtype() -> None:
    assert autocast_state("cpu") is None
    with torch.autocast("cpu", dtype=torch.float16):
        assert autocast_state("cpu") == "float16"
        assert autocast_dtypes() == {"cpu": torch.float16}


def test_a_device_without_autocast_has_none() -> None:
    assert autocast_state("meta") is None


@pytest.mark.usefixtures("cuda_autocast")
def test_autocast_of_another_device_counts_as_the_forward_may_move_its_inputs() -> None:
    assert autocast_state("cuda") == "float16"
    assert autocast_state("cpu") == "cuda=float16"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_state("cpu") == autocast_state("cuda") == "cpu=bfloat16,cuda=float16"


@pytest.mark.parametrize("wanted", [None, "bfloat16", "float16", "cpu=float16"])
@pytest.mark.parametrize("around", [None, torch.bfloat16, torch.float16])
def test_a_context_brings_its_autocast_about(wanted: str | None, around: torch.dtype | None) -> None:
    expected = {} if wanted is None else {"cpu": getattr(torch, wanted.removeprefix("cpu="))}
    with torch.autocast("cpu", dtype=around, enabled=around is not None):
        before = autocast_dtypes()
        with CallContext(autocast=wanted).enter("cpu"):
            assert autocast_dtypes() == expected
        assert autocast_dtypes() == before


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.usefixtures("cuda_autocast")
def test_a_context_turns_other_autocast_off() -> None:
    with CallContext(autocast="bfloat16").enter("cpu"):
        assert autocast_dtypes() == {"cpu": torch.bfloat16}


def test_a_context_ends_when_the_call_raises() -> None:
    with pytest.raises(ZeroDivisionError), CallContext(autocast="bfloat16").enter("cpu"):
        _ = 1 / 0
    assert autocast_dtypes() == {}
