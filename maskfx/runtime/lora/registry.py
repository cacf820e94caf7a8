"""Adapters: LoRA files by name, loaded when requests need them.

Registering looks at a file and doesn't read it, so that any number of files can be registered.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from maskfx.errors import InputError
from maskfx.ir.argument_checks import (
    check_number,
    check_path,
    check_type,
    check_whole,
    refuse,
)
from maskfx.runtime.lora.differences import PATCH
from maskfx.runtime.lora.files import SUFFIX, AdapterFile, FileLimits
from maskfx.runtime.lora.loader import READ, AdapterLoader
from maskfx.runtime.lora.profile import Profile, profile_of
from maskfx.runtime.lora.residency import AdapterCounts, AdapterLease, AdapterResidency, Load

HOST_BYTES = 4 << 30
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PROCESS = "maskfx.pipelines.adapters.lora_process"
PICKLED = (".bin", ".ckpt", ".pt", ".pth", ".pkl")


@dataclass(frozen=True)
class RegisteredAdapter:
    """A file with its name.

    Args:
        name: Name in calls.
        file: The file as it was registered.
        start: First step at which it acts, for every model; None: by its profile.
    """

    name: str
    file: AdapterFile
    start: int | None = None


class Adapters:
    """LoRA files that calls may name, and those of them that are in memory.

        adapters = maskfx.Adapters("loras/")
        pipe = maskfx.compile(pipe, adapters=adapters)
        pipe("a red hat", image=photo, mask_image=mask, lora=[("style", 0.8)])

    Args:
        folder: Directory whose `*.safetensors` and `*.patch` are registered under their names.
        host_bytes: Memory for loaded adapters; those of requests in flight may exceed it.
        loads: Number of files that are loaded at the same time, each in a process.
        deadline: Seconds after which a load fails.
        read: `module:function` that returns a file's content by its path.
        limits: Limits of a file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        host_bytes: int = HOST_BYTES,
        loads: int = 2,
        deadline: float = 60.0,
        read: str = READ,
        limits: FileLimits | None = None,
    ) -> None:
        for name, value in (("host_bytes", host_bytes), ("loads", loads)):
            check_whole("Adapters", name, value, 1)
        check_number("Adapters", "deadline", deadline, "seconds", above=True)
        if not isinstance(read, str) or not re.fullmatch(r"[\w.]+:\w+", read):
            refuse("Adapters", "read", read, 'the name of a function, such as "module:function"')
        check_type("Adapters", "limits", limits, FileLimits, "FileLimits, or None", or_none=True)
        if folder is not None:
            check_path("Adapters", "folder", folder)
        self._known: dict[str, RegisteredAdapter] = {}
        self._residency = AdapterResidency(host_bytes, loads)
        self._loader = AdapterLoader(PROCESS, deadline=deadline, read=read, limits=limits)
        self._profiles: dict[tuple[AdapterFile, str], Profile | None] = {}
        self._lock = threading.Lock()
        if folder is not None:
            self.register_folder(folder)

    def register(
        self, name: str, path: str | os.PathLike[str], start: int | None = None
    ) -> RegisteredAdapter:
        """Make a file known under a name; a second time after the file was changed.

        Args:
            name: Letters, digits, ".", "_" and "-".
            path: A safetensors file.
            start: First step at which it acts. Earlier steps run without it, so that they needn't
                wait for the file; the picture depends on it. By default that of the file's profile
                (`maskfx adapters profile`), or 0.
        """
        if not NAME.fullmatch(name):
            raise InputError(
                f"adapter {name!r}: a name has letters, digits, '.', '_' and '-', 128 at most"
            )
        if start is not None and (type(start) is not int or start < 0):
            raise InputError(f"adapter {name!r}: start={start!r}: give a step, 0 or more, or None")
        made = RegisteredAdapter(name, AdapterFile.of(path), start)
        with self._lock:
            before, self._known[name] = self._known.get(name), made
            self._forget_profiles(made.file)
        if before is not None and before.file != made.file:
            self._residency.forget(before.file.key)
        return made

    def register_folder(self, folder: str | os.PathLike[str]) -> None:
        """Register a directory's files; pickles in it are refused."""
        where = Path(folder)
        if not where.is_dir():
            raise InputError(f"adapters {where}: no such directory; create it, or correct the path")
        names = sorted(path for path in where.iterdir() if path.suffix in (SUFFIX, PATCH, *PICKLED))
        pickled = [path.name for path in names if path.suffix in PICKLED]
        if pickled:
            raise InputError(
                f"adapters {where}: {', '.join(pickled[:3])}: a pickle can run code; convert it to "
                "safetensors where you trust it, or take it out of the directory"
            )
        for path in names:
            self.register(path.stem, path)

    def remove(self, name: str) -> None:
        """Forget a name, and its weights; requests in flight keep them to their end."""
        known = self.get(name)
        with self._lock:
            self._known.pop(name, None)
        self._residency.forget(known.file.key)

    def get(self, name: str) -> RegisteredAdapter:
        """Return the registration of a name; InputError if there is none."""
        found = self._known.get(name)
        if found is None:
            raise InputError(
                f"lora={name!r}: no adapter of this name is registered; register it first "
                "(Adapters.register), or give a path that ends with .safetensors"
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def names(self) -> list[str]:
        return sorted(self._known)

    def resolve(self, name: str | os.PathLike[str]) -> RegisteredAdapter:
        """Return the registration of a name, or of the file at a path."""
        text = os.fspath(name)
        if text in self._known or not text.endswith((SUFFIX, PATCH)):
            return self.get(text)
        return RegisteredAdapter(Path(text).stem, AdapterFile.of(text))

    def profile(self, adapter: RegisteredAdapter, base: str) -> Profile | None:
        """Return how the adapter starts on a base model, if it was profiled for it."""
        key = adapter.file, base
        with self._lock:
            if key in self._profiles:
                return self._profiles[key]
        found = profile_of(adapter.file.path, adapter.file.size, base)
        with self._lock:
            return self._profiles.setdefault(key, found)

    def _forget_profiles(self, file: AdapterFile) -> None:
        for key in [key for key in self._profiles if key[0] == file]:
            del self._profiles[key]

    def acquire(
        self, adapter: RegisteredAdapter, target: Mapping[str, object], kind: str
    ) -> AdapterLease:
        """Return a lease of an adapter, whose load begins unless it is in memory.

        Args:
            adapter: The registration.
            target: What the file is checked against, the fields of `LoraTarget`.
            kind: A digest of these.
        """
        return self._residency.acquire(*self._load(adapter, target, kind))

    def prefetch(self, adapter: RegisteredAdapter, target: Mapping[str, object], kind: str) -> None:
        """Begin to load an adapter that a waiting request will need."""
        self._residency.prefetch(*self._load(adapter, target, kind))

    def _load(
        self, adapter: RegisteredAdapter, target: Mapping[str, object], kind: str
    ) -> tuple[str, Load]:
        """Return the key of an adapter for a kind of pipeline, and the function that loads it."""
        file = adapter.file
        return f"{file.key}-{kind}", lambda: self._loader.load(file, target)

    def start(self) -> None:
        """Start a loading process before the first load needs one."""
        self._loader.start()

    def counts(self) -> AdapterCounts:
        return self._residency.counts()

    @property
    def restarts(self) -> int:
        """The number of loading processes that died."""
        return self._loader.restarts

    def close(self) -> None:
        """Drop all weights and end the processes; loads in flight fail with `Closed`."""
        self._loader.close()
        self._residency.close()


@cache
def default_adapters() -> Adapters:
    """Return the adapters of pipelines that are given none: files that calls name by path."""
    return Adapters()
