"""Connects a rank to the others by the backend of its group."""

from __future__ import annotations

from maskfx.distributed.exchanges.gloo_link import GlooLink
from maskfx.distributed.exchanges.process_group import Link
from maskfx.distributed.exchanges.ring_link import RINGS, RingLink, SharedMemory
from maskfx.distributed.exchanges.world import World


def connect(world: World, memory: int | None) -> Link:
    """Return the link of a rank; `memory` is the descriptor of what ranks share."""
    if world.backend != RINGS:
        return GlooLink(world)
    assert memory is not None, "rings are in memory that the parent sends"
    return RingLink(SharedMemory(memory, world.ranks), world.rank, world.seconds)
