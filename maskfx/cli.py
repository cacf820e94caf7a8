"""The command `maskfx`: arguments only."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

import maskfx

PACKAGES = ("numpy", "safetensors", "diffusers", "transformers", "accelerate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="maskfx", description="Edits at the cost of the mask.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions, for bug reports").set_defaults(run=env)
    commands.add_parser("demo", help="a first edit on the CPU").set_defaults(run=demo)
    parser.parse_args(arguments).run()
    return 0


def env() -> None:
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


def demo() -> None:
    """Run the demo."""
    from maskfx.demo import main as run

    run()


if __name__ == "__main__":
    raise SystemExit(main())
