"""The command line: ``aitune-hf`` and ``python -m aitune_hf``."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aitune_hf.cache import LocalStore, default_cache_dir
from aitune_hf.errors import AITuneError, ConfigError
from aitune_hf.version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except AITuneError as error:
        print(f"aitune-hf: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aitune-hf", description="Faster Diffusers and Transformers pipelines.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser("run", help="run a Python script, with its modules tuned as they are called")
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    run.set_defaults(run=_run)
    cache = commands.add_parser("cache", help="look at the engine cache, check it, or make room")
    cache.add_argument("action", choices=["info", "verify", "gc", "clear"])
    cache.add_argument("--dir", type=Path, help="the cache folder (default: $AITUNE_HF_CACHE or $HF_HOME/aitune)")
    cache.add_argument("--max-mb", type=float, help="for gc: keep at most this many megabytes")
    cache.set_defaults(run=_cache)
    backends = commands.add_parser("backends", help="say which compilers can be used here, and what the others lack")
    backends.set_defaults(run=_backends)
    _add_build(commands)
    _add_sharing(commands)
    return parser


def _backends(arguments: argparse.Namespace) -> int:
    from aitune_hf.backends.registry import available_backends, unavailable_backends

    found = {backend.name: f"{backend.version()}, ready" for backend in available_backends()}
    found |= {name: f"not here: {reason}" for name, reason in unavailable_backends().items()}
    width = max(map(len, found))
    for name, text in sorted(found.items()):
        print(f"{name.ljust(width)}  {text}")
    return 0


def _add_build(commands: Any) -> None:
    command = commands.add_parser("build", help="build engines for GPUs that are not here into the cache")
    command.add_argument("pipeline", help="folder or repository of the pipeline")
    command.add_argument("--target", action="append", help="such as rtx:sm89; repeatable (default: RTX 30, 40 and 50)")
    command.add_argument("--task", help="for a Transformers pipeline, its task")
    command.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="what it is to run in over there")
    command.add_argument("--sample", action="append", help="a prompt to record; repeatable (default: a red fox)")
    command.add_argument("--call", default="{}", help="more arguments of each call, as JSON: '{\"height\": 512}'")
    command.set_defaults(run=_build)


def _build(arguments: argparse.Namespace) -> int:
    """Settings come from ``AITUNE_HF_*``."""
    import torch

    from aitune_hf.pipeline import AITunePipeline
    from aitune_hf.target import modules_of
    from aitune_hf.tuning.targets import DEFAULT_TARGETS

    try:
        call = json.loads(arguments.call)
    except ValueError:
        call = None
    if not isinstance(call, dict):
        print(f"aitune-hf: --call takes a JSON object, got {arguments.call!r}", file=sys.stderr)
        return 2
    pipe = AITunePipeline.from_pretrained(arguments.pipeline, task=arguments.task)
    if arguments.dtype:
        for module in modules_of(pipe).values():
            module.to(getattr(torch, arguments.dtype))
    samples, targets = arguments.sample or ["a red fox"], arguments.target or DEFAULT_TARGETS
    report = pipe.build_for(samples, targets, **call)
    print(report)
    return 0 if report.engines else 1


def _add_sharing(commands: Any) -> None:
    helps = {
        "push": "share the engines that a pipeline uses",
        "pull": "take over engines that others tuned for a pipeline's structure",
        "lookup": "say what a repository has for a pipeline, without fetching it",
        "explain": "say why it has what it has: engine by engine, or in what the pipelines that it has differ",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("repo", help="owner/name on the Hub, a folder, or a URL such as s3://bucket/path")
        command.add_argument("pipeline", help="folder or repository of the pipeline; of the model with --model")
        command.add_argument("--task", help="for a Transformers pipeline, its task")
        command.add_argument("--model", action="store_true", help="it is a single Transformers model")
        command.add_argument("--revision", help="branch, tag or commit of the repository with engines")
        command.set_defaults(run=_share, action=name)
        if name == "push":
            command.add_argument("--weights", action="store_true", help="upload the pipeline itself too")
            command.add_argument(
                "--private", action="store_true", default=None, help="a repository made now is private"
            )
            command.add_argument("--message", help="of the commit")
            command.add_argument("--create-pr", action="store_true", help="open a pull request")
            command.add_argument(
                "--force", action="store_true", help="publish engines of a private or gated base; replace what is there"
            )
            command.add_argument("--signing-key", type=Path, help="PEM file of a private key to sign with")
        if name == "pull":
            command.add_argument(
                "--trust", action="append", help="owner/name@commit, owner/name, or a file; repeatable"
            )

    keygen = commands.add_parser("keygen", help="make a key to sign engines with; prints the public one")
    keygen.add_argument("file", type=Path, help="where the private key goes: a new file, for its owner alone")
    keygen.set_defaults(run=_keygen)


def _keygen(arguments: argparse.Namespace) -> int:
    from aitune_hf.hub.signature import generate_key

    pair = generate_key()
    path: Path = arguments.file
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pair.private)
    except OSError as error:
        raise ConfigError(f"the private key cannot be written to {path}: {error.strerror or error}") from error
    print(pair.public.decode(), end="")
    return 0


def _signing_key(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the signing key {path} cannot be read: {error.strerror or error}") from error


def _share(arguments: argparse.Namespace) -> int:
    from aitune_hf.model import AITuneModel
    from aitune_hf.pipeline import AITunePipeline
    from aitune_hf.target import checked_sources, explain_target, look_up_target

    # What is wrong with these is said before the pipeline is loaded.
    trust = checked_sources(arguments.repo, getattr(arguments, "trust", None))
    key = _signing_key(getattr(arguments, "signing_key", None))
    if arguments.model:
        target = AITuneModel.from_pretrained(arguments.pipeline)
    else:
        target = AITunePipeline.from_pretrained(arguments.pipeline, task=arguments.task)
    known = {"revision": arguments.revision}
    if arguments.action == "push":
        result = target.push_to_hub(
            arguments.repo,
            weights=arguments.weights,
            private=arguments.private,
            commit_message=arguments.message,
            create_pr=arguments.create_pr,
            force=arguments.force,
            signing_key=key,
            **known,
        )
        print(result.summary())
        return 0
    if arguments.action == "pull":
        pulled = target.pull_tuned(arguments.repo, trust=trust, **known)
        print(pulled.summary())
        return 0 if pulled.hits else 1
    if arguments.action == "lookup":
        found = look_up_target(target, arguments.repo, **known)
        print(found.summary())
        return 0 if found.hits else 1
    print(explain_target(target, arguments.repo, **known))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    """Settings come from ``AITUNE_HF_*``; a summary goes to stderr when the script has ended."""
    from aitune_hf.jit.hierarchy import walk
    from aitune_hf.tuning.enable import enable

    script: Path = arguments.script
    if not script.is_file():
        print(f"aitune-hf: there is no script {script}", file=sys.stderr)
        return 2
    sys.argv = [str(script), *arguments.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    with enable() as session:
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            for patched in walk(session.heads):
                if patched.engines or patched.level == 0:
                    stats = patched.stats
                    print(
                        f"aitune-hf: {patched}: {stats.engine_calls} calls by engines, builds {stats.builds}, "
                        f"loads {stats.loads}",
                        file=sys.stderr,
                    )
    return 0


def _cache(arguments: argparse.Namespace) -> int:
    store = LocalStore(arguments.dir or default_cache_dir(os.environ))
    if arguments.action == "info":
        entries = store.entries()
        print(f"{store.root}: {len(entries)} engines, {store.size() / 1e6:.1f} MB")
        for entry in entries:
            key = entry.manifest.key
            print(f"  {key.hierarchy_hash[:12]} {key.environment.tag} {key.backend} {entry.manifest.size / 1e6:.2f} MB")
        return 0
    if arguments.action == "verify":
        problems = store.verify()
        for problem in problems:
            print(f"{problem.path}: {problem.reason}")
        print(f"{store.root}: {len(problems)} problems")
        return 1 if problems else 0
    if arguments.action == "gc" and arguments.max_mb is None:
        print("aitune-hf: gc needs --max-mb", file=sys.stderr)
        return 2
    done = store.clear() if arguments.action == "clear" else store.gc(int(arguments.max_mb * 1e6))
    print(f"{store.root}: removed {done.entries} engines, {done.bytes / 1e6:.1f} MB")
    return 0
