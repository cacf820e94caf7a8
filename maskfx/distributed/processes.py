"""RankProcesses: the processes of a RankGroup, their world group, and what happens when one fails.

Disjoint sets of ranks may be asked at the same time, from several threads. While none computes,
`recover` removes those that failed and takes in those that were started in their place.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import secrets
import select
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.multiprocessing  # noqa: F401  registers how weights are shared

from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.measure import slowest
from maskfx.distributed.exchanges.ring_link import RINGS, SharedMemory, rings_serve
from maskfx.distributed.exchanges.world import World
from maskfx.distributed.heartbeat import (
    LOOK,
    STOPPED,
    HeartbeatReader,
    HeartbeatWatch,
    Waits,
    hung,
    process_state,
)
from maskfx.distributed.messages import PartRequest, RankRequest, SentRolling
from maskfx.distributed.restarts import Restarts
from maskfx.runtime.cache.rolling.shared_block import SharedBuffers
from maskfx.runtime.lora.sent import HeldAdapters
from maskfx.runtime.processes.child_process import ChildProcess
from maskfx.runtime.steps import EditStep, sent_layers
from maskfx.runtime.transport.sendable import bare
from maskfx.runtime.transport.sent_cache import SentCache
from maskfx.runtime.transport.tensor_transport import BYTES, Unsendable, pack, unpack

log = logging.getLogger(__name__)


class RankFailure(Exception):
    """A rank died, didn't answer in time, or couldn't exchange rows with another."""


class RankProcess:
    """One rank, as its group knows it."""

    def __init__(self, seconds: float, adapter_bytes: int) -> None:
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
        self.child = ChildProcess(
            "maskfx.distributed.rank_process", environment=environment, seconds=seconds, most=BYTES
        )
        self.known: set[int] = set()  # recordings that it holds
        self.adapters = HeldAdapters(adapter_bytes)
        self.written: tuple[object, ...] = ()  # the adapters in its weights
        self.blocks: set[int] = set()  # blocks of rolling rows that it has mapped
        self.runs: set[int] = set()  # requests of which it holds rows of other ranks
        self.failed = False  # it ended, or is to be ended
        self.version = 0  # of the saved programs that it has read
        self.started = False  # it runs, and reads what it is sent
        self.child.channel.send(bytes(multiprocessing.current_process().authkey))
        self.heartbeat = HeartbeatReader(self.child.channel.send_file)
        self.send("hello")

    def send(self, *question: object, file: int | None = None) -> None:
        """Send a question, and an open file after it."""
        self.child.channel.send(*pack(question))
        if file is not None:
            self.child.channel.send_file(file)

    def send_block(self, buffers: SharedBuffers, descriptor: int) -> None:
        """Let the process map the buffers of a block; it answers nothing."""
        self.send("block", buffers, file=descriptor)
        self.blocks.add(buffers.number)

    def receive(self) -> tuple[object, Exception | None]:
        found: tuple[object, Exception | None] = unpack(self.child.channel.receive())
        return found

    def watch(self, now: float) -> HeartbeatWatch:
        return HeartbeatWatch(self.heartbeat, now, lambda: process_state(self.child.pid))

    def stopped(self, seconds: float) -> bool:
        """Return True if the process is stopped, and still is after some seconds."""
        until = time.monotonic() + seconds
        while process_state(self.child.pid) == STOPPED:
            if time.monotonic() >= until:
                return seconds > 0
            time.sleep(LOOK)
        return False

    def note(self, request: RankRequest) -> None:
        """Remember which recordings a request has brought."""
        self.known.difference_update(request.dropped.recordings)
        if not request.written:
            self.written = ()
        if isinstance(request, PartRequest):
            self.runs.difference_update(request.ended)
            self.runs.update(one.run for one in request.late if one is not None)
        self.blocks.difference_update(request.dropped.blocks)
        self.adapters.note(sent_layers(request.steps), request.dropped.adapters)
        for step in request.steps:
            if isinstance(step, EditStep):
                cache: object = step.cache
                assert isinstance(cache, SentCache | SentRolling)
                self.known.add(cache.number)
                later: object = step.then
                if isinstance(later, SentCache):
                    self.known.add(later.number)


class RankProcesses:
    """The processes; `all` are those of the world group, in the order of their numbers.

    One that fails keeps its number until `recover`.

    Args:
        held: The module, its settings and roles, and the number of threads.
        count: The number of processes.
        backend: What they exchange with; see `RankGroup`.
        waits: Time limits.
        folder: Where the processes find each other.
        restarts: Limits how many processes are started in place of failed ones.
        adapter_bytes: The bytes of adapters that a process may keep between steps.

    `costs` are those that the ranks measured when they started.
    """

    def __init__(
        self,
        held: tuple[object, ...],
        count: int,
        backend: str,
        waits: Waits,
        folder: str,
        restarts: Restarts,
        adapter_bytes: int,
    ) -> None:
        self.held, self.count, self.adapter_bytes = held, count, adapter_bytes
        if backend == RINGS and not rings_serve(count):
            log.info("ranks exchange with gloo: shared memory needs Linux and a C compiler")
            backend = "gloo"
        self.backend, self.waits, self.folder = backend, waits, folder
        self._memory: SharedMemory | None = None  # through which ranks exchange
        self.all: list[RankProcess] = []
        self.apart = True  # whether the world group has to be formed before ranks compute
        self._starting: list[RankProcess] = []
        self._ready: list[RankProcess] = []  # started, and not in the world group yet
        self._restarts = restarts
        try:
            for _ in range(count):
                self.all.append(RankProcess(waits.start, adapter_bytes))
            self._answers(dict.fromkeys(range(count)), waits.start)  # of "hello"
            self._each({n: ("module", packed(held)) for n in range(count)}, waits.start)
            self._join()
            self.costs = self._measured()
        except BaseException:
            self.stop()
            raise

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
            self._starting.append(RankProcess(self.waits.start, self.adapter_bytes))
        channels = {p.child.channel.fileno(): n for n, p in enumerate(self._starting)}
        ready = [self._starting[n] for n in poll(channels, time.monotonic())] if channels else []
        for process in ready:
            wrong: Exception | None
            try:
                _, wrong = process.receive()
                if wrong is None and not process.started:
                    process.started = True
                    process.send("module", packed(self.held))
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
            self.all[number].child.end()

    def kill(self) -> None:
        for process in [*self.all, *self._ready, *self._starting]:
            process.child.kill()

    def stop(self) -> None:
        """End all processes."""
        for processes in (self.all, self._ready, self._starting):
            while processes:
                processes.pop().child.end()


def packed(held: tuple[object, ...]) -> bytes:
    """Return the module and what belongs to it, once for each process: handles serve one."""
    try:
        return bytes(ForkingPickler.dumps((bare(held[0], hooks=False), *held[1:])))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Unsendable(f"{type(held[0]).__name__}: {error}") from error


def poll(places: Mapping[int, int], until: float) -> list[int]:
    """Return the numbers of the channels that have something to read; none if time is over."""
    poller = select.poll()
    for descriptor in places:
        poller.register(descriptor, select.POLLIN)
    left = max(0.0, until - time.monotonic())
    return [places[descriptor] for descriptor, _ in poller.poll(1000 * left)]
