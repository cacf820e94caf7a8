"""TorchLink: exchanges by torch.distributed, as sends and receives over the world group.

With gloo the host waits for each exchange. With NCCL exchanges are ordered by the device's streams,
and the host waits once, at the end of a step. No group is made while serving: all ranks connect
when they join.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from maskfx.distributed.exchanges.process_group import failing
from maskfx.distributed.exchanges.world import NCCL, World

Context = Callable[[], AbstractContextManager[None]]
LOOK = 0.01  # seconds between two looks whether another rank has left


class TorchLink:
    """The world group, which this process joins.

    Args:
        world: The group, with the backend of torch.distributed.
        device: The device of the tensors that are exchanged.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._ordered = world, world.backend == NCCL
        self._waited: list[Waited] = []  # of which the host hasn't seen the end
        if self._ordered:  # this class ends what takes too long, not a thread of NCCL's
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        dist.init_process_group(
            world.backend,
            init_method=f"file://{world.store}",
            rank=world.rank,
            world_size=world.ranks,
            timeout=timedelta(seconds=world.seconds),
            device_id=device if self._ordered else None,
        )
        if self._ordered and world.ranks > 1:
            self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Exchange with all others: NCCL connects a pair of ranks at its first message."""
        others = [rank for rank in range(self._world.ranks) if rank != self._world.rank]
        sent, received = torch.zeros(2, 1, device=device)
        outgoing = dict.fromkeys(others, sent)
        incoming = {rank: torch.empty_like(received) for rank in others}
        self.start(outgoing, incoming, 0).wait()
        self.finish()

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], number: int
    ) -> TorchTransfer:
        # messages of a pair arrive in the order in which they were sent; NCCL has no tags
        parts = [
            dist.P2POp(dist.isend, value, other, tag=number) for other, value in outgoing.items()
        ]
        parts += [
            dist.P2POp(dist.irecv, value, other, tag=number) for other, value in incoming.items()
        ]
        others = sorted({*outgoing, *incoming})
        world = self._world
        context = partial(failing, world.rank, others, number, world.seconds)
        with context():
            works = dist.batch_isend_irecv(parts)
        limit = None if self._ordered else timedelta(seconds=world.seconds)
        return TorchTransfer(parts, works, limit, tuple(others), context, self._waited)

    def finish(self) -> None:
        """Wait until the exchanges have ended that the device waits for."""
        while self._waited:
            one = self._waited[0]
            with one.context():
                until_ended(one.work, one.others, self._world)
            del self._waited[0]

    def close(self) -> None:
        """Close the connections to other ranks; those that wait for this one fail at once."""
        self._waited.clear()
        self._world.leave(self._world.rank)
        if dist.is_initialized():
            if self._ordered:  # exchanges with ranks that are gone never end
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()


class DeviceWork(Protocol):
    """An exchange of torch.distributed."""

    def is_completed(self) -> bool: ...

    def wait(self) -> bool: ...


@dataclass(frozen=True)
class Waited:
    """An exchange with other ranks that the device waits for, and what describes its failure."""

    work: DeviceWork
    others: tuple[int, ...]
    context: Context


def until_ended(work: DeviceWork, others: Sequence[int], world: World) -> None:
    """Wait until the device has ended an exchange; raise RuntimeError if it fails.

    It fails if it takes longer than the world's limit, or if one of the others has left. The thread
    doesn't sleep, so that its process counts as one that computes while its device does.
    """
    now = time.monotonic()
    until, look = now + world.seconds, now + LOOK
    while not work.is_completed():
        now = time.monotonic()
        if now >= until:
            raise RuntimeError("it didn't end in time")
        if now >= look:
            gone = [rank for rank in others if world.has_left(rank)]
            if gone:
                raise RuntimeError(f"rank {gone[0]} has left")
            look = now + LOOK
        os.sched_yield()
    work.wait()  # raises what went wrong


class TorchTransfer:
    """An exchange that was begun.

    Args:
        parts: Its sends and receives, whose tensors are kept.
        works: What torch.distributed made of them.
        limit: The time that they may take; None: the device waits for them, and the host doesn't.
        others: The other ranks.
        context: Describes a failure.
        waited: Gets what the device waits for.
    """

    def __init__(
        self,
        parts: Sequence[dist.P2POp],
        works: Sequence[dist.Work],
        limit: timedelta | None,
        others: tuple[int, ...],
        context: Context,
        waited: list[Waited],
    ) -> None:
        self._parts, self._works = list(parts), list(works)
        self._limit, self._others, self._context = limit, others, context
        self._waited = waited

    def wait(self) -> None:
        with self._context():
            while self._works:
                work = self._works[-1]
                if self._limit is None:
                    work.wait()
                    self._waited.append(Waited(work, self._others, self._context))
                else:
                    work.wait(self._limit)
                self._works.pop()
        self._parts.clear()
