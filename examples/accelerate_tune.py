"""Tune a pipeline with all processes of a launch: the engines to build are shared out, and every process loads all.

    torchrun --standalone --nproc_per_node 2 examples/accelerate_tune.py
    accelerate launch ... examples/accelerate_tune.py            # see examples/ACCELERATE.md for the whole line

Processes meet in the engine cache only, so on several machines it must be a folder that all of them see
(``--cache``, or ``AITUNE_HF_CACHE``). A process that dies holds nobody up: what it was building is built by another.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline

from aitune_hf import AITunePipeline, TuneConfig

DIGITS = Path(__file__).resolve().parent / "digits" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DIGITS), help="a Diffusers pipeline: a folder, or a Hub repository")
    parser.add_argument("--prompts", nargs="+", default=["a handwritten three", "a handwritten eight"])
    parser.add_argument("--steps", type=int, default=4, help="denoising steps per recorded picture")
    parser.add_argument("--cache", type=Path, help="the engine cache, a folder that all processes see")
    arguments = parser.parse_args()

    # Without cpu=True, accelerate makes one process of each on a machine without an accelerator.
    state = PartialState(cpu=not torch.cuda.is_available())
    config = TuneConfig.from_env(progress=False, **({"cache_dir": arguments.cache} if arguments.cache else {}))
    # Moved first: the engines that are taken over from the cache are those for the device it is on.
    pipe = AITunePipeline.from_pipe(DiffusionPipeline.from_pretrained(arguments.model).to(state.device), config=config)

    start = time.perf_counter()
    report = pipe.tune(arguments.prompts, num_inference_steps=arguments.steps)
    built = [path for path, one in report.stats.modules.items() if one.builds]
    print(
        f"rank {state.process_index} of {state.num_processes}: builds {report.builds} {built}, loads {report.loads}, "
        f"{time.perf_counter() - start:.1f} s",
        flush=True,
    )
    if state.is_main_process:
        print(report)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
