"""Field cases of a whole pipeline, with engines that need no compiler."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jit_kit import Bench

from aitune_hf.pipeline import AITunePipeline


def draw(pipe: Any, prompt: Any = "a fox", **settings: Any) -> np.ndarray[Any, Any]:
    known = {"num_inference_steps": 2, "output_type": "np", "height": 32, "width": 32}
    generator = torch.Generator().manual_seed(4)
    images: np.ndarray[Any, Any] = pipe(prompt, generator=generator, **{**known, **settings}).images
    return images


def same(ours: Any, theirs: Any, *args: Any, **settings: Any) -> None:
    one, other = draw(ours, *args, **settings), draw(theirs, *args, **settings)
    assert one.shape == other.shape
    assert np.allclose(one, other, atol=1e-3), np.abs(one - other).max()


def twin_of(pipe: Any) -> Any:
    parts = {name: copy.deepcopy(part) for name, part in pipe.components.items()}
    twin = type(pipe)(**parts, requires_safety_checker=False)
    twin.set_progress_bar_config(disable=True)
    return twin


def tuned(bench: Bench, sd: Any, *samples: Mapping[str, Any]) -> Any:
    pipe = AITunePipeline.from_pipe(sd, config=bench.config())
    known = {"prompt": "a fox", "num_inference_steps": 2, "height": 32, "width": 32, "output_type": "np"}
    pipe.tune([{**known, **sample} for sample in (samples or ({},))])
    return pipe


def test_4_guidance_and_images_per_prompt_change_the_inner_batch(bench: Bench, sd: Any) -> None:
    twin = twin_of(sd)
    pipe = tuned(bench, sd, {"guidance_scale": 5.0})
    for settings in (
        {"guidance_scale": 5.0},
        {"guidance_scale": 1.0},
        {"guidance_scale": 5.0, "num_images_per_prompt": 3},
        {"guidance_scale": 5.0},
    ):
        same(pipe, twin, **settings)
    assert pipe.tuning_stats().engine_calls > 0


def test_1_sizes_seen_run_on_engines_and_others_are_still_right(bench: Bench, sd: Any) -> None:
    twin = twin_of(sd)
    pipe = tuned(bench, sd, {"height": 48, "width": 32}, {"height": 32, "width": 48})
    for height, width in ((48, 32), (32, 48), (64, 64)):
        same(pipe, twin, height=height, width=width)


def test_9_another_pipeline_of_the_same_components_still_runs_the_engines(bench: Bench, sd: Any) -> None:
    from diffusers import StableDiffusionPipeline

    twin = twin_of(sd)
    pipe = tuned(bench, sd)
    other = StableDiffusionPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    before = pipe.tuning_stats().engine_calls
    same(other, twin)
    assert pipe.tuning_stats().engine_calls > before


def test_10_the_pipelines_device_is_right(bench: Bench, sd: Any) -> None:
    pipe = tuned(bench, sd)
    assert pipe.device == torch.device("cpu")
    assert all(part.device == torch.device("cpu") for part in (pipe.unet, pipe.vae, pipe.text_encoder))
    assert pipe.dtype == torch.float32


def test_11_a_saved_folder_loads_in_plain_diffusers_with_the_same_image(bench: Bench, sd: Any, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    pipe = tuned(bench, sd)
    pipe.save_pretrained(tmp_path / "saved")
    index = (tmp_path / "saved" / "model_index.json").read_text()
    assert '"_class_name": "StableDiffusionPipeline"' in index
    assert "aitune" not in index.lower()
    assert not any("_orig_mod" in key for key in pipe.unet.state_dict())
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "saved")
    loaded.set_progress_bar_config(disable=True)
    before = pipe.tuning_stats().engine_calls
    same(pipe, loaded)
    assert pipe.tuning_stats().engine_calls > before


def test_12_hooks_on_components_fire_once_per_call(bench: Bench, sd: Any) -> None:
    twin = twin_of(sd)
    pipe = tuned(bench, sd)
    logs: tuple[list[str], list[str]] = ([], [])
    for one, log in zip((pipe, twin), logs, strict=True):
        one.unet.register_forward_hook(lambda *_, log=log: log.append("unet"))
        one.unet.mid_block.register_forward_hook(lambda *_, log=log: log.append("mid"))
        one.vae.decoder.register_forward_hook(lambda *_, log=log: log.append("decoder"))
        one.text_encoder.register_forward_hook(lambda *_, log=log: log.append("text"))
    for _ in range(2):
        same(pipe, twin)
    assert logs[0] == logs[1]
    assert logs[0].count("unet") == 4


def test_13_counters_prove_that_engines_ran(bench: Bench, sd: Any) -> None:
    pipe = tuned(bench, sd)
    before = pipe.tuning_stats()
    calls = {path: one.engine_calls for path, one in before.modules.items()}
    draw(pipe, num_inference_steps=3)
    after = pipe.tuning_stats()
    ran = {path: one.engine_calls - calls[path] for path, one in after.modules.items()}
    assert ran["unet"] == 3
    assert ran["text_encoder"] == 2
    assert sum(count for path, count in ran.items() if path.startswith("vae")) >= 1
    assert pipe.unet.forward is not None
    with torch.no_grad():
        pipe.text_encoder.forward(torch.tensor([[0, 5, 2] + [1] * 13]))
    assert pipe.tuning_stats().modules["text_encoder"].engine_calls > 0


@pytest.mark.parametrize("change", ["freeu", "fuse", "scheduler", "weights", "tiling"])
def test_15_switches_between_calls_are_followed(bench: Bench, sd: Any, change: str) -> None:
    from diffusers import EulerDiscreteScheduler

    def apply(pipe: Any) -> None:
        if change == "freeu":
            pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.4, b2=1.6)
        elif change == "fuse":
            pipe.unet.fuse_qkv_projections()
        elif change == "scheduler":
            pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
        elif change == "tiling":
            pipe.vae.enable_tiling()
        else:
            with torch.no_grad():
                pipe.unet.conv_out.weight.mul_(1.5)

    twin = twin_of(sd)
    pipe = tuned(bench, sd)
    same(pipe, twin)
    apply(pipe)
    apply(twin)
    for _ in range(2):
        same(pipe, twin)


@pytest.mark.parametrize("when", ["before", "after"])
def test_16_model_offload_hooks_on_components(bench: Bench, sd: Any, when: str) -> None:
    from accelerate import cpu_offload_with_hook

    twin = twin_of(sd)

    def offload(pipe: Any) -> None:
        hook = None
        for part in (pipe.text_encoder, pipe.unet, pipe.vae):
            _, hook = cpu_offload_with_hook(part, torch.device("cpu"), prev_module_hook=hook)

    if when == "before":
        offload(sd)
    pipe = tuned(bench, sd)
    if when == "after":
        offload(pipe)
    for _ in range(2):
        same(pipe, twin)
    assert pipe.tuning_stats().engine_calls > 0


def test_19_a_deleted_pipeline_frees_everything(bench: Bench, sd: Any) -> None:
    pipe = tuned(bench, sd)
    draw(pipe)
    references = [weakref.ref(part) for part in (pipe.unet, pipe.vae.decoder, pipe.text_encoder, pipe.unet.conv_in)]
    kept = {name: part for name, part in sd.components.items() if not isinstance(part, torch.nn.Module)}
    for name in ("unet", "vae", "text_encoder"):
        setattr(sd, name, None)
    vars(sd).clear()
    bench.backend.engines.clear()
    del pipe, kept
    gc.collect()
    # The fixtures of these parts still hold them; the parts themselves must not be held by us.
    holders = [one for reference in references if reference() is not None for one in gc.get_referrers(reference())]
    assert not any(type(one).__module__.startswith("aitune_hf") for one in holders)


def test_23_tuning_moves_no_generator_and_no_scheduler(bench: Bench, sd: Any) -> None:
    pipe = AITunePipeline.from_pipe(sd, config=bench.config())
    generator = torch.Generator().manual_seed(9)
    scheduler = copy.deepcopy(vars(pipe.scheduler))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes(), generator.get_state()
    pipe.tune([{"prompt": "a fox", "generator": generator, "height": 32, "width": 32}], num_inference_steps=2)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes(), generator.get_state()
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(states, after, strict=True))
    assert vars(pipe.scheduler).keys() == scheduler.keys()
    assert torch.equal(pipe.scheduler.timesteps, scheduler["timesteps"])


def test_24_training_mode_of_a_component_runs_eager(bench: Bench, sd: Any) -> None:
    twin = twin_of(sd)
    pipe = tuned(bench, sd)
    for one in (pipe, twin):
        one.unet.train()
    before = pipe.tuning_stats().modules["unet"].engine_calls
    same(pipe, twin)
    assert pipe.tuning_stats().modules["unet"].engine_calls == before
    for one in (pipe, twin):
        one.unet.eval()
    same(pipe, twin)
    assert pipe.tuning_stats().modules["unet"].engine_calls > before


def test_untuning_gives_the_pipeline_from_before(bench: Bench, sd: Any) -> None:
    twin = twin_of(sd)
    keys = {name: vars(module).keys() for name, module in sd.unet.named_modules()}
    pipe = tuned(bench, sd)
    pipe.untune()
    assert {name: vars(module).keys() for name, module in sd.unet.named_modules()} == keys
    same(pipe, twin)
