"""Tests of the trained digits example: the committed folder loads offline and draws readable digits."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "digits"
MODEL = EXAMPLE / "model"
CARD = ROOT / "model_cards" / "digits.md"
MAX_BYTES = 4_000_000


def load_module(name: str) -> ModuleType:
    """Import a script of the example without putting its folder on the path."""
    spec = importlib.util.spec_from_file_location(f"digits_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


judge = load_module("judge")


@pytest.fixture(scope="module", autouse=True)
def offline() -> Any:
    """Forbid look-ups on the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def pipe(offline: None) -> Any:
    """Load the committed pipeline by its folder alone."""
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(str(MODEL))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, prompts: list[str], steps: int = 10, seed: int = 0, guidance: float = 4.0) -> list[Any]:
    """Draw one picture per prompt."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    return pipe(prompts, num_inference_steps=steps, guidance_scale=guidance, generator=generators).images


def test_folder_is_small_and_free_of_pickles() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt", ".md"}
    assert all(path.stat().st_size > 0 for path in files)


def test_folder_holds_float32_weights_only() -> None:
    from safetensors import safe_open

    weights = sorted(MODEL.rglob("*.safetensors"))
    assert [path.parent.name for path in weights] == ["text_encoder", "unet", "vae"]
    for path in weights:
        with safe_open(path, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                assert tensors.get_slice(key).get_dtype() == "F32"
                assert torch.isfinite(tensors.get_tensor(key)).all()


def test_model_card_is_the_same_in_both_places() -> None:
    assert (MODEL / "README.md").read_text(encoding="utf-8") == CARD.read_text(encoding="utf-8")


def test_loads_offline_as_standard_classes(pipe: Any) -> None:
    names = {name: type(part).__name__ for name, part in pipe.components.items() if part is not None}
    assert names == {
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
        "unet": "UNet2DConditionModel",
        "scheduler": "DDIMScheduler",
    }
    assert pipe.scheduler.config.prediction_type == "v_prediction"


def test_loads_without_python_warnings() -> None:
    from diffusers import StableDiffusionPipeline

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StableDiffusionPipeline.from_pretrained(str(MODEL))


def test_tokenizer_knows_the_caption_words(pipe: Any) -> None:
    tokens = [token.removesuffix("</w>") for token in pipe.tokenizer.tokenize("A Handwritten SEVEN")]
    assert tokens == ["a", "handwritten", "seven"]
    assert pipe.tokenizer.tokenize("7") == ["7</w>"]


@pytest.mark.parametrize("text", ["", "blurple", "\u00dcn\u00efcode \u4e03", "\U0001f3a8 !?", "x" * 500])
def test_tokenizer_splits_unknown_words(pipe: Any, text: str) -> None:
    tokenizer = pipe.tokenizer
    ids = tokenizer(text, padding="max_length", truncation=True).input_ids
    assert len(ids) == tokenizer.model_max_length
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id in ids
    assert tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False).input_ids


def test_split_is_disjoint_and_complete() -> None:
    generator, _ = judge.load_split("generator")
    held_out, _ = judge.load_split("judge")
    assert len(generator) + len(held_out) == 1797
    assert abs(len(generator) / 1797 - judge.GENERATOR_SHARE) < 0.01
    with pytest.raises(ValueError, match="part must be"):
        judge.load_split("test")


def test_judge_reads_real_pictures() -> None:
    assert judge.real_accuracy() >= 0.97


def test_judge_refuses_unpaired_labels() -> None:
    assert judge.load_judge().read([]) == []
    with pytest.raises(ValueError, match="one label per picture"):
        judge.accuracy([], [])


def test_few_steps_are_readable(pipe: Any) -> None:
    images, labels = judge.generate(pipe, count=30, steps=10, seed=1000)
    assert images[0].size == (64, 64)
    assert judge.accuracy(images, labels) >= 0.9


@pytest.mark.parametrize("template", ["a handwritten {}", "the digit {}", "{}"])
def test_numerals_and_other_captions_work(pipe: Any, template: str) -> None:
    images = draw(pipe, [template.format(digit) for digit in range(10)])
    assert judge.accuracy(images, list(range(10))) >= 0.8


def test_equal_seeds_give_equal_pictures(pipe: Any) -> None:
    prompts = ["a handwritten seven"]
    first, second, other = (draw(pipe, prompts, steps=4, seed=seed)[0].tobytes() for seed in (0, 0, 1))
    assert first == second
    assert first != other


def test_empty_prompt_draws_various_digits(pipe: Any) -> None:
    images = draw(pipe, [""] * 20, guidance=1.0)
    assert len(set(judge.load_judge().read(images))) >= 4


@pytest.mark.slow
def test_two_hundred_digits_are_readable(pipe: Any) -> None:
    images, labels = judge.generate(pipe, count=200)
    assert judge.accuracy(images, labels) >= 0.9
