"""On which devices the processes of a net lie."""

from __future__ import annotations

from collections import Counter

import torch

from maskfx.errors import InputError
from maskfx.runtime.hardware.devices import visible_devices


def check_device(device: torch.device, home: torch.device, net: str) -> None:
    """Raise InputError for a device on which a net's processes can't be.

    Args:
        device: The device that was asked for.
        home: The device of the net's own weights.
        net: The name of the net.
    """
    found = visible_devices(home.type)
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
    all_ = visible_devices(home.type)
    at = all_.index(home) if home in all_ else 0
    others = [*all_[at + 1 :], *all_[:at]] or [home]
    used, found = Counter(used), list[torch.device]()
    for _ in range(count):
        found.append(min(others, key=lambda device: used[device]))
        used[found[-1]] += 1
    return found
