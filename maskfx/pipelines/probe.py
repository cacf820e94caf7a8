"""Probe: find out what a pipeline does with its mask and image by running its first step.

Argument names don't determine it: one pipeline's image is another's control image, and a mask may
reach the denoiser as channels, through a ControlNet or not at all. The answer is cached for each
set of argument names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.errors import EngineError
from maskfx.pipelines.call_policy import DensePolicy
from maskfx.pipelines.deferred import forced
from maskfx.pipelines.masks import is_picture, like_mask
from maskfx.pipelines.run import DenoiserCall, Execute, PipelineRun, watched
from maskfx.pipelines.stand_in import running
from maskfx.pipelines.state import Arguments, CallOptions, PipelineState, Template
from maskfx.pipelines.template_key import noise_of
from maskfx.runtime.denoiser import CompiledDenoiser

CLOSE = 1e-3  # inputs that differ by less, relative to the largest, are the same
Heard = dict[tuple[str, str], list[Any]]  # name and branch of a call -> leaves of its inputs


class ProbeFinished(Exception):
    """Ends a probe once the inputs of the first step are known."""


class FirstStepPolicy(DensePolicy):
    """End the run with its first step."""

    def stepped(self, step: int, latents: Tensor) -> Tensor:
        raise ProbeFinished


def first_inputs(
    pipe: Any,
    call: Callable[..., Any],
    denoisers: Mapping[str, CompiledDenoiser],
    execute: Execute,
    arguments: Mapping[str, Any],
) -> Heard:
    """Return the denoisers' inputs at a call's first step; all but the last of them compute."""
    heard: Heard = {}

    def listen(calls: list[DenoiserCall]) -> None:
        for one in calls:
            one.inputs = forced(one.inputs)
            heard[one.name, one.branch] = pytree.tree_leaves(one.inputs)
        if {name for name, _ in heard} == set(denoisers):
            raise ProbeFinished
        execute(calls)

    run = PipelineRun(denoisers, FirstStepPolicy(), listen)
    try:
        with watched(pipe, run), running(run):
            call(pipe, **arguments)
    except ProbeFinished:
        pass
    return heard


def same_inputs(one: Heard, other: Heard) -> bool:
    """Return True if the denoisers receive equal inputs."""
    if one.keys() != other.keys():
        return False
    return all(
        len(leaves) == len(other[key]) and all(map(same, leaves, other[key]))
        for key, leaves in one.items()
    )


def as_one_longer(few: Heard, more: Heard) -> bool:
    """Return True if inputs grow but batches don't. Values aren't compared: they contain noise."""
    short, long = shapes(few), shapes(more)
    return [shape[0] for shape in short] == [shape[0] for shape in long] and short != long


def shapes(heard: Heard) -> list[torch.Size]:
    """Return the shapes of inputs with a batch, sites or tokens, and features."""
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
    """Return True if an image is encoded into latents while `probe` runs."""
    heard: list[str] = []
    coders = {
        name: part
        for name, part in vars(pipe).items()
        if hasattr(part, "encode") and hasattr(part, "decode") and hasattr(part, "config")
    }
    pipe.__dict__.update({name: EncodeProbe(part, heard) for name, part in coders.items()})
    try:
        probe()
    finally:
        pipe.__dict__.update(coders)
    return bool(heard)


class EncodeProbe:
    """Proxy of an autoencoder that records each use of `encode`; all else is passed through."""

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


def tells_mask(pipe: Any, shared: PipelineState, arguments: Arguments) -> bool:
    """Return True if the denoisers' inputs depend on the mask."""

    def ask() -> bool:
        heard = [
            first_inputs(
                pipe,
                shared.call,
                shared.denoisers,
                shared.execute,
                {
                    **quiet(shared, arguments, "probe"),
                    "mask_image": like_mask(arguments["mask_image"], value),
                },
            )
            for value in (0, 1)
        ]
        return not same_inputs(*heard)

    return learned(shared, "mask", arguments, ask, True)


def takes_picture(pipe: Any, shared: PipelineState, arguments: Arguments) -> bool:
    """Return True if `image` is the image to edit: it is encoded; a control image may not be."""
    if shared.masks:
        return True
    if arguments.get("image") is None:
        return False
    given = quiet(shared, arguments, "probe")

    def ask() -> bool:
        return encodes(
            pipe,
            lambda: first_inputs(pipe, shared.call, shared.denoisers, shared.execute, given),
        )

    return learned(shared, "image", arguments, ask, False)


def mixes_pictures(pipe: Any, shared: PipelineState, arguments: Arguments) -> bool:
    """Return True if each result is made from all images passed, the first of which is edited.

    In other pipelines each is made from one. The probe passes one more image: in those, the batch
    grows, or the call fails, or nothing grows.
    """
    pictures = arguments.get("image")
    if not isinstance(pictures, (list, tuple)) or len(pictures) < 2:
        return False
    if not takes_picture(pipe, shared, arguments):
        return False

    def ask() -> bool:
        given = quiet(shared, arguments, "probe")
        try:
            few, more = (
                first_inputs(
                    pipe, shared.call, shared.denoisers, shared.execute, {**given, "image": told}
                )
                for told in ([*pictures], [*pictures, pictures[-1]])
            )
        except EngineError:
            raise
        except Exception:  # the added image has no prompt
            return False
        return as_one_longer(few, more)

    return learned(shared, "pictures", arguments, ask, False)


def learned(
    shared: PipelineState, what: str, arguments: Arguments, ask: Callable[[], bool], unknown: bool
) -> bool:
    """Return the cached answer for arguments of these names; `unknown` if the probe fails."""
    names = frozenset(n for n, v in arguments.items() if v is not None and "callback" not in n)
    if (what, names) not in shared.learned:
        try:
            shared.learned[what, names] = ask()
        except EngineError:  # cancelled or past its deadline: no answer about the pipeline
            raise
        except Exception as error:  # the call itself will raise what is wrong, if anything
            shared.notes[f"what becomes of {what}= isn't known: {error!s:.100}"] += 1
            return unknown
    return shared.learned[what, names]


def quiet(shared: PipelineState, arguments: Arguments, noise: str) -> Arguments:
    """Return the call's arguments without callbacks, and with separate noise."""
    kept = {n: v for n, v in arguments.items() if "callback" not in n}
    if "generator" in shared.parameters:
        kept["generator"] = noise_of(noise)
    return kept


def original_of(
    pipe: Any, shared: PipelineState, arguments: Arguments, options: CallOptions
) -> Any:
    """Return the image whose pixels are kept outside the mask; None if it isn't pixels."""
    found = options.image
    if found is None and takes_picture(pipe, shared, arguments):
        found = arguments.get("image")
        if found is not None and mixes_pictures(pipe, shared, arguments):
            found = found[0]
    if found is None and isinstance(options.template, Template):
        found = options.template.images
    return found if is_picture(found) else None


def gives_pictures(shared: PipelineState, arguments: Arguments) -> bool:
    kind = shared.parameters.get("output_type")
    usual = kind.default if kind is not None else "pil"
    return bool(arguments.get("output_type", usual) != "latent")
