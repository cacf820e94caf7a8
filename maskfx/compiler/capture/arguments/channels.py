"""Which dimension of the picture or the video holds its channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

Roles = tuple[str, ...]


def roles_by_channels(
    module: torch.nn.Module, primary: str, tensors: Mapping[str, torch.Tensor]
) -> Roles | None:
    """Return the roles of a video, or of a picture whose channels come last; None for others."""
    value, channels = tensors[primary], input_channels(module)
    if value.dim() == 5:
        return video_roles(primary, tensors, channels + channels_in_patches(module))
    last = has_channels_last(value, channels + layer_sizes(module, "in_features"))
    return ("batch", "y", "x", "") if last else None


def input_channels(module: torch.nn.Module) -> list[int]:
    """Return numbers of channels that a module may take, those of its configuration first."""
    config = getattr(module, "config", None)
    named = dict(config).items() if isinstance(config, Mapping) else ()
    found = [n for name, n in named if name.startswith("in_") and isinstance(n, int)]
    return found + layer_sizes(module, "in_channels")


def channels_in_patches(module: torch.nn.Module) -> list[int]:
    """Return the number of channels of the first linear layer, if it may take patches."""
    config = getattr(module, "config", None)
    patch = dict(config).get("patch_size") if isinstance(config, Mapping) else None
    sizes = layer_sizes(module, "in_features")
    if not sizes or not isinstance(patch, (tuple, list)) or len(patch) != 3:
        return []
    number, left = divmod(sizes[0], math.prod(patch))
    return [] if left else [number]


def layer_sizes(module: torch.nn.Module, name: str) -> list[int]:
    """Return a number of each layer that has it, such as that of its input channels."""
    found = (vars(layer).get(name) for layer in module.modules())
    return [n for n in found if isinstance(n, int)]


def has_channels_last(value: torch.Tensor, channels: Sequence[int]) -> bool:
    """Return True for a picture whose last dimension alone may be its channels, and is short."""
    if value.dim() != 4 or not channels:
        return False
    _, first, second, last = value.shape
    patches = (first, 4 * first, 16 * first, 64 * first)  # a layer may take patches
    return last in channels and last < min(first, second) and not set(patches) & set(channels)


def video_roles(path: str, tensors: Mapping[str, torch.Tensor], channels: Sequence[int]) -> Roles:
    """Return the roles of a video: its channels stand before its frames, behind them, or last.

    Positions along each axis show which, else the number of channels does.
    """
    shape = tensors[path].shape
    forms = {1: ("", "frames", "y", "x"), 2: ("frames", "", "y", "x"), 4: ("frames", "y", "x", "")}
    found = [axis for number in channels for axis in forms if shape[axis] == number]
    if shape[1] == 1 and shape[2] > 1:  # one frame, channels last
        found.insert(0, 4)
    for positions in position_lists(tensors):
        counts = [len(tensors[p]) for p in positions]
        found = [a for a, form in forms.items() if fits(shape, form, counts)] + found
    return ("batch", *forms[found[0] if found else 1])


def fits(shape: Sequence[int], form: Roles, positions: Sequence[int]) -> bool:
    """Return True if a video of this form has patches of equal sides, one at each position."""
    size = dict(zip(form, shape[1:], strict=True))
    if len(positions) != 3 or not all(positions):
        return False
    axes = list(zip(("frames", "y", "x"), positions, strict=True))
    sides = [size[axis] / number for axis, number in axes]
    return all(side == int(side) for side in sides) and sides[1] == sides[2]


def position_lists(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the paths of lists of vectors, which hold positions along each axis."""
    groups: dict[str, list[str]] = {}
    for path, value in tensors.items():
        if "." in path and value.dim() == 1:
            groups.setdefault(path.rpartition(".")[0], []).append(path)
    return list(groups.values())
