"""ProcessGroup: exchanges between processes by torch.distributed, on gloo or NCCL.

All exchanges are sends and receives over the world group, so that a step may run on any ordered
subset of the ranks, and no group is made while serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


class ProcessGroup:
    """The ranks of one step, as one of them sees them.

    Args:
        ranks: Their numbers in the world group, in the order of the partition's shares.
        rank: The place of this process among them.
        seconds: The time that an exchange may take.
    """

    def __init__(self, ranks: Sequence[int], rank: int, seconds: float) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self.sent = 0
        self._seconds = seconds

    def exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> None:
        parts = [
            dist.P2POp(dist.isend, value.contiguous(), self.ranks[other], tag=number)
            for other, value in outgoing.items()
        ]
        parts += [
            dist.P2POp(dist.irecv, value, self.ranks[other], tag=number)
            for other, value in incoming.items()
        ]
        self.sent += sum(value.nbytes for value in outgoing.values())
        try:
            for work in dist.batch_isend_irecv(parts):
                work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            others = sorted(self.ranks[n] for n in {*outgoing, *incoming})
            raise TimeoutError(
                f"exchange {number} of rank {self.ranks[self.rank]} with ranks {others} failed or "
                f"took more than {self._seconds:g} s: {error}"
            ) from error
