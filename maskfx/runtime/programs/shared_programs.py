"""SharedPrograms: what was compiled for one module serves equal modules of the same process.

Modules with equal code, settings and shapes of weights have equal graphs, whatever the numbers in
the weights. A compilation is kept in the form that files hold, without weights, so that no module
stays in memory. A module that uses one is compared with it first, as after reading a file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from torch import nn
from torch.utils import _pytree as pytree

from maskfx.compiler.artifact.artifact import PackedCompilation, UnreadableArtifact, pack, unpack
from maskfx.compiler.artifact.graphs import weights_of
from maskfx.compiler.artifact.key import module_key
from maskfx.compiler.artifact.plain import Unsavable
from maskfx.compiler.compile import Compilation

log = logging.getLogger(__name__)

LIMIT = 256 << 20  # bytes of all compilations that are kept


@dataclass(frozen=True)
class SharedProgram:
    """One compilation without weights; `key` is that of its module, `spec` of its arguments."""

    number: int
    key: str
    spec: pytree.TreeSpec
    packed: PackedCompilation


class SharedPrograms:
    """Keeps compilations of any modules, of at most `limit` bytes; the oldest leave first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._kept: list[SharedProgram] = []
        self._made = 0
        self._lock = threading.Lock()

    def put(self, key: str, spec: pytree.TreeSpec, packed: PackedCompilation) -> SharedProgram:
        with self._lock:
            self._made += 1
            made = SharedProgram(self._made, key, spec, packed)
            self._kept.append(made)
            while self._kept and self.nbytes > self.limit:
                del self._kept[0]
            return made

    def of(self, key: str, spec: pytree.TreeSpec) -> list[SharedProgram]:
        """Return the compilations of modules with this key, for arguments of this structure."""
        with self._lock:
            return [one for one in self._kept if one.key == key and one.spec == spec]

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    @property
    def nbytes(self) -> int:
        return sum(one.packed.nbytes for one in self._kept)


@cache
def shared_programs() -> SharedPrograms:
    """Return the compilations that all denoisers of the process share."""
    return SharedPrograms()


class Sharing:
    """What one module gives to equal modules and takes from them.

    Args:
        module: the module.
        how: returns the settings and roles that it is compiled with.
        shared: the compilations of all modules.
    """

    def __init__(self, module: nn.Module, how: Callable[[], str], shared: SharedPrograms) -> None:
        self.module, self._how, self._shared = module, how, shared
        self._read: dict[int, Compilation | None] = {}  # by number; None: doesn't fit or is its own

    def offers(self, spec: pytree.TreeSpec) -> Iterator[Compilation]:
        """Yield the compilations of equal modules for such arguments, with this module's weights.

        Call it after the module's first run, which may fill tables.
        """
        for one in self._shared.of(self._key(), spec):
            if one.number not in self._read:
                self._read[one.number] = self._unpacked(one)
            found = self._read[one.number]
            if found is not None:
                yield found

    def take(self, compilation: Compilation) -> None:
        """Remember that the module uses a compilation, so that it isn't offered again."""
        for number, found in self._read.items():
            if found is compilation:
                self._read[number] = None

    def give(self, compilation: Compilation) -> None:
        """Offer a new compilation to equal modules, if it has a graph that can be kept."""
        if compilation.capture.module is None:
            return  # the failure of one attempt
        try:
            packed = pack(compilation, weights_of(self.module), self.module)
        except Unsavable as error:
            log.debug("%s isn't shared: %s", type(self.module).__name__, error)
            return
        made = self._shared.put(self._key(), compilation.capture.in_spec, packed)
        self._read[made.number] = None

    def forget(self) -> None:
        """Drop what was read; what the module has used or given isn't offered to it again."""
        self._read = {number: None for number, found in self._read.items() if found is None}

    def _key(self) -> str:
        return module_key(self.module, weights_of(self.module), self._how())

    def _unpacked(self, one: SharedProgram) -> Compilation | None:
        try:
            return unpack(one.packed, weights_of(self.module), self.module, "a shared program")
        except UnreadableArtifact as error:
            log.debug("a shared program is not used: %s", error)
            return None
