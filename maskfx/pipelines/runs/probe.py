"""Probe: observe a pipeline's first step, to find out what it does with its mask and image.

Argument names don't determine it: one pipeline's image is another's control image, and a mask may
reach the denoiser as channels, through a ControlNet or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.pipelines.deferred import force_all
from maskfx.pipelines.handlers.call_handler import DenseHandler
from maskfx.pipelines.masks.mask_grids import is_flat
from maskfx.pipelines.parts.pipeline import nested_pipelines
from maskfx.pipelines.runs.run import DenoiserCall, Execute

CLOSE = 1e-3  # inputs that differ by less, relative to the largest, are the same
CallInputs = dict[tuple[str, str], list[object]]  # name and branch of a call -> leaves of inputs


class ProbeFinished(Exception):
    """Ends a probe once the inputs of the first step are known."""


class FirstStepHandler(DenseHandler):
    """Ends the run with the first step of its picture; a prior may make an embedding before."""

    title = ""

    def after_step(self, step: int, latents: Tensor) -> Tensor:
        if is_flat(latents):
            return latents
        raise ProbeFinished


@dataclass
class InputRecorder:
    """Records the inputs of a run's calls until each denoiser was called; all but the last run."""

    denoisers: Collection[str]
    execute: Execute
    inputs: CallInputs = field(default_factory=dict)

    def __call__(self, calls: list[DenoiserCall]) -> None:
        while calls:
            ready = [call for call in calls if call.ready()]
            for call in ready:
                call.inputs = force_all(call.inputs)
                self.inputs[call.name, call.branch] = pytree.tree_leaves(call.inputs)
            if {name for name, _ in self.inputs} == set(self.denoisers):
                raise ProbeFinished
            self.execute(ready)
            calls = [call for call in calls if call not in ready]


def same_inputs(one: CallInputs, other: CallInputs) -> bool:
    """Return True if the denoisers receive equal inputs."""
    if one.keys() != other.keys():
        return False
    return all(
        len(leaves) == len(other[key]) and all(map(same, leaves, other[key]))
        for key, leaves in one.items()
    )


def grows_within_batch(few: CallInputs, more: CallInputs) -> bool:
    """Return True if inputs grow but batches don't. Values aren't compared: they contain noise."""
    short, long = shapes(few), shapes(more)
    return [shape[0] for shape in short] == [shape[0] for shape in long] and short != long


def shapes(inputs: CallInputs) -> list[torch.Size]:
    """Return the shapes of inputs with a batch, sites or tokens, and features."""
    leaves = [leaf for values in inputs.values() for leaf in values]
    return [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() >= 3]


def same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(type(one) is type(other) and one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    size = float(one.abs().max()) if one.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=0, atol=CLOSE * size))


def autoencoders_of(pipe: object) -> dict[str, object]:
    """Return the parts of a pipeline that encode and decode images, by attribute."""
    return {
        name: part
        for name, part in vars(pipe).items()
        if hasattr(part, "encode") and hasattr(part, "decode") and hasattr(part, "config")
    }


@contextmanager
def encodings_of(pipe: object) -> Iterator[list[str]]:
    """Yield a list that receives an entry whenever an image is encoded into latents."""
    encodings: list[str] = []
    coders = [(vars(one), autoencoders_of(one)) for one in nested_pipelines(pipe)]
    for attributes, own in coders:
        attributes.update({name: EncodeProbe(part, encodings) for name, part in own.items()})
    try:
        yield encodings
    finally:
        for attributes, own in coders:
            attributes.update(own)


class EncodeProbe:
    """Proxy of an autoencoder that records each use of `encode`; all else is passed through."""

    def __init__(self, part: object, encodings: list[str]) -> None:
        self.__dict__.update(maskfx_part=part, encodings=encodings)

    def __getattr__(self, name: str) -> Any:
        if name == "encode":
            self.encodings.append(name)
        return getattr(self.maskfx_part, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.maskfx_part, name, value)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.maskfx_part(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.maskfx_part)
