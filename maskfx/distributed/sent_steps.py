"""SentSteps: steps as ranks get them, and what each rank holds of recordings, adapters and rows.

Recordings and adapters are numbered, so each rank gets them once. Knows nothing of how ranks are
started and chosen.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import MutableMapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.distributed.messages import SentRolling, Unneeded
from maskfx.distributed.rank_child import RankProcess
from maskfx.ir.lru import LruCache
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, RowBlock
from maskfx.runtime.cache.rolling.shared_block import RollingContents, RollingState, SharedBlock
from maskfx.runtime.cache.rows import references
from maskfx.runtime.cache.step_cache import StepCache, changed, has_unread
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.sent import LayerNumbers, SentLayers, nbytes_of
from maskfx.runtime.steps import AnyStep, EditStep, without_late
from maskfx.runtime.transport.sent_cache import SentCache
from maskfx.runtime.transport.shared_value import SharedValue
from maskfx.runtime.transport.tensor_transport import Unsendable

log = logging.getLogger(__name__)

MAPPED = 1 << 20  # bytes of a recording from which ranks map it
FILES = 64  # open files of recordings, for ranks that have not mapped them


class SentSteps:
    """Numbers what is sent to the ranks of one denoiser."""

    def __init__(self) -> None:
        self.ranged = True  # ranks read rows in a store by themselves
        # recording -> its number
        self._numbers: MutableMapping[StepCache, int] = WeakIdKeyDictionary()
        self._files: LruCache[int, SharedValue] = LruCache(FILES)  # by a recording's number
        self._count = itertools.count()
        self._adapters = LayerNumbers()
        self._blocks: WeakKeyDictionary[RowBlock, SharedBlock] = WeakKeyDictionary()
        self._version = 0  # of the programs that ranks read
        self._lock = threading.Lock()

    def programs_saved(self) -> None:
        """Note that ranks have to read programs again."""
        with self._lock:
            self._version += 1

    def sent(
        self, process: RankProcess, steps: Sequence[AnyStep], parts: Sequence[bool]
    ) -> tuple[list[AnyStep], Unneeded, bool]:
        """Return steps as they are sent, what to drop, and whether to read programs again.

        Args:
            process: Where they are sent.
            steps: The members of a batch.
            parts: Whether the rank has a share of each.
        """
        own = {adapters_of(step) for step, part in zip(steps, parts, strict=True) if part}
        with self._lock:
            found = [
                self._numbered(step, process, part) for step, part in zip(steps, parts, strict=True)
            ]
            needed: dict[int, int] = {}
            for number, (step, sent) in enumerate(zip(steps, found, strict=True)):
                if step.adapters:
                    there = step.adapters if adapters_of(step) in own else ()
                    layers = self._layers(process, there, needed)
                    found[number] = replace(sent, adapters=layers)
            alive = set(self._numbers.values())
            for number, _ in self._files.items():
                if number // 2 not in alive:
                    self._files.remove(number)
            gone = tuple(n for n in process.known if n // 2 not in alive)
            unneeded = process.adapters.unneeded(needed, self._adapters.alive())
            unmapped = tuple(process.blocks - {block.number for block in self._blocks})
            reload, process.version = process.version < self._version, self._version
        return found, Unneeded(gone, unneeded, unmapped), reload

    def _layers(self, process: RankProcess, adapters: Updates, needed: dict[int, int]) -> Updates:
        """Return adapters as they are sent: those that are there by their numbers.

        Args:
            process: Where they are sent.
            adapters: The adapters of a member.
            needed: The bytes of those of the members before, by number; gets these.
        """
        found = []
        for one in adapters:
            number = self._adapters.of(one.layers)
            new = number not in process.adapters and number not in needed
            needed[number] = nbytes_of(one.layers)
            sent: Any = SentLayers(number, one.layers if new else None)
            found.append(replace(one, layers=sent))
        return tuple(found)

    def _numbered(self, step: AnyStep, process: RankProcess, whole: bool) -> AnyStep:
        """Return the step as it is sent: a recording that is there already by its number.

        A rank without a share of the member gets the recording without its rows.
        """
        step = without_late(step)
        if not isinstance(step, EditStep):
            return step
        then: Any = self._next(step.then, process) if whole else None
        cache: StepCache = step.cache
        number = self._number(cache)
        if isinstance(cache, RollingCache):
            return replace(step, cache=self._rolling(cache, process), then=None)
        number += whole
        contents = None
        if number not in process.known and not (whole and self._mapped(cache, number, process)):
            contents = cache if whole else changed(cache, rows={}, stats={}, sums={})
        sent: Any = SentCache(number, contents)
        return replace(step, cache=sent, then=then)

    def _number(self, cache: StepCache) -> int:
        """Return the number of a recording without rows; the next one is that with rows."""
        if cache not in self._numbers:
            self._numbers[cache] = next(self._count)
        return 2 * self._numbers[cache]

    def _next(self, cache: StepCache | None, process: RankProcess) -> SentCache | None:
        """Return the recording of a next step, if the rank can read its rows ahead."""
        if cache is None or not self.ranged or not has_unread(cache):
            return None
        number = self._number(cache) + 1
        there = number in process.known or self._mapped(cache, number, process)
        return SentCache(number, None) if there else None

    def _mapped(self, cache: StepCache, number: int, process: RankProcess) -> bool:
        """Let the rank map a recording, of which it reads what it needs; return False if not."""
        if cache.nbytes() < MAPPED:
            return False
        try:
            shared = self._files.find(number, lambda: self._shared(cache, process.own))
            file = shared.descriptor
            process.send("recording", number, shared.message, shared.nbytes, file=file)
        except (OSError, RuntimeError) as error:
            log.info("a recording is copied to ranks, as they can't map it: %s", error)
            return False
        return True

    def _shared(self, cache: StepCache, own: torch.device) -> SharedValue:
        """Return a recording in a memory file; ranks read its rows in a store where they can."""
        with suppress(Unsendable), references.kept() if self.ranged else nullcontext():
            return SharedValue(cache, own)
        return SharedValue(cache, own)

    def _rolling(self, cache: RollingCache, process: RankProcess) -> Any:
        """Return a rolling cache as it is sent; the rank maps the buffers with its rows.

        Raises Unsendable if its rows can't be shared with other processes.
        """
        block, number = cache.block, self._number(cache)
        if block not in self._blocks:
            try:
                self._blocks[block] = SharedBlock(block)
            except (OSError, RuntimeError) as error:
                raise Unsendable(f"rows that steps replace can't be shared: {error}") from error
        if block.number not in process.blocks:
            with suppress(OSError):  # the question that follows fails too, and ends the rank
                process.send_block(self._blocks[block].buffers, self._blocks[block].descriptor)
        contents = None if number in process.known else RollingContents.of(cache)
        return SentRolling(number, block.number, contents, RollingState.of(cache))


def adapters_of(step: AnyStep) -> tuple[object, ...]:
    """Return what identifies a member's adapters. Members of a batch with equal ones share values.

    So a rank has either all of these members' adapters or none.
    """
    return tuple((one.digest, one.weight, id(one.layers)) for one in step.adapters)
