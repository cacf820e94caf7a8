"""Ranks: the processes of a RankGroup, their world group, and what happens when one fails."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import secrets
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.multiprocessing  # noqa: F401  registers how weights are shared

from maskfx.distributed.messages import PartRequest, PartResult, SentCache, World
from maskfx.runtime.processes.child_process import ChildProcess
from maskfx.runtime.sendable import bare
from maskfx.runtime.steps import EditStep
from maskfx.runtime.tensor_transport import BYTES, Unsendable, pack, unpack

log = logging.getLogger(__name__)

RESTARTS = 8  # processes started in place of failed ones; more have a cause that restarts don't end


@dataclass(frozen=True)
class Waits:
    """Limits of the time, in seconds, that ranks may take.

    Args:
        step: A step.
        exchange: An exchange with other ranks.
        start: The start of a rank.
    """

    step: float = 120.0
    exchange: float = 30.0
    start: float = 180.0


class RankFailure(Exception):
    """A rank died, didn't answer in time, or couldn't exchange rows with another."""


class RankProcess:
    """One rank, as its group knows it."""

    def __init__(self, seconds: float) -> None:
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
        self.child = ChildProcess(
            "maskfx.distributed.rank_process", environment=environment, seconds=seconds, most=BYTES
        )
        self.known: set[int] = set()  # recordings that it holds
        self.stale = False  # it has to load programs again
        self.child.channel.send(bytes(multiprocessing.current_process().authkey))

    def send(self, *question: object) -> None:
        self.child.channel.send(*pack(question))

    def receive(self) -> tuple[Any, Exception | None]:
        found: tuple[Any, Exception | None] = unpack(self.child.channel.receive())
        return found

    def note(self, request: PartRequest) -> None:
        """Remember which recordings a request has brought."""
        self.known.difference_update(request.dropped)
        self.stale = False
        for step in request.steps:
            if isinstance(step, EditStep):
                cache: Any = step.cache
                assert isinstance(cache, SentCache)
                self.known.add(cache.number)


class Ranks:
    """The processes; `all` are those in the world group, in the order of their numbers.

    Args:
        held: The module, its settings and roles, and the number of threads.
        count: The number of processes.
        backend: What torch.distributed exchanges with.
        waits: Time limits.
        folder: Where the processes find each other.
    """

    def __init__(
        self, held: tuple[Any, ...], count: int, backend: str, waits: Waits, folder: str
    ) -> None:
        self.held, self.count = held, count
        self.backend, self.waits, self.folder = backend, waits, folder
        self.all: list[RankProcess] = []
        self._starting: list[RankProcess] = []
        self._restarts = 0
        self._worlds = 0
        try:
            for _ in range(count):
                self.all.append(RankProcess(waits.start))
            self._each({n: ("module", packed(held)) for n in range(count)}, waits.start)
            self._join()
        except BaseException:
            self.stop()
            raise

    def ask(self, requests: Mapping[int, PartRequest]) -> dict[int, PartResult]:
        """Return what ranks computed, by their numbers, or raise `RankFailure`."""
        questions = {number: ("part", request) for number, request in requests.items()}
        return self._each(questions, self.waits.step, requests)

    def recover(self) -> bool:
        """Let the ranks that are left form a group; return False if none is left."""
        while self.all:
            try:
                self._join()
                return True
            except RankFailure as failure:
                log.warning("ranks can't form a group: %s", failure)
        return False

    def refill(self) -> None:
        """Start processes in place of those that failed, and take in those that are ready."""
        while len(self.all) + len(self._starting) < self.count and self._restarts < RESTARTS:
            self._restarts += 1
            process = RankProcess(self.waits.start)
            self._starting.append(process)
            process.send("module", packed(self.held))
        channels = {p.child.channel.fileno(): n for n, p in enumerate(self._starting)}
        ready = [self._starting[n] for n in poll(channels, time.monotonic())] if channels else []
        for process in ready:
            self._starting.remove(process)
            wrong: Exception | None
            try:
                _, wrong = process.receive()
            except (EOFError, OSError) as failed:
                wrong = failed
            if wrong is None:
                self.all.append(process)
            else:
                log.warning("a rank can't start: %s", wrong)
                process.child.end()
        if ready:
            self.recover()

    def _join(self) -> None:
        self._worlds += 1
        store = str(Path(self.folder) / f"world-{secrets.token_hex(8)}")
        count = len(self.all)
        worlds = [World(store, n, count, self.backend, self.waits.exchange) for n in range(count)]
        self._each({n: ("world", world) for n, world in enumerate(worlds)}, self.waits.start)

    def _each(
        self,
        questions: Mapping[int, tuple[object, ...]],
        seconds: float,
        requests: Mapping[int, PartRequest] | None = None,
    ) -> dict[int, Any]:
        """Ask ranks and return their answers; end those that fail, and raise `RankFailure`."""
        waiting = {number: self.all[number] for number in questions}
        found: dict[int, Any] = {}
        wrong: dict[int, str] = {}
        ended: set[int] = set()
        for number, question in questions.items():
            try:
                waiting[number].send(*question)
                if requests is not None:
                    waiting[number].note(requests[number])
            except OSError as error:
                wrong[number] = f"it takes nothing ({error})"
                ended.add(number)
                del waiting[number]
        until = time.monotonic() + seconds
        while waiting:
            if wrong:  # the others wait for it in an exchange, at most
                until = min(until, time.monotonic() + self.waits.exchange + 5)
            ready = poll({p.child.channel.fileno(): n for n, p in waiting.items()}, until)
            if not ready:
                for number in waiting:
                    wrong[number] = "it didn't answer in time"
                ended.update(waiting)
                break
            for number in ready:
                process = waiting.pop(number)
                try:
                    value, refused = process.receive()
                except (EOFError, OSError, Unsendable) as failed:
                    wrong[number] = f"it ended ({type(failed).__name__})"
                    ended.add(number)
                    continue
                if refused is not None:
                    wrong[number] = str(refused)
                found[number] = value
        if wrong:
            self._remove(ended)
            texts = "; ".join(f"rank {number}: {wrong[number]}" for number in sorted(wrong))
            if not ended:  # an error of the step itself: it would fail again
                raise Unsendable(f"it fails on ranks ({texts})") from self._rejoined()
            raise RankFailure(texts)
        return found

    def _rejoined(self) -> Exception | None:
        """Form the group again, because a failed exchange leaves messages behind."""
        try:
            if self._worlds:
                self._join()
        except (RankFailure, Unsendable) as failure:
            self._remove(set(range(len(self.all))))
            return failure
        return None

    def _remove(self, numbers: set[int]) -> None:
        for number in sorted(numbers, reverse=True):
            self.all.pop(number).child.end()

    def kill(self) -> None:
        for process in [*self.all, *self._starting]:
            process.child.kill()

    def stop(self) -> None:
        """End all processes."""
        for processes in (self.all, self._starting):
            while processes:
                processes.pop().child.end()


def packed(held: tuple[Any, ...]) -> bytes:
    """Return the module and what belongs to it, once for each process: handles serve one."""
    try:
        return bytes(ForkingPickler.dumps((bare(held[0]), *held[1:])))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Unsendable(f"{type(held[0]).__name__}: {error}") from error


def poll(places: Mapping[int, int], until: float) -> list[int]:
    """Return the numbers of the channels that have something to read; none if time is over."""
    poller = select.poll()
    for descriptor in places:
        poller.register(descriptor, select.POLLIN)
    left = max(0.0, until - time.monotonic())
    return [places[descriptor] for descriptor, _ in poller.poll(1000 * left)]
