"""Draw pictures with all processes of a launch, each its share of the prompts, with engines from the cache.

    torchrun --standalone --nproc_per_node 2 examples/accelerate_generate.py
    accelerate launch ... examples/accelerate_generate.py        # see examples/ACCELERATE.md for the whole line

Run ``accelerate_tune.py`` first: nothing is built here. The first call of each engine is checked against eager.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline

from aitune_hf import AITunePipeline, TuneConfig

DIGITS = Path(__file__).resolve().parent / "digits" / "model"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DIGITS), help="a Diffusers pipeline: a folder, or a Hub repository")
    parser.add_argument("--prompts", nargs="+", default=[f"a handwritten {word}" for word in WORDS])
    parser.add_argument("--steps", type=int, default=20, help="denoising steps per picture")
    parser.add_argument("--out", type=Path, default=Path("demo_out/accelerate"))
    parser.add_argument("--cache", type=Path, help="the engine cache, a folder that all processes see")
    arguments = parser.parse_args()

    state = PartialState(cpu=not torch.cuda.is_available())
    config = TuneConfig.from_env(progress=False, **({"cache_dir": arguments.cache} if arguments.cache else {}))
    # Moved first: the engines that are taken over from the cache are those for the device it is on.
    pipe = AITunePipeline.from_pipe(DiffusionPipeline.from_pretrained(arguments.model).to(state.device), config=config)
    pipe.set_progress_bar_config(disable=True)
    arguments.out.mkdir(parents=True, exist_ok=True)

    numbered = list(enumerate(arguments.prompts))
    with state.split_between_processes(numbered) as mine:
        for number, prompt in mine:
            generator = torch.Generator(state.device).manual_seed(number)
            picture = pipe(prompt, num_inference_steps=arguments.steps, generator=generator).images[0]
            picture.save(arguments.out / f"{number:03d}-rank{state.process_index}.png")

    done = pipe.tuning_stats()
    print(
        f"rank {state.process_index} of {state.num_processes}: {len(mine)} pictures in {arguments.out}, "
        f"builds {done.builds}, loads {done.loads}, calls by engines {done.engine_calls}, by eager {done.eager_calls}",
        flush=True,
    )
    state.destroy_process_group()


if __name__ == "__main__":
    main()
