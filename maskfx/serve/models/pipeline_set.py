"""The pipelines that serve one model over one set of modules.

One pipeline edits and, if diffusers has a text-to-image class for the same model, another generates
images. diffusers' AutoPipeline tables define which classes belong together. Captures, templates and
batched steps are shared.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any, Protocol

from torch import nn

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.call_defaults import NAME as CALLFILE
from maskfx.pipelines.compile import pipeline_state_of, share_denoisers
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.parts.stand_in import find_denoisers
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.cache.tiers import Tiers
from maskfx.serve.models.call_signature import NOTHING, OURS, CallSignature
from maskfx.serve.models.ip_adapters import IpAdapters

log = logging.getLogger(__name__)

SIDE = 512  # default image side if no config has one
UNSAID = 32  # default of `sample_size` in diffusers' autoencoder classes

Compile = Callable[[object], object]


class LoadedPipeline(Pipeline, Protocol):
    """A pipeline with diffusers' settings of its progress bars."""

    def set_progress_bar_config(self, *, disable: bool) -> None: ...


class AutoPipeline(Protocol):
    """One of diffusers' tables of pipeline classes, `AutoPipelineForInpainting` for example."""

    __name__: str

    def from_pipe(self, pipeline: Pipeline) -> LoadedPipeline: ...


@dataclass
class PipelineMember:
    """One pipeline: the original and the compiled one."""

    plain: Pipeline
    pipe: Any
    told: Mapping[str, object] = field(
        default_factory=dict
    )  # call arguments from the model's folder
    ip_adapters: IpAdapters = field(default_factory=IpAdapters)  # of the model
    signature: CallSignature = field(init=False)

    def __post_init__(self) -> None:
        self.signature = CallSignature.of(self.plain, self.told)

    @classmethod
    def of(
        cls,
        pipe: Pipeline,
        compiled: Compile,
        told: Mapping[str, object],
        ip_adapters: IpAdapters,
    ) -> PipelineMember:
        made = cls(copy.copy(pipe), compiled(pipe), told, ip_adapters)
        pipeline_state_of(made.pipe).usual = told
        return made


