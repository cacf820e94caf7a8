"""Moves the values of a batch between devices, and copies its index tables together.

Python builds tables in host memory and reads them there. What operators read is copied to the
batch's device, all tables of a new batch in one copy that doesn't block the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from maskfx.errors import InputError

CPU = torch.device("cpu")
MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # as a container sees its own group


def device_named(where: str, given: object) -> torch.device:
    """Return a device by its name; a name without a number is the first of its type.

    Args:
        where: What has the name, for the InputError if it is none.
        given: The name.
    """
    try:
        found = torch.device(given)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{where}: devices has {given!r:.40}: give names of devices, such as cuda:0"
        ) from error
    return CPU if found.type == "cpu" else torch.device(found.type, found.index or 0)


def visible_devices(kind: str) -> list[torch.device]:
    """Return the devices of a type that this process sees."""
    if kind == "cpu":
        return [CPU]
    return [torch.device(kind, n) for n in range(torch.get_device_module(kind).device_count())]


def registrar(device: torch.device) -> str:
    """Return the module whose import makes a type of device known to PyTorch."""
    found = torch.get_device_module(device)
    return found.__name__ if isinstance(found, ModuleType) else type(found).__module__


def compute_on(device: torch.device) -> None:
    """Start the kernels of this process on a device, where nothing names another one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def free_memory(device: torch.device) -> float:
    """Return the bytes that can still be allocated on a device; inf if that can't be found out."""
    if device.type == "cuda" and torch.cuda.is_available():
        on_device, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(on_device + unused)
    if device.type != "cpu" or not MEMORY.exists():
        return inf
    found = (line.split() for line in MEMORY.read_text().splitlines())
    free = next((float(words[1]) * 1024 for words in found if words[0] == "MemAvailable:"), inf)
    return min(free, free_in_group())


def free_share(device: torch.device) -> float:
    """Return the share of a GPU's memory that can still be allocated; 1 of other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 1.0
    return free_memory(device) / torch.cuda.mem_get_info(device)[1]


def free_in_group() -> float:
    """Return the bytes that the process's control group may still allocate; inf without a limit.

    What the group's files hold in memory counts as free, since the kernel drops it when needed.
    """
    try:
        limit = float((GROUP / "memory.max").read_text())
        used = float((GROUP / "memory.current").read_text())
        lines = (GROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no group, another version of groups, or the word "max"
        return inf
    pairs = (line.split() for line in lines)
    cached = next((float(value) for name, value in pairs if name == "inactive_file"), 0.0)
    return max(0.0, limit - used + cached)


def moved(value: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device.

    A copy from the host goes through pinned memory and doesn't block; a copy to the host is
    complete on return.
    """
    if value.device == device:
        return value
    from_host = value.device.type == "cpu"
    if from_host and device.type == "cuda" and not value.is_pinned():
        value = value.pin_memory()
    return value.to(device, non_blocking=from_host)


def read_here(value: Tensor) -> Tensor:
    """Record that this thread's stream reads the tensor, so that its memory isn't reused before."""
    if value.is_cuda:
        value.record_stream(torch.cuda.current_stream(value.device))
    return value


def current_stream() -> int:
    """Return this thread's stream; 0 without CUDA."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0


def copied(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the tensor on a device."""
    return value.clone() if value.device == device else moved(value, device)


@dataclass
class Tables:
    """Caches copies of the host's index tables on devices."""

    _copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on(self, table: Tensor, device: torch.device) -> Tensor:
        """Return a table on a device; the first use there copies it."""
        if device.type == "cpu":
            return table
        if (id(table), device) not in self._copies:
            self.bring([table], device)
        return self._copies[id(table), device][1]

    def bring(self, tables: Iterable[Tensor], device: torch.device) -> None:
        """Copy the tables that aren't on the device yet, all at once."""
        new = {id(t): t for t in tables if (id(t), device) not in self._copies}
        if not new or device.type == "cpu":
            return
        sizes = [table.numel() for table in new.values()]
        flat = torch.empty(sum(sizes), dtype=torch.long, pin_memory=device.type == "cuda")
        torch.cat([table.reshape(-1) for table in new.values()], out=flat)
        parts = moved(flat, device).split(sizes)
        for table, part in zip(new.values(), parts, strict=True):
            # the table is held, so that its id isn't reused
            self._copies[id(table), device] = table, part.view(table.shape)
