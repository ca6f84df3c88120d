"""Tuned once, fast everywhere: one process publishes its engines, others with empty caches take them over.

    python examples/share.py                      the round trip, through a folder, each process with an empty home
    python examples/share.py --repo you/digits    the same through the Hub (logged in; HF_ENDPOINT is honoured)
    python examples/share.py publish --repo R     tune the digits and push the engines to R
    python examples/share.py use --repo R         draw with the engines of R [--trust yes]

``--repo`` is a repository on the Hub, a folder or any URL that fsspec knows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parent / "digits" / "model"
STEPS = 20
SAMPLES = ["a handwritten three", "a handwritten eight"]


def draw(pipe: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(7)
    return pipe("a handwritten seven", num_inference_steps=STEPS, generator=generator, output_type="np").images[0]


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def publish(repo: str) -> dict[str, Any]:
    """Process A: tune, then push."""
    from aitune_hf import AITunePipeline

    pipe = quiet(AITunePipeline.from_pretrained(MODEL))
    report = pipe.tune(SAMPLES, num_inference_steps=STEPS)
    print(report, file=sys.stderr)
    result = pipe.push_to_hub(repo)
    print(result.summary(), file=sys.stderr)
    again = pipe.push_to_hub(repo)
    return {
        "builds": report.builds,
        "picture": pixels(draw(pipe)),
        "pushed": result.summary(),
        "again": again.summary(),
    }


def use(repo: str, trust: Any) -> dict[str, Any]:
    """Process B (with trust) or C (without): what is pulled answers, or is built by its recipe alone."""
    import diffusers  # noqa: F401 - imports are not what is measured

    from aitune_hf import AITunePipeline

    start = time.perf_counter()
    pipe = quiet(AITunePipeline.from_pretrained(MODEL, tuned=repo, trust=trust))
    picture = draw(pipe)
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {"seconds": seconds}
    if not trust:
        report = pipe.tune(SAMPLES, num_inference_steps=STEPS)
        print(report, file=sys.stderr)
        candidates = [one for each in report.results for one in each.candidates]
        found["built"] = [one.backend for one in candidates if one.source == "built"]
    picture = draw(pipe)
    stats = pipe.tuning_stats()
    return {**found, "builds": stats.builds, "engine_calls": stats.engine_calls, "picture": pixels(picture)}


def eager() -> dict[str, Any]:
    """The same without us."""
    import diffusers

    start = time.perf_counter()
    pipe = quiet(diffusers.StableDiffusionPipeline.from_pretrained(MODEL))
    picture = draw(pipe)
    return {"seconds": time.perf_counter() - start, "picture": pixels(picture)}


def pixels(picture: Any) -> str:
    """The picture as it would be saved, in 8 bits a channel."""
    return (picture * 255).round().astype("uint8").tobytes().hex()


def difference(one: str, other: str) -> int:
    """Largest difference of two pictures, of 255."""
    return max(abs(a - b) for a, b in zip(bytes.fromhex(one), bytes.fromhex(other), strict=True))


def in_own_home(role: str, repo: str, *more: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        unset = {"AITUNE_HF_CACHE", "HF_HUB_CACHE"}
        kept = {key: value for key, value in os.environ.items() if key not in unset}
        command = [sys.executable, __file__, role, "--repo", repo, *more]
        environment = {**kept, "HF_HOME": home}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def round_trip(repo: str) -> None:
    print(f"A tunes, and publishes to {repo}")
    published = in_own_home("publish", repo)
    print(f"  builds {published['builds']}; {published['again'].splitlines()[0]}")
    plain = in_own_home("eager", repo)
    pulled = in_own_home("use", repo, "--trust", "yes")
    print(f"B pulls and trusts: builds {pulled['builds']}, {pulled['engine_calls']} calls answered by engines")
    print(f"  from loading to the first picture {pulled['seconds']:.2f} s, eager {plain['seconds']:.2f} s")
    built = in_own_home("use", repo)
    print(f"C does not trust, and tunes by the recipe: builds {built['builds']} ({', '.join(built['built'])})")
    for name, found in (("A", published), ("B", pulled), ("C", built)):
        print(f"  {name}'s picture is within {difference(found['picture'], plain['picture'])}/255 of eager's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", default="round-trip", choices=["round-trip", "publish", "use", "eager"])
    parser.add_argument("--repo")
    parser.add_argument("--trust", choices=["yes"], help="let the repository's native engines run here")
    arguments = parser.parse_args()
    if arguments.role == "round-trip":
        if arguments.repo:
            round_trip(arguments.repo)
        else:
            with tempfile.TemporaryDirectory() as folder:
                round_trip(f"file://{folder}")
        return
    if not arguments.repo:
        parser.error(f"{arguments.role} needs --repo")
    if arguments.role == "publish":
        found = publish(arguments.repo)
    elif arguments.role == "use":
        found = use(arguments.repo, True if arguments.trust else None)
    else:
        found = eager()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
