"""StagedLink: exchanges of tensors that lie elsewhere than where a link reads and fills them.

Tensors of a device go through pinned host memory to links of the host; tensors of the host, such as
sums that ranks choose sites by, go through the device to a link between devices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from maskfx.distributed.exchanges.process_group import Link, Transfer
from maskfx.runtime.cache.movers import in_host_memory, wait
from maskfx.runtime.hardware.devices import CPU, moved


class StagedLink:
    """A link, with copies of the tensors that lie elsewhere.

    Args:
        link: The link.
        place: Where it reads and fills tensors: the host, or this rank's device.
    """

    def __init__(self, link: Link, place: torch.device) -> None:
        self._link, self._place = link, place

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], number: int
    ) -> Transfer:
        devices = {value.device for value in outgoing.values()} - {self._place}
        sent = {rank: self._staged(value) for rank, value in outgoing.items()}
        if self._place == CPU:
            for device in devices:
                wait(device)
        received = {
            rank: value if value.device == self._place else self._room(value)
            for rank, value in incoming.items()
        }
        transfer = self._link.start(sent, received, number)
        copies = [
            (value, received[rank])
            for rank, value in incoming.items()
            if received[rank] is not value
        ]
        return StagedTransfer(self._link, transfer, copies) if copies else transfer

    def _staged(self, value: Tensor) -> Tensor:
        if value.device == self._place:
            return value
        return in_host_memory(value) if self._place == CPU else moved(value, self._place)

    def _room(self, value: Tensor) -> Tensor:
        """Return memory that the link can fill with a value."""
        pinned = self._place == CPU and value.is_cuda
        return torch.empty_like(value, device=self._place, pin_memory=pinned)

    def finish(self) -> None:
        self._link.finish()

    def close(self) -> None:
        self._link.close()


class StagedTransfer:
    """An exchange that was begun, whose incoming tensors are copied once they are there."""

    def __init__(self, link: Link, inner: Transfer, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._link, self._inner, self._copies = link, inner, copies

    def wait(self) -> None:
        self._inner.wait()
        if any(value.device == CPU for value, _ in self._copies):
            self._link.finish()  # the host reads them now
        while self._copies:
            value, there = self._copies.pop()
            value.copy_(there, non_blocking=value.device != CPU)
