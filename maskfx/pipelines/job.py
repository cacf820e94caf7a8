"""Job: what one call of a compiled pipeline asks for, and the runs that answer it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from maskfx.compiled import CompiledDenoiser
from maskfx.errors import InputError
from maskfx.pipelines.course import Course, DenseCourse, EditCourse, RecordCourse
from maskfx.pipelines.deferred import forced
from maskfx.pipelines.identity import (
    Surroundings,
    arguments_of,
    digest,
    noise_of,
    recorded_arguments,
)
from maskfx.pipelines.masks import laid_over, nothing_masked, pixel_mask
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.run import Call, Run, Shapes, watched
from maskfx.pipelines.shelf import Shelf
from maskfx.pipelines.standin import running

Execute = Callable[[list[Call]], None]


@dataclass(frozen=True)
class Template:
    """A recorded run: hand it to later calls, or its picture."""

    name: str
    images: Any = None

    def __repr__(self) -> str:
        return f"Template({self.name})"


@dataclass
class Works:
    """What all runs of one pipeline share."""

    call: Callable[..., Any]  # the pipeline class's own __call__
    denoisers: dict[str, CompiledDenoiser]
    shelf: Shelf
    quality: Quality
    execute: Execute
    surroundings: Surroundings = field(default_factory=Surroundings)
    shapes: Shapes = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.call).parameters


@dataclass(frozen=True)
class Options:
    """What maskfx adds to a pipeline's own arguments."""

    quality: Quality | str | None = None
    template: Template | str | None = None
    record: bool = False
    mask_image: Any = None  # where the pipeline has no such argument
    image: Any = None


def serve(pipe: Any, works: Works, args: tuple[Any, ...], options: Options, given: Any) -> Any:
    """One call of a pipeline: record, edit, or as it is."""
    arguments = arguments_of(works.call, (pipe, *args), given)
    arguments.pop("self", None)
    own = "mask_image" in works.parameters
    mask = arguments.get("mask_image") if own else options.mask_image
    if mask is None:
        if options.template is not None:
            raise InputError(
                "template= without a mask: pass mask_image=, the part of the picture to edit"
            )
        if options.record:
            return record_picture(pipe, works, arguments)
        return run(pipe, works, DenseCourse(), arguments)
    quality = works.quality if options.quality is None else Quality.of(options.quality)
    pixels = pixel_mask(mask)
    original = arguments.get("image", options.image)
    if original is None and isinstance(options.template, Template):
        original = options.template.images
    template = chosen_template(pipe, works, arguments, options, quality, own)
    steps = arguments.get("num_inference_steps", usual_steps(works))
    course = EditCourse(pixels, quality, works.shelf, template, steps, works.notes)
    result = run(pipe, works, course, arguments)
    if original is None:
        return result
    return with_images(result, lambda i: laid_over(i, original, pixels, quality.feather))


def run(pipe: Any, works: Works, course: Course, arguments: Mapping[str, Any]) -> Any:
    """The pipeline's own code, once."""
    own = Run(works.denoisers, course, works.execute, works.shapes, notes=works.notes)
    with watched(pipe, own), running(own):
        return forced_result(works.call(pipe, **arguments))


def chosen_template(
    pipe: Any,
    works: Works,
    arguments: Mapping[str, Any],
    options: Options,
    quality: Quality,
    own: bool,
) -> str | None:
    """The template that serves an edit, recorded if it has to be; None to go without."""
    if quality.reuse == "steps":
        return None
    given = options.template
    if given is not None:
        name = given.name if isinstance(given, Template) else given
        if not works.shelf.whole(name):
            raise InputError(
                f"template={name!r} isn't there (any more); record it again with "
                "maskfx.template(...) or record=True"
            )
        return name
    if options.image is not None or not own:
        kept = works.shelf.pictures.get(digest(arguments.get("image", options.image)))
        if kept is not None and works.shelf.whole(kept):
            return kept
        if "image" not in works.parameters:
            return None  # nothing to record it from: the run's own steps serve
    recorded, name = template_of(pipe, works, arguments)
    known = works.shelf.whole(name)
    works.shelf.asked[name] += 1
    if not known and quality.reuse == "auto" and works.shelf.asked[name] == 1:
        return None
    if not known:
        record(pipe, works, recorded, name)
    works.shelf.prefetch(name)
    return name


