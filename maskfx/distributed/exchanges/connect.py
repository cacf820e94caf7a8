"""Connects a rank to the others by the backend of its group."""

from __future__ import annotations

import torch

from maskfx.distributed.exchanges.process_group import Link
from maskfx.distributed.exchanges.ring_link import RingLink, SharedMemory
from maskfx.distributed.exchanges.staged_link import StagedLink
from maskfx.distributed.exchanges.torch_link import TorchLink
from maskfx.distributed.exchanges.world import NCCL, RINGS, World
from maskfx.runtime.hardware.devices import CPU


def connect(world: World, memory: int | None, device: torch.device) -> Link:
    """Return the link of a rank.

    Args:
        world: The group.
        memory: The descriptor of what ranks share, if they exchange through rings.
        device: The device on which this rank computes.
    """
    link: Link
    if world.backend == RINGS:
        assert memory is not None, "rings are in memory that the parent sends"
        link = RingLink(SharedMemory(memory, world.ranks), world.rank, world.seconds)
    else:
        link = TorchLink(world, device)
    if device == CPU:
        return link
    return StagedLink(link, device if world.backend == NCCL else CPU)
