"""Probe: what a pipeline does with its mask and its picture, seen from its own first step.

Names of arguments don't tell: one pipeline's picture is another one's control image, and a mask may
reach the denoiser as channels, through a ControlNet or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.compiled import CompiledDenoiser
from maskfx.pipelines.course import DenseCourse
from maskfx.pipelines.deferred import forced
from maskfx.pipelines.run import Call, Execute, Run, watched
from maskfx.pipelines.standin import running

CLOSE = 1e-3  # inputs that differ by less, relative to the largest, are the same
Heard = dict[tuple[str, str], list[Any]]  # name and branch of a call -> leaves of its inputs


class Enough(Exception):
    """The first step was heard."""


class FirstStep(DenseCourse):
    """Ends with the first step."""

    def stepped(self, step: int, latents: Tensor) -> Tensor:
        raise Enough


def first_inputs(
    pipe: Any,
    call: Callable[..., Any],
    denoisers: Mapping[str, CompiledDenoiser],
    execute: Execute,
    arguments: Mapping[str, Any],
) -> Heard:
    """What the denoisers are told at the first step of a call; all but the last of them compute."""
    heard: Heard = {}

    def listen(calls: list[Call]) -> None:
        for one in calls:
            one.inputs = forced(one.inputs)
            heard[one.name, one.branch] = pytree.tree_leaves(one.inputs)
        if {name for name, _ in heard} == set(denoisers):
            raise Enough
        execute(calls)

    run = Run(denoisers, FirstStep(), listen)
    try:
        with watched(pipe, run), running(run):
            call(pipe, **arguments)
    except Enough:
        pass
    return heard


def same_inputs(one: Heard, other: Heard) -> bool:
    """Are the denoisers told the same?"""
    if one.keys() != other.keys():
        return False
    return all(
        len(leaves) == len(other[key]) and all(map(same, leaves, other[key]))
        for key, leaves in one.items()
    )


def as_one_longer(few: Heard, more: Heard) -> bool:
    """Are the denoisers told more in batches as large? Values say nothing: they hold noise."""
    short, long = shapes(few), shapes(more)
    return [shape[0] for shape in short] == [shape[0] for shape in long] and short != long


def shapes(heard: Heard) -> list[torch.Size]:
    """Of what has a batch, sites or tokens, and features."""
    leaves = [leaf for told in heard.values() for leaf in told]
    return [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() >= 3]


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(type(one) is type(other) and one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    size = float(one.abs().max()) if one.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=0, atol=CLOSE * size))


def encodes(pipe: Any, probe: Callable[[], Any]) -> bool:
    """Is a picture encoded into latents while `probe` runs?"""
    heard: list[str] = []
    coders = {
        name: part
        for name, part in vars(pipe).items()
        if hasattr(part, "encode") and hasattr(part, "decode") and hasattr(part, "config")
    }
    pipe.__dict__.update({name: Listening(part, heard) for name, part in coders.items()})
    try:
        probe()
    finally:
        pipe.__dict__.update(coders)
    return bool(heard)


class Listening:
    """A coder that tells when it encodes; all else is the coder's own."""

    def __init__(self, part: Any, heard: list[str]) -> None:
        self.__dict__.update(maskfx_part=part, heard=heard)

    def __getattr__(self, name: str) -> Any:
        if name == "encode":
            self.heard.append(name)
        return getattr(self.maskfx_part, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.maskfx_part, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.maskfx_part(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.maskfx_part)
