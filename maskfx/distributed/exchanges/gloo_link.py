"""GlooLink: exchanges by torch.distributed, as sends and receives over the world group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor

from maskfx.distributed.exchanges.process_group import failing
from maskfx.distributed.exchanges.world import World


class GlooLink:
    """The world group, which this process joins.

    Args:
        world: The group, with the backend of torch.distributed.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._seconds = world.rank, world.seconds
        dist.init_process_group(
            world.backend,
            init_method=f"file://{world.store}",
            rank=world.rank,
            world_size=world.ranks,
            timeout=timedelta(seconds=world.seconds),
        )

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], number: int
    ) -> GlooTransfer:
        parts = [
            dist.P2POp(dist.isend, value, other, tag=number) for other, value in outgoing.items()
        ]
        parts += [
            dist.P2POp(dist.irecv, value, other, tag=number) for other, value in incoming.items()
        ]
        others = sorted({*outgoing, *incoming})
        context = partial(failing, self._rank, others, number, self._seconds)
        with context():
            return GlooTransfer(parts, self._seconds, context)

    def close(self) -> None:
        """Close the connections to other ranks; those that wait for this one fail at once."""
        if dist.is_initialized():
            dist.destroy_process_group()


class GlooTransfer:
    """An exchange that was begun."""

    def __init__(
        self,
        parts: Sequence[dist.P2POp],
        seconds: float,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._parts = list(parts)  # keep the tensors that are sent
        self._seconds, self._context = seconds, context
        self._works = dist.batch_isend_irecv(self._parts)

    def wait(self) -> None:
        with self._context():
            while self._works:
                self._works[-1].wait(timedelta(seconds=self._seconds))
                self._works.pop()
        self._parts.clear()
