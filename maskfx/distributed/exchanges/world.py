"""World: the group that all ranks join, and the backend by which they exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The group that all ranks join.

    Args:
        store: A file through which torch.distributed's ranks find each other.
        rank: The number of this rank.
        ranks: The number of all.
        backend: "rings" in shared memory, or "gloo" of torch.distributed.
        seconds: The time that joining or an exchange may take.
    """

    store: str
    rank: int
    ranks: int
    backend: str
    seconds: float
