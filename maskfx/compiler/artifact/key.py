"""What a saved program depends on: the module's code, settings, shapes of weights, versions."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

import maskfx.ir
from maskfx.ir.modules.callables import hooks_of, is_called
from maskfx.ir.modules.module_settings import settings_of

VERSIONED = ("diffusers", "transformers", "accelerate")  # beside torch; known by their versions
KNOWN = {"torch", "maskfx", *VERSIONED}
INSTALLED = {"site-packages", "dist-packages"}
STDLIB = Path(sysconfig.get_path("stdlib"))
ROOMS = ("ir", "ops", "passes", "compiler")  # whose code decides what a program computes


def module_key(module: nn.Module, weights: Mapping[str, Tensor], how: str) -> str:
    """Return a digest that differs wherever another program could be compiled.

    Args:
        module: the denoiser, before its first call.
        weights: its parameters and buffers by path; only shapes, types and devices count, and of
            several devices of one type only which weights lie together.
        how: the settings and roles that it is compiled with.
    """
    found = hashlib.sha256(how.encode())
    for name, value in versions().items():
        found.update(f"{name} {value}\n".encode())
    for path, part in module.named_modules():
        found.update(f"{path} {type(part).__module__}.{type(part).__qualname__}\n".encode())
    places: dict[torch.device, str] = {}
    for path, weight in weights.items():
        place = places.setdefault(weight.device, f"{weight.device.type}:{len(places)}")
        text = f"{path} {tuple(weight.shape)} {weight.dtype} {place} {weight.stride()}\n"
        found.update(text.encode())
    found.update(f"{settings_of(module)} {sources(module)}".encode())
    return found.hexdigest()[:32]


@cache
def versions() -> dict[str, str]:
    """Return what is part of every key: Python, packages, and the compiler's own sources."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    root = Path(maskfx.ir.__file__).parent.parent
    sources = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            sources.update(path.relative_to(root).as_posix().encode())
            sources.update(path.read_bytes())
    return {**found, "compiler": sources.hexdigest()}


def sources(module: nn.Module) -> dict[str, str]:
    """Return a hash of each Python file that the code of a module and its parts may run through.

    These are the files that define their classes and the callables they hold, and the files that
    those import; of installed packages, only files of packages that define such a class. PyTorch
    and the packages of `versions` are known by their versions.
    """
    kinds = [type(part) for part in module.modules()]
    held = [v for part in module.modules() for v in vars(part).values() if is_called(v)]
    held += [v for part in module.modules() for hooks in hooks_of(part) for v in hooks.values()]
    ahead = {name for item in (*kinds, *held) for name in modules_of(item)}
    packages = {name.split(".")[0] for name in ahead}
    seen, found = set[str](), dict[str, str]()
    while ahead:
        name = ahead.pop()
        seen.add(name)
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or name.split(".")[0] in KNOWN:
            continue
        if name.split(".")[0] not in packages and is_installed(Path(file)):
            continue
        found[name] = hash_of_file(file)
        for value in list(vars(sys.modules[name]).values()):
            ahead.update(name for name in modules_of(value) if name not in seen)
    return dict(sorted(found.items()))


def is_installed(path: Path) -> bool:
    return path.is_relative_to(STDLIB) or not INSTALLED.isdisjoint(path.parts)


def modules_of(value: object) -> list[str]:
    """Return the names of the Python modules that define a value's code."""
    if isinstance(value, ModuleType):
        return [value.__name__]
    names = (getattr(value, "__module__", None), getattr(type(value), "__module__", None))
    return [name for name in names if isinstance(name, str)]


@cache
def hash_of_file(file: str) -> str:
    path = Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
