"""RankProcess: one rank, as its group knows it: what it has been sent, and how to ask it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time

import torch

from maskfx.distributed.heartbeat import (
    LOOK,
    STOPPED,
    HeartbeatReader,
    HeartbeatWatch,
    process_state,
)
from maskfx.distributed.messages import PartRequest, RankRequest, SentRolling
from maskfx.runtime.cache.rolling.shared_block import SharedBuffers
from maskfx.runtime.lora.sent import HeldAdapters
from maskfx.runtime.processes.child_process import ChildProcess
from maskfx.runtime.steps import EditStep, sent_layers
from maskfx.runtime.transport.device_transport import (
    Copies,
    pack_from,
    pack_module,
    unpack_on,
)
from maskfx.runtime.transport.sendable import bare
from maskfx.runtime.transport.sent_cache import SentCache
from maskfx.runtime.transport.tensor_transport import BYTES, Unsendable

# ranks of one machine need no other interface
NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class RankProcess:
    """One rank.

    Args:
        seconds: The time that a message may take.
        adapter_bytes: The bytes of adapters that it may keep between steps.
        own: The device of this process.
        device: That of the rank.
    """

    def __init__(
        self, seconds: float, adapter_bytes: int, own: torch.device, device: torch.device
    ) -> None:
        self.device, self.own = device, own
        self.child = ChildProcess(
            "maskfx.distributed.rank_process",
            environment={**NETWORK, **os.environ},
            seconds=seconds,
            most=BYTES,
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
        self.send("hello", str(device))

    def send(self, *question: object, file: int | None = None) -> None:
        """Send a question, and an open file after it."""
        self.child.channel.send(*pack_from(self.own, question))
        if file is not None:
            self.child.channel.send_file(file)

    def packed(self, held: tuple[object, ...], copies: Copies) -> bytes:
        """Return the module and what belongs to it for this rank; handles serve one process.

        Args:
            held: The module, its settings and roles, and the number of threads.
            copies: Gets the copies of weights in shared memory, which serve other ranks too.
        """
        try:
            return pack_module(self.own, (bare(held[0], hooks=False), *held[1:]), copies)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            raise Unsendable(f"{type(held[0]).__name__}: {error}") from error

    def send_block(self, buffers: SharedBuffers, descriptor: int) -> None:
        """Let the process map the buffers of a block; it answers nothing."""
        self.send("block", buffers, file=descriptor)
        self.blocks.add(buffers.number)

    def receive(self) -> tuple[object, Exception | None]:
        found: tuple[object, Exception | None] = unpack_on(self.own, self.child.channel.receive())
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
