"""Offloading, and memory: what is recorded, loaded and bound is let go of again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from real_kit import BERT_SAMPLES, Tuned, answers, assert_same, bert_call, tiny_bert
from torch.multiprocessing import reductions

import aitune_hf
from aitune_hf import TuneConfig

CALL = bert_call(2, 9)
StorageWeakRef: Any = reductions.StorageWeakRef
CPU = torch.device("cpu")


def test_offload_after_tuning_never_shows_an_engine_a_meta_tensor(bert: Tuned) -> None:
    bert.same(**CALL)
    cpu_offload(bert.module, execution_device=CPU)
    assert any(parameter.is_meta for parameter in bert.module.parameters())
    with answers(bert.module) as seen:
        for seed in (1, 2):
            bert.same(**bert_call(2, 9, seed=seed))
    assert (seen.engines, sum(seen.eager.values())) == (0, 2)
    remove_hook_from_module(bert.module, recurse=True)
    assert not any(parameter.is_meta for parameter in bert.module.parameters())
    for seed in (1, 2):
        bert.same(**bert_call(2, 9, seed=seed))


def test_offload_before_tuning_stays_eager_with_its_reason(config: TuneConfig) -> None:
    model, twin = tiny_bert(), tiny_bert()
    cpu_offload(model, execution_device=CPU)
    report = aitune_hf.tune(model, BERT_SAMPLES, config)
    assert report.rows[0].backend == "eager"
    assert "hook" in report.rows[0].note
    with torch.no_grad():
        for seed in (1, 2):
            call = bert_call(2, 9, seed=seed)
            assert_same(model(**call), twin(**call))


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    # By exact type: torch keeps fake tensors of what it compiled, and lazy objects that warn when asked what they are.
    return [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]


def storage_bytes() -> int:
    """Bytes of all tensors that Python can still reach, each memory counted once."""
    storages: dict[int, int] = {}
    for tensor in live_tensors():
        try:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        except RuntimeError:
            continue  # Other tests may have left sparse or traced tensors, which have no memory of their own.
    return sum(storages.values())


def test_samples_are_let_go_of_after_tuning(tune: Callable[..., Tuned], bert: Tuned) -> None:
    del bert
    samples = [bert_call(1, 5), bert_call(3, 17)]
    alive = [weakref.ref(tensor) for sample in samples for tensor in sample.values()]
    model = tiny_bert()
    before = storage_bytes()
    tuned = tune(model, samples)
    del samples
    twin_bytes = sum(p.nbytes for p in (*tuned.twin.parameters(), *tuned.twin.buffers()))
    # The samples' outputs alone are (5 + 3 * 17) rows of 32 floats, and more with what is between.
    assert storage_bytes() - before <= twin_bytes + 2048
    assert all(tensor() is None for tensor in alive)
    tuned.same(**CALL)


def test_live_tensors_stay_level_over_many_calls(bert: Tuned) -> None:
    with torch.no_grad():
        bert.module(**CALL)
        before = len(live_tensors())
        with answers(bert.module) as seen:
            for seed in range(20):
                bert.module(**bert_call(1 + seed % 3, 3 + seed % 9, seed=seed))
        assert len(live_tensors()) <= before
    assert seen.engines == 20


def test_a_deleted_model_frees_its_weights(tune: Callable[..., Tuned]) -> None:
    tuned: Any = tune(tiny_bert(), BERT_SAMPLES)
    tuned.same(**CALL)
    model = tuned.module
    tensors = [*model.parameters(), *model.buffers()]
    handles: list[Any] = [weakref.ref(tensor) for tensor in tensors]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    gone = weakref.ref(model)
    del tuned, model, tensors
    gc.collect()
    assert gone() is None
    assert all(handle() is None for handle in handles)
    assert all(storage.expired() for storage in storages)


def test_an_untuned_model_frees_its_engine_and_answers_as_before(bert: Tuned) -> None:
    bert.same(**CALL)
    aitune_hf.untune(bert.module)
    assert aitune_hf.stats(bert.module).modules == {}
    with torch.no_grad():
        assert torch.equal(bert.module(**CALL).last_hidden_state, bert.twin(**CALL).last_hidden_state)
    weight = StorageWeakRef(bert.module.embeddings.word_embeddings.weight.untyped_storage())
    bert.module.embeddings.word_embeddings.weight.data = torch.zeros(99, 32)
    gc.collect()
    assert weight.expired(), "no engine holds the old weight"
