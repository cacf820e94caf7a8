"""Roles: which dimension of which argument is the batch, the image, the text.

Roles are inferred from the order of the arguments, their ranks, sizes and the argument names that
diffusers' denoisers share (`encoder_hidden_states`, `timestep`, `img_ids`, ...), never from the
class of a model. An argument `roles=` overrides what is inferred:

    roles={"hidden_states": ("batch", "tokens", ""), "timestep": ("batch",)}

A role is "batch", "y", "x" (with a scale: "y/2", "x*8"), "frames" of a video, "batch*frames" (an
entry for each frame of each request), "tokens", "tokens/4" (a flattened grid of patches of 2x2),
"tokens/1:4096" (the same, with padding behind it up to 4096), "text:NAME" or "" for plain features.
An integer argument has one role, of the size that it is ("y*16": in pixels). A capture serves one
number of frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments.grid_numbers import side_of
from maskfx.errors import SizesDisagree
from maskfx.ir.geometry.cuts import NUMBER
from maskfx.ir.read_numbers import read_once

Roles = tuple[str, ...]
Sizes = dict[str, int]  # by role

STEP_WORDS = ("timestep", "sigma", "guidance", "residual", "block_samples", "noise", "_t_")
EACH_FRAME = "batch*frames"


@dataclass(frozen=True)
class Argument:
    """One flattened argument; what is held, its value or the picture's sizes, is a constant.

    The numbers of one sample in a tensor may have roles: the sides of the picture.
    """

    path: str
    tensor: bool
    roles: Roles = ()
    step: bool = False
    held: bool = False
    held_sizes: bool = False
    sides: Roles = ()

    @property
    def argument(self) -> str:
        return self.path.split(".")[0]


def flatten(inputs: Mapping[str, object]) -> tuple[list[str], list[Any], pytree.TreeSpec]:
    """Return paths, values and structure of the keyword arguments."""
    pairs, spec = pytree.tree_flatten_with_path(dict(inputs))
    return [path_name(p) for p, _ in pairs], [v for _, v in pairs], spec


def path_name(path: Sequence[object]) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def without_texts(leaf: Argument) -> Argument:
    """Return an argument whose texts are plain features."""
    return replace(leaf, roles=tuple("" if r.startswith("text:") else r for r in leaf.roles))


def batch_axis(roles: Roles) -> int | None:
    """Return the dimension along which requests lie, with one entry or one for each frame."""
    return next((axis for axis, r in enumerate(roles) if r in ("batch", EACH_FRAME)), None)


def is_fixed(role: str) -> bool:
    """Return True if a dimension of this role has the same size in every call of a capture."""
    return role in ("", "frames") or role.startswith("tokens/1:")


def role_size(role: str, sizes: Mapping[str, int]) -> int:
    """Return the size of a dimension of this role in a call with these sizes."""
    if role.startswith("tokens/"):
        patch, _, padded = role[7:].partition(":")
        return int(padded or sizes.get("frames", 1) * sizes["y"] * sizes["x"] // int(patch))
    if role[:2] in ("y/", "x/"):
        return -(-sizes[role[0]] // int(role[2:]))
    if role[:2] in ("y*", "x*"):
        return sizes[role[0]] * int(role[2:])
    if role == EACH_FRAME:
        return sizes["batch"] * sizes["frames"]
    return sizes[role]


def observed_sizes(leaves: Sequence[Argument], values: Sequence[Any]) -> Sizes:
    """Return batch, y, x, tokens and text lengths of the arguments; raise if they disagree."""
    return sizes_of(leaves, shapes_of(leaves, values))


def shapes_of(leaves: Sequence[Argument], values: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the shape of each argument; for an integer with a role, the integer itself.

    The numbers of a tensor that has sides of the picture follow its shape.
    """
    return [
        (*value.shape, *numbers_of(leaf, value)) if leaf.tensor else (value,) if leaf.roles else ()
        for leaf, value in zip(leaves, values, strict=True)
    ]


def numbers_of(leaf: Argument, value: torch.Tensor) -> list[int]:
    """Return the numbers of the first sample in a tensor that has sides of the picture."""
    if not leaf.sides:
        return []
    numbers = read_once(value)
    own = numbers[:1] if leaf.roles[0] == "batch" else numbers
    return [int(n) for n in np.ravel(own)]


def sizes_of(leaves: Sequence[Argument], shapes: Sequence[Sequence[int]]) -> Sizes:
    """Return the sizes of arguments with these shapes; raise if they disagree."""
    sizes: Sizes = {}
    seen: dict[str, str] = {}
    for leaf, shape in zip(leaves, shapes, strict=True):
        own = zip(leaf.roles, shape[: len(leaf.roles)], strict=True)
        for role, size in own if leaf.tensor else starmap(side_of, own):
            named = role.startswith(("text:", NUMBER))
            if role in ("batch", "frames", "y", "x", "tokens") or named:
                if sizes.setdefault(role, int(size)) != size:
                    raise SizesDisagree(leaf.path, role, size, f"{sizes[role]} in {seen[role]}")
                seen.setdefault(role, leaf.path)
    sizes.setdefault("batch", 1)
    add_sides(leaves, shapes, sizes)
    check_each_frame(leaves, shapes, sizes)
    return sizes


def add_sides(leaves: Sequence[Argument], shapes: Sequence[Sequence[int]], sizes: Sizes) -> None:
    """Add the sides in tensors to the sizes that shapes show; raise SizesDisagree for others."""
    for leaf, shape in zip(leaves, shapes, strict=True):
        if not leaf.sides:
            continue
        numbers = list(zip(leaf.sides, shape[len(leaf.roles) :], strict=True))
        for axis, size in starmap(side_of, numbers):
            if axis in ("frames", "y", "x"):
                sizes.setdefault(axis, size)
        for role, number in numbers:
            if role and not is_side(role, number, sizes):
                wanted = f"the picture has {sizes.get('y')} x {sizes.get('x')} sites"
                raise SizesDisagree(leaf.path, f"number {role!r}", number, wanted)
        for other, own in zip(leaves, shapes, strict=True):
            for role, size in zip(other.roles, own, strict=False):
                if role == "tokens/1" and size != role_size(role, sizes):
                    tokens = f"{other.path} has {size} tokens"
                    raise SizesDisagree(leaf.path, "picture", role_size(role, sizes), tokens)


def is_side(role: str, number: int, sizes: Mapping[str, int]) -> bool:
    """Return True if a number is what its role is in a call with these sizes."""
    if role[:2] in ("y/", "x/"):
        return number * int(role[2:]) == sizes[role[0]]
    return number == role_size(role, sizes)


def check_each_frame(
    leaves: Sequence[Argument], shapes: Sequence[Sequence[int]], sizes: Sizes
) -> None:
    """Raise SizesDisagree for an argument that hasn't an entry for each frame of each request."""
    for leaf, shape in zip(leaves, shapes, strict=True):
        for role, size in zip(leaf.roles, shape[: len(leaf.roles)], strict=True):
            if role == EACH_FRAME and size != role_size(role, sizes):
                wanted = f"{sizes['batch']} * {sizes['frames']} in the video"
                raise SizesDisagree(leaf.path, role, int(size), wanted)
