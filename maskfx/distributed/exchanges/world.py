"""World: the group that all ranks join, and the backend by which they exchange."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RINGS, GLOO, NCCL = BACKENDS = ("rings", "gloo", "nccl")


@dataclass(frozen=True)
class World:
    """The group that all ranks join.

    Args:
        store: A file through which torch.distributed's ranks find each other.
        rank: The number of this rank.
        ranks: The number of all.
        backend: "rings" in shared memory, or "gloo" or "nccl" of torch.distributed.
        seconds: The time that joining or an exchange may take.
    """

    store: str
    rank: int
    ranks: int
    backend: str
    seconds: float

    def leave(self, rank: int) -> None:
        """Note for the others that a rank has left."""
        self._gone(rank).touch()

    def has_left(self, rank: int) -> bool:
        return self._gone(rank).exists()

    def _gone(self, rank: int) -> Path:
        return Path(f"{self.store}.left-{rank}")
