"""ProcessGroup: exchanges between processes by torch.distributed, on gloo.

All exchanges are sends and receives over the world group, so that a step may run on any ordered
subset of the ranks, and no group is made while serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor

# What is entered while this process waits for others in an exchange, by its number.
Waiting = Callable[[int], AbstractContextManager[None]]


def unnoted(number: int) -> AbstractContextManager[None]:
    return nullcontext()


class ProcessGroup:
    """The ranks of one step, as one of them sees them.

    Args:
        ranks: Their numbers in the world group, in the order of the partition's shares.
        rank: The place of this process among them.
        seconds: The time that an exchange may take.
        waiting: Notes that this process waits.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, seconds: float, waiting: Waiting = unnoted
    ) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self.sent = 0
        self._seconds, self._waiting = seconds, waiting

    def exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> None:
        self.start(outgoing, incoming, number).wait()

    def start(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int) -> Works:
        """Begin an exchange; its tensors must not change until it has ended."""
        parts = [
            dist.P2POp(dist.isend, value.contiguous(), self.ranks[other], tag=number)
            for other, value in outgoing.items()
        ]
        parts += [
            dist.P2POp(dist.irecv, value, self.ranks[other], tag=number)
            for other, value in incoming.items()
        ]
        self.sent += sum(value.nbytes for value in outgoing.values())
        others = sorted(self.ranks[n] for n in {*outgoing, *incoming})
        works = Works(
            f"exchange {number} of rank {self.ranks[self.rank]} with ranks {others}",
            self._seconds,
            partial(self._waiting, number),
        )
        with works.failing():
            works.begin(parts)
        return works


class Works:
    """An exchange that was begun.

    Args:
        name: The exchange, for messages.
        seconds: The time that it may take.
        waiting: Notes that this process waits.
    """

    def __init__(
        self, name: str, seconds: float, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._name, self._seconds, self._waiting = name, seconds, waiting
        self._parts: list[dist.P2POp] = []  # keep the tensors that are sent
        self._works: list[dist.Work] = []

    def begin(self, parts: list[dist.P2POp]) -> None:
        self._parts, self._works = parts, dist.batch_isend_irecv(parts)

    def wait(self) -> None:
        """Wait until it has ended; raise TimeoutError if it fails or takes too long."""
        with self.failing(), self._waiting():
            while self._works:
                self._works[-1].wait(timedelta(seconds=self._seconds))
                self._works.pop()
        self._parts.clear()

    @contextmanager
    def failing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TimeoutError(
                f"{self._name} failed or took more than {self._seconds:g} s: {error}"
            ) from error
