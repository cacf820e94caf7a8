"""The command `maskfx`: arguments only."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import maskfx
from maskfx.errors import InputError

PACKAGES = ("numpy", "safetensors", "xxhash", "diffusers", "transformers", "accelerate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="maskfx", description="Edits at the cost of the mask.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions, for bug reports").set_defaults(run=env)
    commands.add_parser("demo", help="a first edit on the CPU").set_defaults(run=demo)
    add_cache(commands.add_parser("cache", help="a directory of recorded steps"))
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except InputError as error:
        print(f"maskfx: {error}", file=sys.stderr)
        return 2


def add_cache(parser: argparse.ArgumentParser) -> None:
    """The arguments of `maskfx cache`."""
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in {
        "ls": "its entries, least recently used first",
        "verify": "read every entry, remove the damaged; status 1 if there was one",
        "gc": "remove what is too old or too much, and what dead writers left",
    }.items():
        action = actions.add_parser(name, help=text)
        action.add_argument("directory", metavar="DIR", type=Path)
        action.set_defaults(run=cache)
    action.add_argument("--budget", metavar="BYTES", type=int, help="bytes that may stay")
    action.add_argument("--ttl", metavar="SECONDS", type=float, help="unused for longer: removed")


def cache(options: argparse.Namespace) -> int:
    """Look after a directory of recorded steps."""
    from maskfx import stored

    match options.action:
        case "ls":
            return stored.ls(options.directory)
        case "verify":
            return stored.verify(options.directory)
    return stored.gc(options.directory, options.budget, options.ttl)


def env(_: argparse.Namespace) -> None:
    """Print the versions that matter."""
    print(f"maskfx {maskfx.__version__}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"CUDA device: {cuda}")
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name}: not installed")


def demo(_: argparse.Namespace) -> None:
    """Run the demo."""
    from maskfx.demo import main as run

    run()


if __name__ == "__main__":
    raise SystemExit(main())
