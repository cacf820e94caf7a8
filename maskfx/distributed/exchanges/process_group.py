"""ProcessGroup: the ranks of one step, which exchange tensors over a link.

A step may run on any ordered subset of the ranks that the link connects, and no group is made
while serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor

# What is entered while this process waits for others in an exchange, by its number.
Waiting = Callable[[int], AbstractContextManager[None]]


def unnoted(number: int) -> AbstractContextManager[None]:
    return nullcontext()


class Transfer(Protocol):
    """An exchange that was begun."""

    def wait(self) -> None:
        """Wait until the incoming tensors can be read; raise TimeoutError if they can't be."""
        ...


class Link(Protocol):
    """Connects all ranks; they are named by their numbers."""

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], number: int
    ) -> Transfer:
        """Begin an exchange; raise TimeoutError if it fails."""
        ...

    def finish(self) -> None:
        """Wait until all exchanges have ended that were begun and waited for.

        Raises TimeoutError if one fails. Where devices order exchanges, `Transfer.wait` makes the
        device wait for one, and the host learns here how it ended.
        """
        ...

    def close(self) -> None:
        """Let all that wait for this rank fail at once."""
        ...


class ProcessGroup:
    """The ranks of one step, as one of them sees them.

    Args:
        ranks: Their numbers, in the order of the partition's shares.
        rank: The place of this process among them.
        link: What connects all ranks.
        waiting: Notes that this process waits.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, link: Link, waiting: Waiting = unnoted
    ) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self.sent = 0
        self._link, self._waiting = link, waiting

    def exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> None:
        self.start(outgoing, incoming, number).wait()

    def start(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> NotedTransfer:
        """Begin an exchange; its tensors must not change until it has ended."""
        self.sent += sum(value.nbytes for value in outgoing.values())
        transfer = self._link.start(
            {self.ranks[other]: value.contiguous() for other, value in outgoing.items()},
            {self.ranks[other]: value for other, value in incoming.items()},
            number,
        )
        return NotedTransfer(transfer, number, self._waiting)


class NotedTransfer:
    """An exchange that was begun; it is noted while this process waits for it."""

    def __init__(self, transfer: Transfer, number: int, waiting: Waiting) -> None:
        self._transfer, self._number, self._waiting = transfer, number, waiting

    def wait(self) -> None:
        """Wait until it has ended; raise TimeoutError if it fails or takes too long."""
        with self._waiting(self._number):
            self._transfer.wait()


@contextmanager
def failing(rank: int, others: Sequence[int], number: int, seconds: float) -> Iterator[None]:
    """Turn the failure of an exchange into TimeoutError, with what was exchanged."""
    try:
        yield
    except RuntimeError as error:
        raise TimeoutError(
            f"exchange {number} of rank {rank} with ranks {list(others)} failed or took more than "
            f"{seconds:g} s: {error}"
        ) from error
