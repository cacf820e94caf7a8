"""The versions that a bug report names."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import maskfx

PACKAGES = ("numpy", "safetensors", "xxhash", "diffusers", "transformers", "accelerate")


def print_environment() -> None:
    """Print the versions of maskfx, Python and packages, and the device."""
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
