"""Pipelines: loading, looking like the real class, tuning, saving, and wrong input."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline
from transformers import BertConfig, BertModel, BertTokenizer, FeatureExtractionPipeline

import aitune_hf
from aitune_hf import AITuneModel, AITunePipeline, TuneConfig
from aitune_hf.backends.testing import FakeBackend
from aitune_hf.errors import ConfigError, PipelineLoadError, SampleError

PROMPT = "a fox"
CALL = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "np"}


def first_working(tmp_path: Path, backend: FakeBackend | None = None) -> TuneConfig:
    backend = backend or FakeBackend()
    return TuneConfig(backends=(backend,), strategy="first_working", cache_dir=tmp_path, progress=False, min_share=0.0)


def draw(pipe: Any, **kwargs: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    picture: np.ndarray = pipe(PROMPT, generator=torch.Generator().manual_seed(0), **{**CALL, **kwargs}).images[0]
    return picture


@pytest.fixture
def tuned(tiny_sd_folder: Path, tmp_path: Path) -> Any:
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path))
    pipe.tune([PROMPT], **CALL)
    return pipe


@pytest.fixture(scope="module")
def eager_picture(tiny_sd_folder: Path) -> np.ndarray:
    return draw(StableDiffusionPipeline.from_pretrained(tiny_sd_folder))


def test_it_is_the_real_class_with_a_few_methods_more(tiny_sd_folder: Path, tmp_path: Path) -> None:
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path))
    assert isinstance(pipe, StableDiffusionPipeline)
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    assert inspect.signature(pipe.__call__) == inspect.signature(StableDiffusionPipeline.__call__.__get__(pipe))
    assert pipe.device == torch.device("cpu")


def test_the_picture_is_the_same_and_engines_drew_it(tuned: Any, eager_picture: np.ndarray) -> None:
    np.testing.assert_allclose(draw(tuned), eager_picture, atol=2e-5)
    stats = tuned.tuning_stats()
    assert stats.modules["unet"].engine_calls == 2
    assert stats.modules["text_encoder"].engine_calls == 2
    assert stats.modules["vae.decoder"].engine_calls == 1
    assert stats.modules["unet"].eager_calls == {}


def test_guidance_and_image_count_change_the_batch_and_not_the_answer(tuned: Any, tiny_sd_folder: Path) -> None:
    plain = StableDiffusionPipeline.from_pretrained(tiny_sd_folder)
    for options in ({"guidance_scale": 5.0}, {"guidance_scale": 1.0}, {"num_images_per_prompt": 3}, {}):
        np.testing.assert_allclose(draw(tuned, **options), draw(plain, **options), atol=2e-5)


def test_other_sizes_run_eager_and_say_so(tuned: Any, tiny_sd_folder: Path) -> None:
    plain = StableDiffusionPipeline.from_pretrained(tiny_sd_folder)
    np.testing.assert_allclose(draw(tuned, height=48), draw(plain, height=48), atol=2e-5)
    assert any("axis 2" in reason for reason in tuned.tuning_stats().modules["unet"].eager_calls)


def test_tuning_leaves_scheduler_generators_and_random_state_as_found(tiny_sd_folder: Path, tmp_path: Path) -> None:
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path))
    scheduler = copy.deepcopy(vars(pipe.scheduler))
    generator = torch.Generator().manual_seed(5)
    before, drawn = torch.get_rng_state(), generator.get_state()
    pipe.tune([PROMPT], generator=generator, **CALL)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), drawn)
    assert str(vars(pipe.scheduler)) == str(scheduler)
    assert pipe._progress_bar_config == {}


def test_a_saved_folder_is_the_plain_pipeline(tuned: Any, tmp_path: Path, eager_picture: np.ndarray) -> None:
    folder = tmp_path / "saved"
    tuned.save_pretrained(folder)
    assert '"StableDiffusionPipeline"' in (folder / "model_index.json").read_text()
    names = sorted(path.name for path in folder.rglob("*.safetensors"))
    assert all("_orig_mod" not in name for name in names)
    np.testing.assert_allclose(draw(DiffusionPipeline.from_pretrained(folder)), eager_picture, atol=1e-6)


def test_a_pipeline_made_of_its_components_runs_the_engines(tuned: Any) -> None:
    calls = tuned.tuning_stats().engine_calls
    draw(StableDiffusionPipeline(**tuned.components, requires_safety_checker=False))
    assert tuned.tuning_stats().engine_calls > calls


def test_from_pipe_shares_components(tiny_sd_folder: Path, tmp_path: Path, eager_picture: np.ndarray) -> None:
    plain = StableDiffusionPipeline.from_pretrained(tiny_sd_folder)
    pipe = AITunePipeline.from_pipe(plain, config=first_working(tmp_path))
    assert pipe.unet is plain.unet
    pipe.tune([PROMPT], **CALL)
    np.testing.assert_allclose(draw(plain), eager_picture, atol=2e-5)
    assert aitune_hf.stats(plain).engine_calls > 0


def test_untune_gives_the_pipeline_from_before(tuned: Any, eager_picture: np.ndarray) -> None:
    tuned.untune()
    assert tuned.tuning_stats().modules == {}
    assert all("forward" not in vars(module) for module in tuned.unet.modules())
    np.testing.assert_array_equal(draw(tuned), eager_picture)


def test_the_next_load_takes_engines_from_the_cache_and_checks_them_once(
    tiny_sd_folder: Path, tmp_path: Path, eager_picture: np.ndarray
) -> None:
    AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path)).tune([PROMPT], **CALL)
    again = FakeBackend()
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path, again))
    assert pipe.tuning_stats().loads == 3
    np.testing.assert_allclose(draw(pipe), eager_picture, atol=2e-5)
    np.testing.assert_allclose(draw(pipe), eager_picture, atol=2e-5)
    unet = pipe.tuning_stats().modules["unet"]
    assert dict(unet.eager_calls) == {"first call of a loaded engine, checked against eager": 1}
    assert unet.engine_calls == 3
    assert again.builds == []


def test_a_cached_engine_that_is_wrong_is_found_out_at_its_first_call(
    tiny_sd_folder: Path, tmp_path: Path, eager_picture: np.ndarray
) -> None:
    AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path)).tune([PROMPT], **CALL)
    wrong = FakeBackend(spoil=lambda leaves: [leaf + 0.5 for leaf in leaves])
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path, wrong))
    for _ in range(2):
        np.testing.assert_allclose(draw(pipe), eager_picture, atol=2e-5)
    assert pipe.tuning_stats().engine_calls == 0
    assert any("is wrong" in reason for reason in pipe.tuning_stats().eager_calls)
    # They are gone from the cache, and a new tuning builds them again.
    assert not list((tmp_path / "aitune" / "v1").rglob("engine.json"))
    right = FakeBackend()
    assert pipe.tune([PROMPT], config=first_working(tmp_path, right), **CALL).builds == 3
    np.testing.assert_allclose(draw(pipe), eager_picture, atol=2e-5)


def test_a_move_to_another_kind_of_device_takes_the_engines_of_that_device(
    tiny_sd_folder: Path, tmp_path: Path, eager_picture: np.ndarray
) -> None:
    AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path)).tune([PROMPT], **CALL)
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path))
    assert pipe.to("meta") is pipe
    assert pipe.tuning_stats().modules == {}
    with pytest.raises(NotImplementedError):
        pipe.to("cpu")
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path)).to("cpu")
    assert pipe.tuning_stats().loads == 3
    np.testing.assert_allclose(draw(pipe), eager_picture, atol=2e-5)


def test_a_prompt_list_is_a_batch_and_a_callable_drives(tiny_sd_folder: Path, tmp_path: Path) -> None:
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path))
    pipe.tune([{"prompt": PROMPT}, [PROMPT, "a dog"], lambda one: draw(one)], **CALL)
    pipe.set_progress_bar_config(disable=True)
    pipe([PROMPT, "a cat"], **CALL)
    assert pipe.tuning_stats().eager_calls == {}


def test_a_sample_that_raises_leaves_the_pipeline_usable(
    tiny_sd_folder: Path, tmp_path: Path, eager_picture: np.ndarray
) -> None:
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=first_working(tmp_path))
    with pytest.raises(SampleError, match=r"sample 1 \('a fox'\) failed in the target itself: ValueError"):
        pipe.tune([{"prompt": PROMPT, "height": 32}, PROMPT], **{**CALL, "height": 33})
    np.testing.assert_array_equal(draw(pipe), eager_picture)
    with pytest.raises(SampleError, match="at least one sample"):
        pipe.tune([])
    np.testing.assert_array_equal(draw(pipe), eager_picture)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("./no/such/folder", "there is no folder"),
        ("/no/such/folder", "there is no folder"),
        ("someone/some-pipeline", "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_be_found_is_one_clear_error(name: str, what: str) -> None:
    with pytest.raises(PipelineLoadError, match=what) as caught:
        AITunePipeline.from_pretrained(name)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_pipeline_and_an_unknown_task_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PipelineLoadError, match="is it the right folder"):
        AITunePipeline.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PipelineLoadError, match="task="):
        AITunePipeline.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no-such-task"):
        AITunePipeline.from_pretrained(tmp_path, task="no-such-task")
    with pytest.raises(ConfigError, match="from_pretrained"):
        AITunePipeline()


@pytest.fixture
def bert_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=32,
        max_position_embeddings=32,
    )
    BertModel(config).eval().save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def test_a_transformers_pipeline_is_tuned_over_lengths_and_batches(bert_folder: Path, tmp_path: Path) -> None:
    import transformers

    plain = transformers.pipeline("feature-extraction", model=str(bert_folder))
    pipe = AITunePipeline.from_pretrained(bert_folder, task="feature-extraction", config=first_working(tmp_path))
    assert isinstance(pipe, FeatureExtractionPipeline)
    pipe.tune(["a", "a b c d e f", {"inputs": ["a b", "c d e"], "batch_size": 2}])
    for sentences, batch in ((["a b c"], 1), (["a b c d", "e"], 2), (["b"], 1)):
        ours, theirs = pipe(sentences, batch_size=batch), plain(sentences, batch_size=batch)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert pipe.tuning_stats().engine_calls == 3
    assert pipe.tuning_stats().eager_calls == {}


def test_a_model_keeps_its_class_and_its_hash(bert_folder: Path, tmp_path: Path) -> None:
    plain = BertModel.from_pretrained(bert_folder).eval()
    model = AITuneModel.from_pretrained(bert_folder, config=first_working(tmp_path))
    assert type(model).__name__ == "BertModel"
    assert isinstance(model, BertModel)
    assert aitune_hf.hierarchy_hash(model) == aitune_hf.hierarchy_hash(plain)
    ids = torch.tensor([[2, 5, 6, 3]])
    model.tune([{"input_ids": ids}])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).last_hidden_state, plain(ids).last_hidden_state, atol=1e-5, rtol=1e-5)
    assert model.tuning_stats().engine_calls == 1
    copied = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(copied(ids).last_hidden_state, plain(ids).last_hidden_state, atol=1e-5, rtol=1e-5)
    assert type(pickle.loads(pickle.dumps(model))) is BertModel
    assert b"aitune" not in pickle.dumps(model)
    model.untune()
    assert model.tuning_stats().modules == {}


def test_scheduler_swaps_do_not_disturb_tuned_modules(tuned: Any, tiny_sd_folder: Path) -> None:
    plain = StableDiffusionPipeline.from_pretrained(tiny_sd_folder)
    for pipe in (tuned, plain):
        pipe.scheduler = DDIMScheduler(steps_offset=1, clip_sample=False, beta_end=0.01)
    np.testing.assert_allclose(draw(tuned), draw(plain), atol=2e-5)
