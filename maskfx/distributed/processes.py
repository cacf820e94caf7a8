"""RankProcesses: the processes of a RankGroup, their world group, and what happens when one fails.

Disjoint sets of ranks may be asked at the same time, from several threads. While none computes,
`recover` removes those that failed and takes in those that were started in their place.
"""

from __future__ import annotations

import logging
import secrets
import select
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.measure import slowest
from maskfx.distributed.exchanges.ring_link import SharedMemory, rings_serve
from maskfx.distributed.exchanges.world import GLOO, RINGS, World
from maskfx.distributed.heartbeat import LOOK, Waits, hung
from maskfx.distributed.messages import RankRequest
from maskfx.distributed.rank_child import RankProcess
from maskfx.distributed.ranks import RankPlaces
from maskfx.distributed.restarts import Restarts
from maskfx.runtime.transport.device_transport import Copies
from maskfx.runtime.transport.tensor_transport import Unsendable

log = logging.getLogger(__name__)


class RankFailure(Exception):
    """A rank died, didn't answer in time, or couldn't exchange rows with another."""


class RankProcesses:
    """The processes; `all` are those of the world group, in the order of their numbers.

    One that fails keeps its number until `recover`.

    Args:
        held: The module, its settings and roles, and the number of threads.
        places: The device of each process, and what they exchange with.
        waits: Time limits.
        folder: Where the processes find each other.
        restarts: Limits how many processes are started in place of failed ones.
        adapter_bytes: The bytes of adapters that a process may keep between steps.

    `costs` are those that the ranks measured when they started.
    """

    def __init__(
        self,
        held: tuple[object, ...],
        places: RankPlaces,
        waits: Waits,
        folder: str,
        restarts: Restarts,
        adapter_bytes: int,
    ) -> None:
        self.held, self.places, self.adapter_bytes = held, places, adapter_bytes
        self.count = count = len(places.devices)
        self.backend, self.waits, self.folder = places.backend, waits, folder
        if self.backend == RINGS and not rings_serve(count):
            log.info("ranks exchange with gloo: shared memory needs Linux and a C compiler")
            self.backend = GLOO
        self._memory: SharedMemory | None = None  # through which ranks exchange
        self._worlds: list[World] = []  # as the ranks of the group see it
        self.all: list[RankProcess] = []
        self.apart = True  # whether the world group has to be formed before ranks compute
        self._starting: list[RankProcess] = []
        self._ready: list[RankProcess] = []  # started, and not in the world group yet
        self._restarts = restarts
        try:
            for device in places.devices:
                self.all.append(self._new(device))
            self._answers(dict.fromkeys(range(count)), waits.start)  # of "hello"
            copies: Copies = {}
            modules = {n: ("module", p.packed(held, copies)) for n, p in enumerate(self.all)}
            copies.clear()  # what was packed holds them until the ranks have them
            self._each(modules, waits.start)
            self._join()
            self.costs = self._measured()
        except BaseException:
            self.stop()
            raise

    def _new(self, device: torch.device) -> RankProcess:
        return RankProcess(self.waits.start, self.adapter_bytes, self.places.own, device)

    @property
    def alive(self) -> list[int]:
        """Return the numbers of the ranks that haven't failed."""
        return [number for number, process in enumerate(self.all) if not process.failed]

    @property
    def size(self) -> int:
        """The number of ranks that can form a group now."""
        return len(self.alive) + len(self._ready)

    def ask(self, requests: Mapping[int, RankRequest]) -> dict[int, Any]:
        """Return what ranks computed, by their numbers.

        Raises `RankFailure` if a rank or an exchange failed, `Unsendable` if the step did.
        """
        questions = {number: (request.what, request) for number, request in requests.items()}
        return self._each(questions, self.waits.step, requests, self.waits)

    def end_runs(self, ended: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
        """Let ranks free the rows of requests; return the bytes of those that they still hold."""
        found = self._each(
            {number: ("ended", runs) for number, runs in ended.items()},
            self.waits.step,
            limits=self.waits,
        )
        for number, runs in ended.items():
            self.all[number].runs.difference_update(runs)
        return found

    def recover(self) -> bool:
        """Let the ranks that are left and those that are ready form a group.

        No rank may be computing. Returns False if none is left.
        """
        while True:
            self.all = [process for process in self.all if not process.failed] + self._ready
            self._ready = []
            if not self.all:
                return False
            try:
                self._join()
                return True
            except RankFailure as failure:
                log.warning("ranks can't form a group: %s", failure)
            except Unsendable as refusal:
                log.warning("ranks can't form a group: %s", refusal)
                self._fail(range(len(self.all)))

    def refill(self) -> None:
        """Start processes in place of those that failed, and note those that are ready.

        No more than `Restarts` allows. This waits for no process: one gets the module when it reads
        its channel, and is noted in a later call.
        """
        while self._coming() < self.count and self._restarts.can_add():
            self._restarts.add()
            self._starting.append(self._new(self._free_device()))
        channels = {p.child.channel.fileno(): n for n, p in enumerate(self._starting)}
        ready = [self._starting[n] for n in poll(channels, time.monotonic())] if channels else []
        for process in ready:
            wrong: Exception | None
            try:
                _, wrong = process.receive()
                if wrong is None and not process.started:
                    process.started = True
                    process.send("module", process.packed(self.held, {}))
                    continue
            except (EOFError, OSError) as failed:
                wrong = failed
            self._starting.remove(process)
            if wrong is None:
                self._ready.append(process)
                self.apart = True
            else:
                log.warning("a rank can't start: %s", wrong)
                process.child.end()

    def _free_device(self) -> torch.device:
        """Return a device that has fewer ranks than it should have."""
        here = [*(self.all[number] for number in self.alive), *self._ready, *self._starting]
        free = Counter(self.places.devices) - Counter(process.device for process in here)
        return next(iter(free))

    def _coming(self) -> int:
        return self.size + len(self._starting)

    def _measured(self) -> LinkCosts | None:
        """Return what exchanges cost; None for one rank, which has none."""
        if self.count == 1:
            return None
        questions = {number: ("measure",) for number in range(self.count)}
        return slowest(self._each(questions, self.waits.start, limits=self.waits).values())

    def _join(self) -> None:
        self.apart = True
        store = str(Path(self.folder) / f"world-{secrets.token_hex(8)}")
        count = len(self.all)
        worlds = [World(store, n, count, self.backend, self.waits.exchange) for n in range(count)]
        self._worlds = worlds
        # a rank waits for the others here, which its heartbeats don't show
        limits = replace(self.waits, stall=self.waits.start)
        questions = {n: ("world", world) for n, world in enumerate(worlds)}
        self._memory = SharedMemory.new(count) if self.backend == RINGS else None
        file = None if self._memory is None else self._memory.descriptor
        self._each(questions, self.waits.start, limits=limits, grace=self.waits.stall, file=file)
        for process in self.all:  # from now on it reads and writes without long breaks
            process.child.channel.limit(self.waits.exchange)
        self.apart = False

    def _each(
        self,
        questions: Mapping[int, tuple[object, ...]],
        seconds: float,
        requests: Mapping[int, RankRequest] | None = None,
        limits: Waits | None = None,
        grace: float | None = None,
        file: int | None = None,
    ) -> dict[int, Any]:
        """Ask ranks and return their answers; end those that fail, and raise the reason.

        Args:
            questions: What each rank is asked.
            seconds: The time that they may take.
            requests: The questions, if they are for parts of a step.
            limits: Those by which a rank is ended sooner if it hangs; None: none.
            grace: The time that the others may take after one has failed; None: an exchange.
            file: An open file that each of them gets.
        """
        unread: dict[int, str] = {}
        for number, question in questions.items():
            process = self.all[number]
            if process.stopped(0.0 if limits is None else limits.silence):
                unread[number] = "it is stopped"
                continue
            try:
                process.send(*question, file=file)
                if requests is not None:
                    process.note(requests[number])
            except OSError as error:
                unread[number] = f"it reads nothing ({error})"
        self._fail(unread)  # the others wait for it in an exchange, at most
        asked = dict.fromkeys(number for number in questions if number not in unread)
        return self._answers(asked, seconds, limits, grace, unread)

    def _answers(
        self,
        asked: Iterable[int],
        seconds: float,
        limits: Waits | None = None,
        grace: float | None = None,
        unread: Mapping[int, str] | None = None,
    ) -> dict[int, Any]:
        """Return what ranks answer; end those that fail, and raise the reason.

        `_each` has the arguments; `unread` has ranks that read no question, with the reason.
        """
        grace = self.waits.exchange + 5 if grace is None else grace
        waiting = {number: self.all[number] for number in asked}
        found: dict[int, object] = {}
        wrong = dict(unread or {})
        ended = set(wrong)
        count = len(waiting) + len(wrong)
        repeats = True  # whether the step may succeed if it runs again
        now = time.monotonic()
        until = now + seconds
        watches = {n: p.watch(now) for n, p in waiting.items()}
        while waiting:
            if wrong:  # the others fail in their next exchange
                until = min(until, time.monotonic() + grace)
            channels = {p.child.channel.fileno(): n for n, p in waiting.items()}
            ready = poll(channels, min(until, time.monotonic() + LOOK) if limits else until)
            failed = {}
            now = time.monotonic()
            if limits is not None:
                failed = hung({n: watches[n].look(now) for n in waiting if n not in ready}, limits)
            if not ready and now >= until:
                failed = dict.fromkeys(waiting, "it didn't answer in time")
            for number, why in failed.items():
                del waiting[number]
                wrong[number] = why
                ended.add(number)
            self._fail(failed)
            for number in ready:
                process = waiting.pop(number)
                try:
                    value, refused = process.receive()
                except (EOFError, OSError, Unsendable) as error:
                    wrong[number] = f"it ended ({type(error).__name__})"
                    ended.add(number)
                    self._fail([number])
                    continue
                if refused is not None:
                    wrong[number] = str(refused)
                    repeats &= isinstance(refused, TimeoutError)
                found[number] = value
        if wrong:
            # a failed exchange leaves messages behind, and ranks leave the group
            self.apart |= bool(ended) or count > 1 or repeats
            texts = "; ".join(f"rank {number}: {wrong[number]}" for number in sorted(wrong))
            if ended or repeats:
                raise RankFailure(texts)
            raise Unsendable(f"it fails on ranks ({texts})")  # it would fail again
        return found

    def _fail(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.all[number].failed = True
            if self._memory is not None:
                self._memory.leave(number)
            elif self._worlds:
                self._worlds[number].leave(number)
            self.all[number].child.end()

    def kill(self) -> None:
        for process in [*self.all, *self._ready, *self._starting]:
            process.child.kill()

    def stop(self) -> None:
        """End all processes."""
        for processes in (self.all, self._ready, self._starting):
            while processes:
                processes.pop().child.end()


def poll(places: Mapping[int, int], until: float) -> list[int]:
    """Return the numbers of the channels that have something to read; none if time is over."""
    poller = select.poll()
    for descriptor in places:
        poller.register(descriptor, select.POLLIN)
    left = max(0.0, until - time.monotonic())
    return [places[descriptor] for descriptor, _ in poller.poll(1000 * left)]
