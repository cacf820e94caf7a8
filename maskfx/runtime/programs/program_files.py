"""Saved programs of one denoiser in a directory, and what was found when they were verified.

`<directory>/<key>/<hash>.program` is one compilation. `verdicts.json` beside them holds, by the
fingerprint of the weights, which sizes a capture and a program were verified at, so that a process
that starts with the same weights verifies nothing again. Any number of processes may share the
directory; a file that is damaged or stale is a miss, logged and ignored. A directory that can't be
read or written costs compilations, not calls.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any

from torch import Tensor, nn

from maskfx.compiler.artifact.artifact import UnreadableArtifact, load, save, write_whole
from maskfx.compiler.artifact.graphs import weights_of
from maskfx.compiler.artifact.key import module_key
from maskfx.compiler.artifact.plain import Unsavable
from maskfx.compiler.build_program import content
from maskfx.compiler.capture.arguments.roles import Roles
from maskfx.compiler.compile import Compilation
from maskfx.config import Settings
from maskfx.runtime.programs.proof import Size

log = logging.getLogger(__name__)

SUFFIX = ".program"
KEPT_DAYS = 30  # a key that was not used for so long is removed
Verdicts = dict[str, Any]


def compiled_as(settings: Settings, roles: Mapping[str, Roles] | None) -> str:
    """Return how a module is compiled: its settings without those of files, and its roles."""
    return repr((replace(settings, programs=None), sorted((roles or {}).items())))


@cache
def report_unwritable(directory: Path, reason: str) -> None:
    """Log, once for each directory and reason, that nothing is kept there."""
    log.warning("programs can't be saved in %s: %s; each process compiles them", directory, reason)


class ProgramFiles:
    """The saved programs of one module.

    Args:
        directory: where all denoisers' programs are.
        module: the denoiser; its key is made now, before its first call.
        how: the settings and roles that it is compiled with.
        fingerprint: returns what identifies the weights' values now.
    """

    def __init__(
        self, directory: Path, module: nn.Module, how: str, fingerprint: Callable[[], str]
    ) -> None:
        self.module, self.fingerprint = module, fingerprint
        self._names = list(weights_of(module))
        self.folder = directory / module_key(module, weights_of(module), how)
        self._saved: dict[int, str] = {}  # compilation -> its file's name
        self._known: str = ""

    def load(self) -> Iterator[Compilation]:
        """Yield the compilations that were saved for this module, with their verdicts."""
        verdicts = self._verdicts()
        for path in programs_in(self.folder):
            try:
                found = load(path, self._weights(), self.module)
            except UnreadableArtifact as error:
                log.warning("a saved program is not used: %s", error)
                continue
            with suppress(OSError):  # another user's file, or removed meanwhile
                os.utime(path)
            self._saved[id(found)] = path.name
            about = verdicts.get("captures", {}).get(path.name, {})
            found.capture.fixed_batch = about.get("fixed_batch", found.capture.fixed_batch)
            for key, verdict in about.get("sizes", []):
                found.capture.verdicts[as_key(key)] = verdict
            yield found

    def programs(self) -> dict[Size, str]:
        """Return what was found wrong with programs at which sizes; "" for nothing."""
        return {tuple(key): wrong for key, wrong in self._verdicts().get("programs", [])}

    def save(self, compilation: Compilation) -> None:
        """Write a new compilation; one that can't be written is compiled again by each process.

        So is one without a program that the operating system's state may have prevented, and one
        that reads numbers of the settings, which the other process may have set otherwise.
        """
        capture, program = compilation.capture, compilation.program
        if program is None and capture.interrupted or capture.numbers:
            return
        sizes = capture.frozen, capture.single, capture.autocast
        constants = {i: content(v) or v for i, v in capture.constants.items()}
        kind = repr((capture.in_spec, capture.leaves, constants, sizes))
        digest = hashlib.sha256(kind.encode()).hexdigest()
        code = "dense" if program is None else program.code[:16]
        name = f"{code}-{digest[:16]}{SUFFIX}"
        try:
            save(compilation, self._weights(), self.folder / name, self.module)
        except Unsavable as error:
            log.info("%s is compiled anew by each process: %s", type(self.module).__name__, error)
            return
        except OSError as error:
            report_unwritable(self.folder.parent, error.strerror or str(error))
            return
        self._saved[id(compilation)] = name
        with suppress(OSError):  # another process removes folders too
            self._remove_old()

    def note(self, every: list[Compilation], programs: dict[Size, str]) -> None:
        """Write what was verified since the last call, if there is anything."""
        captures = {
            self._saved[id(one)]: {
                "fixed_batch": one.capture.fixed_batch,
                "sizes": [[list(key), verdict] for key, verdict in one.capture.verdicts.items()],
            }
            for one in every
            if id(one) in self._saved
        }
        found = {"captures": captures, "programs": [[list(k), v] for k, v in programs.items()]}
        now = json.dumps(found)
        if now == self._known or not captures:
            return
        self._known = now
        path = self.folder / "verdicts.json"
        held = self._all_verdicts()
        held[self.fingerprint()] = found
        while len(held) > 16:  # weights of other adapters and checkpoints
            del held[next(iter(held))]
        try:
            write_whole(path, json.dumps(held).encode())
        except OSError as error:
            report_unwritable(self.folder.parent, error.strerror or str(error))

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights that the module had before its first call."""
        now = weights_of(self.module)
        return {name: now[name] for name in self._names if name in now}

    def _verdicts(self) -> Verdicts:
        found: Verdicts = self._all_verdicts().get(self.fingerprint(), {})
        return found

    def _all_verdicts(self) -> dict[str, Verdicts]:
        try:
            found = json.loads((self.folder / "verdicts.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _remove_old(self) -> None:
        """Remove keys that were not used for long: of other versions, or other settings."""
        limit = time.time() - KEPT_DAYS * 86400
        for folder in self.folder.parent.iterdir():
            files = programs_in(folder)
            if files and max(file.stat().st_mtime for file in files) < limit:
                rmtree(folder, ignore_errors=True)


def programs_in(folder: Path) -> list[Path]:
    """Return the files of a key in order; none if the folder can't be read."""
    try:
        return sorted(folder.glob(f"*{SUFFIX}"))
    except OSError:
        return []


def as_key(value: object) -> Any:
    """Return a key as it was: JSON has lists for tuples."""
    return tuple(map(as_key, value)) if isinstance(value, list) else value
