"""On which devices the processes of a net lie."""

from __future__ import annotations

from collections import Counter

import torch

from maskfx.errors import InputError
from maskfx.runtime.hardware.devices import CPU


def named(device: str) -> torch.device:
    """Return a device by its name; a name without a number is the first of its type."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"OwnProcesses: devices has {device!r:.60}: give names of devices, such as 'cuda:1'"
        ) from error
    return found if found.type == "cpu" or found.index is not None else torch.device(found.type, 0)


def visible(kind: str) -> list[torch.device]:
    """Return the devices of a type that this process sees."""
    if kind == "cpu":
        return [CPU]
    return [torch.device(kind, n) for n in range(torch.get_device_module(kind).device_count())]


def check_device(device: torch.device, home: torch.device, net: str) -> None:
    """Raise InputError for a device on which a net's processes can't be.

    Args:
        device: The device that was asked for.
        home: The device of the net's own weights.
        net: The name of the net.
    """
    found = visible(home.type)
    if device not in found:
        raise InputError(
            f"OwnProcesses: devices gives {net} {str(device)!r}, and its weights are on {home}; "
            f"give a visible device of that type: {', '.join(map(str, found))}"
        )


def spread(home: torch.device, count: int, used: Counter[torch.device]) -> list[torch.device]:
    """Return a device for each process of a net: the others of its type, the least used first.

    Args:
        home: The device of the net's own weights, which the denoiser computes on. It is used if
            there is no other one.
        count: The number of processes.
        used: The number of processes that each device has.
    """
    all_ = visible(home.type)
    at = all_.index(home) if home in all_ else 0
    others = [*all_[at + 1 :], *all_[:at]] or [home]
    used, found = Counter(used), list[torch.device]()
    for _ in range(count):
        found.append(min(others, key=lambda device: used[device]))
        used[found[-1]] += 1
    return found