def template_of(
    pipe: Any, works: Works, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """How the template of a call is recorded, and its name."""
    modules = {name: d.module for name, d in works.denoisers.items()}
    masked = (
        any(map(takes_mask, modules.values())) or arguments.get("padding_mask_crop") is not None
    )
    recorded, name = recorded_arguments(works.call, arguments, masked)
    around = works.surroundings.digest(pipe.components, modules)
    return recorded, digest([name, around])[:32]


def takes_mask(module: nn.Module) -> bool:
    """Does a mask enter the denoiser, as channels beside the latent's own?"""
    config = getattr(module, "config", {})
    enters, leaves = config.get("in_channels"), config.get("out_channels")
    return bool(enters and leaves and enters > leaves)


def record(pipe: Any, works: Works, arguments: dict[str, Any], name: str) -> None:
    """Record a template, unless another run did so meanwhile."""
    with works.shelf.recording(name):
        if works.shelf.whole(name):
            return
        course = RecordCourse(works.shelf, name)
        latent = {"output_type": "latent"} if "output_type" in works.parameters else {}
        noise = {"generator": noise_of(name)} if "generator" in works.parameters else {}
        run(pipe, works, course, {**arguments, **latent, **noise})
        course.finish()


def record_picture(pipe: Any, works: Works, arguments: dict[str, Any]) -> Any:
    """A run whose picture is a template from now on."""
    modules = {name: d.module for name, d in works.denoisers.items()}
    kept = {n: v for n, v in arguments.items() if "callback" not in n and n != "generator"}
    noise = [g.get_state() for g in listed(arguments.get("generator"))] or [torch.seed()]
    around = works.surroundings.digest(pipe.components, modules)
    name = digest([kept, noise, around])[:32]
    course = RecordCourse(works.shelf, name)
    result = run(pipe, works, course, arguments)
    course.finish()
    images = images_of(result)
    if images is not None:
        for one in images if isinstance(images, list) else [images]:
            works.shelf.pictures[digest(one)] = name
    if not isinstance(result, tuple):
        result.template = Template(name, images)
    return result


def prepare_template(
    pipe: Any, works: Works, args: tuple[Any, ...], given: Mapping[str, Any]
) -> Template:
    """The template of such a call, recorded and pinned in memory.

    Where pictures are made from nothing the run itself is the template, prompt and noise included.
    """
    if "image" not in works.parameters:
        arguments = arguments_of(works.call, (pipe, *args), given)
        arguments.pop("self", None)
        result = record_picture(pipe, works, arguments)
        images = images_of(result)
        one = images[0] if isinstance(images, list) else images
        made = Template(works.shelf.pictures[digest(one)], images)
    else:
        own = dict(given)
        if "mask_image" in works.parameters and "mask_image" not in own:
            bound = inspect.signature(works.call).bind_partial(pipe, *args, **own).arguments
            if any(takes_mask(d.module) for d in works.denoisers.values()):
                raise InputError(
                    f"{type(pipe).__name__} feeds the mask to its denoiser, so a template is of "
                    "one mask; pass mask_image= too"
                )
            own["mask_image"] = nothing_masked(bound.get("image"))
        if "prompt" in works.parameters and not any("prompt" in n for n in own):
            own["prompt"] = ""
        arguments = arguments_of(works.call, (pipe, *args), own)
        arguments.pop("self", None)
        recorded, name = template_of(pipe, works, arguments)
        record(pipe, works, recorded, name)
        made = Template(name, arguments.get("image"))
    works.shelf.pin(made.name)
    return made


def usual_steps(works: Works) -> int:
    default = works.parameters.get("num_inference_steps")
    return default.default if default is not None and type(default.default) is int else 50


# Results.


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def images_of(result: Any) -> Any:
    if isinstance(result, tuple):
        return result[0] if result else None
    return getattr(result, "images", None)


def with_images(result: Any, change: Callable[[Any], Any]) -> Any:
    """The pipeline's result with its pictures changed."""
    images = images_of(result)
    if images is None:
        return result
    if isinstance(result, tuple):
        return (change(images), *result[1:])
    result.images = change(images)
    return result


def forced_result(result: Any) -> Any:
    """No deferred tensor leaves a run."""
    images = images_of(result)
    if isinstance(images, Tensor):
        return with_images(result, forced)
    return result
