"""Adapters as one block of memory, which one process writes and another one reads without a copy.

On Linux the block is a memory file. Elsewhere it is sent through the channel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from maskfx.runtime.lora.adapter import Adapter, Difference, LayerChange, Layers, LowRank
from maskfx.runtime.processes import memory_files
from maskfx.runtime.processes.channel import Channel

ALIGN = 64  # bytes
NAME = "maskfx-adapter"

Head = dict[str, Any]  # JSON: where each matrix lies in the block


FIELDS = ("down", "up", "weight", "bias")  # tensors of updates


def matrices(adapter: Adapter) -> Iterator[tuple[str, str, float | None, str, Tensor]]:
    """Yield each tensor with its part, its layer, the scale of a low-rank update, and its field."""
    for part, layers in adapter.parts.items():
        for layer, update in layers.items():
            scale = update.scale if isinstance(update, LowRank) else None
            for name in FIELDS:
                matrix = getattr(update, name, None)
                if matrix is not None:
                    yield part, layer, scale, name, matrix


def head_of(adapter: Adapter) -> Head:
    """Return the layout of an adapter's block."""
    offset, layout = 0, []
    for part, layer, scale, name, matrix in matrices(adapter):
        dtype = str(matrix.dtype).removeprefix("torch.")
        layout.append([part, layer, scale, name, dtype, list(matrix.shape), offset])
        offset += -(-matrix.nbytes // ALIGN) * ALIGN
    return {"name": adapter.name, "digest": adapter.digest, "nbytes": offset, "layout": layout}


def write_block(adapter: Adapter, head: Head, block: Tensor) -> None:
    """Write an adapter's matrices into a block of bytes."""
    for (*_, matrix), (*_, offset) in zip(matrices(adapter), head["layout"], strict=True):
        place(block, matrix.dtype, matrix.shape, offset).copy_(matrix)


def read_block(head: Head, block: Tensor) -> Adapter:
    """Return the adapter in a block, whose memory its tensors keep."""
    parts: dict[str, dict[str, dict[str, Tensor]]] = {}
    scales: dict[tuple[str, str], float | None] = {}
    for part, layer, scale, name, dtype, shape, offset in head["layout"]:
        matrix = place(block, getattr(torch, dtype), shape, offset)
        parts.setdefault(part, {}).setdefault(layer, {})[name] = matrix
        scales[part, layer] = scale

    def change(part: str, layer: str, own: dict[str, Tensor]) -> LayerChange:
        scale = scales[part, layer]
        return Difference(**own) if scale is None else LowRank(scale=scale, **own)

    found: dict[str, Layers] = {
        part: {layer: change(part, layer, own) for layer, own in layers.items()}
        for part, layers in parts.items()
    }
    return Adapter(head["name"], head["digest"], found)


def place(block: Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    """Return a matrix that lies in a block of bytes."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return block[offset : offset + nbytes].view(dtype).view(*shape)


def send_block(channel: Channel, adapter: Adapter, head: Head) -> None:
    """Send an adapter's block; the other end calls `receive_block`."""
    if not memory_files.exist():
        block = torch.empty(head["nbytes"], dtype=torch.uint8)
        write_block(adapter, head, block)
        flat = block.numpy()
        channel.send(flat.data)
        return
    descriptor = memory_files.memory_file(NAME, head["nbytes"])
    try:
        write_block(adapter, head, mapped(descriptor, head["nbytes"]))
        channel.send_file(descriptor)
    finally:
        os.close(descriptor)


def receive_block(channel: Channel, head: Head) -> Adapter:
    """Receive what `send_block` sent and return its adapter."""
    if not memory_files.exist():
        return read_block(head, torch.frombuffer(channel.receive()[0], dtype=torch.uint8))
    descriptor = channel.receive_file()
    try:
        return read_block(head, mapped(descriptor, head["nbytes"]))
    finally:
        os.close(descriptor)


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """Map a memory file; unlike Python's `mmap`, the result keeps no descriptor."""
    name = memory_files.path_of(descriptor)
    return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
