"""Samples: few, bounded in memory, exact from the disk, and gone afterwards."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from aitune_hf.graph.call_context import CallContext
from aitune_hf.graph.sample_store import Sample, SampleStore
from aitune_hf.graph.structure import flatten


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def sample_of(call: dict[str, Any], output: Any = None) -> Sample:
    node, inputs = flatten(call)
    out_node, outputs = flatten(output)
    return Sample(
        inputs=inputs, input_node=node, outputs=outputs, output_node=out_node, context=CallContext(autocast="bfloat16")
    )


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_first_call_and_a_few_later_ones_are_kept() -> None:
    store = SampleStore()
    kept = []
    for count in range(1, 101):
        if store.wants(((2, 3),)):
            kept.append(count)
            store.add(sample_of({"x": torch.full((2, 3), count)}))
    assert kept == [1, 4, 16]
    assert store.counts == {((2, 3),): 100}
    assert [int(sample.inputs[0][0, 0]) for sample in store] == [1, 4, 16]
    assert len(store) == 3
    assert int(store.first(((2, 3),)).inputs[0][0, 0]) == 1


def test_each_combination_of_shapes_has_its_own_samples_up_to_a_limit() -> None:
    store = SampleStore(max_shapes=2)
    for size in (1, 2, 3):
        for _ in range(size):
            if store.wants(((size,),)):
                store.add(sample_of({"x": torch.zeros(size)}))
    assert store.shapes() == [((2,),), ((1,),)]
    assert store.counts[((3,),)] == 3
    assert [store.wants(((1,),)) for _ in range(3)] == [False, False, True]


def test_a_sample_gives_its_call_back() -> None:
    x = torch.ones(2)
    sample = sample_of({"x": [x], "scale": 2.0}, (x,))
    assert sample.bound() == {"x": [x], "scale": 2.0}
    assert sample.shapes == ((2,),)
    assert sample.nbytes == 16


def test_memory_is_bounded_and_the_rest_is_on_disk(folder: Path) -> None:
    store = SampleStore(max_bytes=3 * 400)
    for index in range(6):
        store.add(sample_of({"x": torch.full((100 + index // 3,), float(index))}))
    held = [slot.sample for slots in store._slots.values() for slot in slots]
    assert sum(sample.nbytes for sample in held if sample is not None) <= 3 * 400
    assert len(files(folder)) == 3
    assert all(path.suffix == ".safetensors" for path in files(folder))
    assert [float(sample.inputs[0][0]) for sample in store] == [0, 1, 2, 3, 4, 5]
    assert float(store.first(((101,),)).inputs[0][0]) == 3


SPECIAL = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-40, 3.7])
TENSORS = {
    **{str(dtype): SPECIAL.to(dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)},
    **{
        str(dtype): torch.tensor([0, 1, 100]).to(dtype)
        for dtype in (torch.int64, torch.int8, torch.uint8, torch.uint16)
    },
    "bool": torch.tensor([True, False]),
    "float8": torch.tensor([1.0, 0.5]).to(torch.float8_e4m3fn),
    "complex64": torch.tensor([1 + 2j, -0j]),
    "complex128": torch.tensor([1 + 2j], dtype=torch.complex128),
    "conj": torch.tensor([1 + 2j]).conj(),
    "neg": torch.tensor([1 + 2j]).conj().imag,
    "empty": torch.zeros(0, 3),
    "0-d": torch.tensor(1.5),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "sliced": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    "expanded": torch.ones(1, 2).expand(3, 2),
    "channels_last": torch.arange(16.0).reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


def bits(tensor: torch.Tensor) -> list[int]:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    values: list[int] = plain.reshape(-1).view(torch.uint8).tolist()
    return values


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_comes_back_from_disk_bit_for_bit(tensor: torch.Tensor) -> None:
    kept, spilled = SampleStore(), SampleStore(max_bytes=-1)
    for store in (kept, spilled):
        store.add(sample_of({"x": tensor, "flag": True}, {"y": tensor}))
    (expected,), (found,) = kept, spilled
    for a, b in ((expected.inputs[0], found.inputs[0]), (expected.outputs[0], found.outputs[0])):
        assert (b.shape, b.dtype, b.device) == (a.shape, a.dtype, a.device)
        assert bits(b) == bits(a)
        assert b.stride() == a.detach().clone().stride()
    assert (found.input_node, found.output_node, found.context) == (
        expected.input_node,
        expected.output_node,
        expected.context,
    )
    assert not found.inputs[0].is_conj()
    assert found.bound()["flag"] is True


def test_many_leaves_keep_their_order() -> None:
    store = SampleStore(max_bytes=0)
    store.add(sample_of({"x": [torch.tensor(float(i)) for i in range(30)]}, torch.tensor(9.0)))
    (sample,) = store
    assert [float(leaf) for leaf in sample.inputs] == list(range(30))
    assert float(sample.outputs[0]) == 9.0


def test_clear_removes_files_and_lets_go_of_tensors(folder: Path) -> None:
    store = SampleStore(max_bytes=100)
    x = torch.zeros(20)
    gone = weakref.ref(x)
    store.wants(((20,),))
    store.add(sample_of({"x": x}))
    store.add(sample_of({"x": torch.zeros(21)}))
    del x
    assert files(folder)
    store.clear()
    assert gone() is None
    assert list(folder.iterdir()) == []
    assert (len(store), store.counts, list(store), store.shapes()) == (0, {}, [], [])
    assert store.wants(((20,),))
    store.add(sample_of({"x": torch.zeros(50)}))
    assert len(store) == len(files(folder)) == 1


def test_a_spilled_sample_keeps_no_tensor_alive() -> None:
    store = SampleStore(max_bytes=0)
    x = torch.zeros(20)
    gone = weakref.ref(x)
    store.add(sample_of({"x": x}))
    del x
    assert gone() is None


def test_files_go_with_the_store(folder: Path) -> None:
    store = SampleStore(max_bytes=0)
    store.add(sample_of({"x": torch.zeros(2)}))
    assert files(folder)
    del store
    gc.collect()
    assert list(folder.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_files_to_its_parent() -> None:
    store = SampleStore(max_bytes=0)
    store.add(sample_of({"x": torch.ones(2)}))
    child = multiprocessing.get_context("fork").Process(target=store.clear)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert [sample.inputs[0].tolist() for sample in store] == [[1.0, 1.0]]
    assert os.getpid() != child.pid


def test_a_full_disk_drops_the_sample_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import safetensors.torch

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    store = SampleStore(max_bytes=100)
    store.add(sample_of({"x": torch.zeros(2)}))
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with caplog.at_level(logging.WARNING):
        store.add(sample_of({"x": torch.zeros(100)}))
    assert "400 bytes" in caplog.text
    assert store.shapes() == [((2,),)]
    assert len(store) == 1
    assert files(folder) == []


def test_threads_do_not_write_over_each_other() -> None:
    store = SampleStore(max_bytes=0)
    barrier = threading.Barrier(8)

    def fill(number: int) -> None:
        barrier.wait()
        for index in range(10):
            store.wants(((3,),))
            store.add(sample_of({"x": torch.full((3,), float(number * 10 + index))}))

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(float(sample.inputs[0][0]) for sample in store) == list(range(80))
    assert store.counts[((3,),)] == 80
