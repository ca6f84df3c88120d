"""A whole pipeline, built for GPUs that are not here, from Python and from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from aitune_hf import AITunePipeline, TuneConfig
from aitune_hf.backends.tensorrt import TensorRTRTXBackend
from aitune_hf.cache import LocalStore
from aitune_hf.cli import main

needs_rtx = pytest.mark.skipif(TensorRTRTXBackend().can_aim() is not None, reason="TensorRT-RTX is not installed")


@needs_rtx
@pytest.mark.slow
def test_every_part_of_a_pipeline_gets_a_plan(
    tiny_sd_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AITUNE_HF_CACHE", str(tmp_path))
    monkeypatch.setenv("AITUNE_HF_PROGRESS", "0")
    call = ["--call", '{"num_inference_steps": 2}', "--sample", "a b", "--dtype", "float16", "--target", "rtx:sm89"]
    assert main(["build", str(tiny_sd_folder), *call]) == 0
    table = capsys.readouterr().out
    assert {"unet", "vae.decoder", "text_encoder"} <= set(table.split())
    assert "3 engines" in table
    assert {entry.manifest.key.environment.tag for entry in LocalStore(tmp_path).entries()} == {
        "cuda-sm89-x86_64-linux"
    }
    # The pipeline of another process has nothing to do with them here, and works.
    pipe = AITunePipeline.from_pretrained(tiny_sd_folder, config=TuneConfig(cache_dir=tmp_path))
    pipe.set_progress_bar_config(disable=True)
    assert pipe("a b", num_inference_steps=1).images
    assert pipe.tuning_stats().engine_calls == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--call", "[1]"], "--call takes a JSON object"), (["--target", "gtx:1080"], "expected a backend and a GPU")],
)
def test_a_wrong_command_says_so(
    arguments: list[str], words: str, tiny_sd_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(tiny_sd_folder), *arguments]) == 2
    assert words in capsys.readouterr().err
