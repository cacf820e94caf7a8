"""Where values of a batch are: tensors moved to a device, and index tables that cross together.

Python builds tables in host memory, and reads what it needs of them there. What operators read is
copied to the batch's device, all tables of a new batch in one copy that the host doesn't wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

CPU = torch.device("cpu")


def moved(value: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. What leaves the host crosses through pinned memory, so that the host
    goes on meanwhile; what comes to the host is there when this returns."""
    if value.device == device:
        return value
    from_host = value.device.type == "cpu"
    if from_host and device.type == "cuda" and not value.is_pinned():
        value = value.pin_memory()
    return value.to(device, non_blocking=from_host)


def read_here(value: Tensor) -> Tensor:
    """The tensor, which the stream of this thread reads now: its memory is not reused before."""
    if value.is_cuda:
        value.record_stream(torch.cuda.current_stream(value.device))
    return value


def copied(value: Tensor, device: torch.device) -> Tensor:
    """A copy of the tensor on a device."""
    return value.clone() if value.device == device else moved(value, device)


@dataclass
class Tables:
    """Index tables of the host, and their copies on devices."""

    _copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on(self, table: Tensor, device: torch.device) -> Tensor:
        """A table on a device, copied at its first use there."""
        if device.type == "cpu":
            return table
        if (id(table), device) not in self._copies:
            self.bring([table], device)
        return self._copies[id(table), device][1]

    def bring(self, tables: Iterable[Tensor], device: torch.device) -> None:
        """Copy those that aren't there yet, all at once."""
        new = {id(t): t for t in tables if (id(t), device) not in self._copies}
        if not new or device.type == "cpu":
            return
        sizes = [table.numel() for table in new.values()]
        flat = torch.empty(sum(sizes), dtype=torch.long, pin_memory=device.type == "cuda")
        torch.cat([table.reshape(-1) for table in new.values()], out=flat)
        parts = moved(flat, device).split(sizes)
        for table, part in zip(new.values(), parts, strict=True):
            # the table is held, or its number means another one
            self._copies[id(table), device] = table, part.view(table.shape)
