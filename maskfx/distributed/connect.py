"""Connects a rank to the others by the backend of its group."""

from __future__ import annotations

from maskfx.distributed.gloo_link import GlooLink
from maskfx.distributed.messages import World
from maskfx.distributed.process_group import Link
from maskfx.distributed.ring_link import RINGS, RingLink, SharedMemory


def connect(world: World, memory: int | None) -> Link:
    """Return the link of a rank; `memory` is the descriptor of what ranks share."""
    if world.backend != RINGS:
        return GlooLink(world)
    assert memory is not None, "rings are in memory that the parent sends"
    return RingLink(SharedMemory(memory, world.ranks), world.rank, world.seconds)
