"""The command line: ``aitune-hf`` and ``python -m aitune_hf``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from aitune_hf.cache import LocalStore, default_cache_dir
from aitune_hf.errors import AITuneError
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
    return parser


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