@dataclass
class PipelineSet:
    """The pipelines of one model, at least one of the two.

    `editor` has an image input, `generator` is called without one. They may be the same member.
    """

    editor: PipelineMember | None
    generator: PipelineMember | None

    @classmethod
    def of(
        cls,
        pipe: Pipeline,
        compiled: Compile,
        told: Mapping[str, object] = NOTHING,
        ip_adapters: Sequence[str] = (),
    ) -> PipelineSet:
        """Build the set from a loaded pipeline and its diffusers classes for the other tasks.

        Args:
            pipe: The loaded pipeline.
            compiled: Function that compiles a pipeline.
            `told`: Call arguments from the model's folder (`call.json`).
            ip_adapters: Names of the pipeline's IP-Adapters.
        """
        edits, generates = roles_of(pipe)
        made = cls.made(edits, generates, compiled, told, IpAdapters.of(pipe, ip_adapters))
        made.check_told(told)
        return made

    @classmethod
    def made(
        cls,
        edits: Pipeline | None,
        generates: Pipeline | None,
        compiled: Compile,
        told: Mapping[str, object],
        ip: IpAdapters,
    ) -> PipelineSet:
        editor = None if edits is None else PipelineMember.of(edits, compiled, told, ip)
        generator = editor if generates is edits else None
        if generates is not None and generates is not edits:
            generator = PipelineMember.of(generates, compiled, told, ip)
            if editor is not None:
                share_denoisers(editor.pipe, generator.pipe)
        return cls(editor, generator)

    def check_told(self, told: Mapping[str, object]) -> None:
        """Raise InputError if `call.json` sets an argument that can't take effect."""
        for name in told:
            kinds = " and ".join(
                dict.fromkeys(type(member.plain).__name__ for member in self.members)
            )
            if name in OURS:
                raise InputError(f"{CALLFILE}: the server sets {name} for each call; leave it out")
            if not any(member.signature.has(name) for member in self.members):
                raise InputError(f"{CALLFILE}: {kinds} accepts no {name}; leave it out")
        for member in self.members:
            member.signature.check_told(CALLFILE)

    @property
    def members(self) -> list[PipelineMember]:
        return [member for member in (self.editor, self.generator) if member is not None]

    @property
    def main(self) -> PipelineMember:
        """The editor, or the generator if the model has no editor."""
        member = self.editor or self.generator
        assert member is not None, "a family has a member"
        return member

    @property
    def ip_adapters(self) -> IpAdapters:
        return self.main.ip_adapters

    @property
    def library(self) -> TemplateLibrary:
        return pipeline_state_of(self.main.pipe).library

    @property
    def multiple(self) -> int:
        return lcm(*(multiple_of(member.plain) for member in self.members))

    def size(self) -> tuple[int, int]:
        """Return the model's default width and height."""
        side = side_of(self.main.plain)
        rounded = max(1, side // self.multiple) * self.multiple
        return rounded, rounded


def compiling(
    quality: Quality,
    tiers: Tiers,
    loader: Loader | None = None,
    programs: Path | None = None,
    plans: bool | None = None,
    **more: Any,
) -> Compile:
    """Return the function that compiles this server's pipelines; all share one loader.

    Args:
        quality: Of edits and whole pictures.
        tiers: Where templates are kept.
        loader: Loads their rows.
        programs: A directory in which compiled programs are kept for the next start.
        plans: Whether loads are planned.
        more: Further arguments of `maskfx.compile`.
    """
    return lambda pipe: maskfx.compile(
        pipe, quality=quality, tiers=tiers, loader=loader, programs=programs, plans=plans, **more
    )


def roles_of(pipe: Pipeline) -> tuple[Pipeline | None, Pipeline | None]:
    """Return the pipeline that edits and the one that may generate without an image.

    Warm-up tests whether the second one works: an image argument that is optional by signature may
    still be required.
    """
    from diffusers import (
        AutoPipelineForImage2Image,
        AutoPipelineForInpainting,
        AutoPipelineForText2Image,
    )

    signature = CallSignature.of(pipe)
    inpaints = pipe if signature.has("mask_image") else twin(AutoPipelineForInpainting, pipe)
    begins = pipe if signature.takes_picture else None
    edits = inpaints or begins or twin(AutoPipelineForImage2Image, pipe)
    if inpaints is None and signature.control_argument == "image":
        return edits, pipe
    generates = pipe if not signature.has("image") else twin(AutoPipelineForText2Image, pipe)
    if generates is not None and CallSignature.of(generates).takes_picture:
        alone = edits is pipe and not signature.has("mask_image")
        generates = pipe if alone and signature.defaults["image"] is None else None
    return edits, generates


def twin(table: AutoPipeline, pipe: Pipeline) -> Pipeline | None:
    """Return the pipeline of an AutoPipeline table over the same modules; None if there is none."""
    try:
        made = table.from_pipe(pipe)
    except Exception as error:  # the type depends on the pipeline class
        log.info(
            "%s: %s has no matching pipeline class: %s", type(pipe).__name__, table.__name__, error
        )
        return None
    made.set_progress_bar_config(disable=True)
    return made


# Sizes.


def multiple_of(pipe: object) -> int:
    """Return the number that widths and heights must be multiples of."""
    factor = int(getattr(pipe, "vae_scale_factor", 0) or 1)
    patch = getattr(pipe, "patch_size", None)
    processor = getattr(getattr(pipe, "image_processor", None), "config", {})
    steps = [factor * (patch if isinstance(patch, int) else 1)]
    folded = getattr(getattr(pipe, "adapter", None), "downscale_factor", None)  # a T2I-Adapter's
    steps.append(folded if isinstance(folded, int) else 1)
    steps.append(int(processor.get("vae_scale_factor", 0) or 1))
    return lcm(*steps)


def side_of(pipe: Pipeline) -> int:
    """Return the default image side in pixels, from the pipeline's or the denoiser's config.

    If no denoiser config has a size, the pipeline's value is only a class default; then a smaller
    size in the autoencoder's config takes precedence.
    """
    factor = int(getattr(pipe, "vae_scale_factor", 0) or 8)
    given = getattr(pipe, "default_sample_size", None)
    made_for = [getattr(part, "config", {}).get("sample_size") for part in denoisers_of(pipe)]
    for value in (given, *made_for):
        side = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(side, int) and side > 0:
            own = side * factor
            return own if any(made_for) else min(own, autoencoders_side(pipe) or own)
    return SIDE


def autoencoders_side(pipe: object) -> int:
    """Return the image side in the autoencoder's config; 0 if it has only the class default."""
    side = getattr(getattr(pipe, "vae", None), "config", {}).get("sample_size")
    return side if isinstance(side, int) and side > UNSAID else 0


def denoisers_of(pipe: Pipeline) -> list[nn.Module]:
    """Return the denoisers of a pipeline."""
    return list(find_denoisers(pipe.components).values())
