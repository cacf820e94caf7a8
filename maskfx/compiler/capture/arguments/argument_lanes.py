"""The lanes of a capture's arguments, as their roles describe them, and its first pyramid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.arguments.roles import Argument, Sizes
from maskfx.ir.geometry.lanes import (
    Batch,
    Feature,
    Frames,
    Lane,
    Tokens,
    grid_segment,
    int_hint,
    pad_segment,
)
from maskfx.ir.geometry.other_sizes import Base, SizeExpr
from maskfx.ir.geometry.pyramid import Level, Pyramid


def pyramid_of(sizes: Sizes, others: tuple[Base, ...]) -> Pyramid:
    """Return a pyramid with the picture and the texts alone."""
    return Pyramid(
        batch=sizes["batch"],
        base=(sizes["y"], sizes["x"]) if "y" in sizes else None,
        segments={
            **({"image": sizes["tokens"]} if "tokens" in sizes else {}),
            **{r: s for r, s in sizes.items() if r.startswith("text:")},
        },
        others=others,
        frames=sizes.get("frames", 1),
    )


def placeholder_lane(
    leaf: Argument,
    value: torch.Tensor,
    symbols: Mapping[str, SizeExpr],
    pyramid: Pyramid,
    symbolic: bool,
) -> Lane:
    """Return the lane that an argument's roles describe."""
    dims: list[tuple[Any, ...]] = []
    for role, size in zip(leaf.roles, value.shape, strict=True):
        if role == "batch":
            dims.append((Batch(),))
        elif role == "tokens":
            dims.append((Tokens(("image",)),))
        elif role.startswith("tokens/1:"):
            own = grid_segment(0)
            dims.append((Tokens((own, pad_segment(roles_.role_size(role, {}), own))),))
        elif role.startswith("tokens/"):
            patch = int(int(role[7:]) ** 0.5)
            level = pyramid.derive(Level(parent=0, divide=(patch, patch))) if patch > 1 else 0
            dims.append(pyramid.axes(level))
        elif role.startswith("text:"):
            fixed = symbolic and isinstance(symbols.get(role), int)
            dims.append((Feature(int_hint(size)),) if fixed else (Tokens((role,)),))
        elif role and role[0] in "yx":
            axis = pyramid.y if role[0] == "y" else pyramid.x
            dims.append((axis(scaled_level(role[1:], pyramid)),))
        elif role == "frames":
            dims.append((Frames(int_hint(size)),))
        elif role == roles_.EACH_FRAME:
            pictures = any(r[:1] in ("y", "x") for r in leaf.roles)
            each = Frames(pyramid.frames) if pictures else Feature(pyramid.frames)
            dims.append((Batch(), each))
        else:
            dims.append((Feature(int_hint(size)),) if int_hint(size) != 1 else ())
    return Lane(tuple(dims))


def scaled_level(scale: str, pyramid: Pyramid) -> int:
    """Return the level at scale `/n` or `*n` of the base."""
    if not scale:
        return 0
    n = int(scale[1:])
    if scale[0] == "*":
        return pyramid.derive(Level(parent=0, times=(n, n)))
    level = 0
    while n > 1:  # halve step by step, as a pyramid of stride-2 convolutions does
        level = pyramid.derive(Level(parent=level, grow=(1, 1), divide=(2, 2)))
        n //= 2
    return level
