"""Job: what one call of a compiled pipeline asks for, and the runs that answer it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.pipelines.call_policy import DensePolicy, EditPolicy
from maskfx.pipelines.masks import laid_over, pixel_masks
from maskfx.pipelines.outputs import listed, with_images
from maskfx.pipelines.probe import gives_pictures, mixes_pictures, original_of, takes_picture
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.recording import chosen_template, record_picture
from maskfx.pipelines.state import Arguments, CallOptions, PipelineState, Template, run
from maskfx.pipelines.template_key import arguments_of, number_of
from maskfx.pipelines.template_library import ScheduleMismatch, TemplateIncomplete

CHANCES = 3  # runs of an edit whose template loses something under way


def serve(
    pipe: Any, works: PipelineState, args: tuple[Any, ...], options: CallOptions, given: Any
) -> Any:
    """One call of a pipeline: record, edit, or as it is."""
    arguments = arguments_of(works.call, (pipe, *args), given)
    arguments.pop("self", None)
    works.follow_settings()
    mask = arguments.get("mask_image") if works.masks else options.mask_image
    quality = works.quality if options.quality is None else Quality.of(options.quality)
    check_options(options, mask is not None, works.keeps)
    if mask is None:
        if options.record:
            return record_picture(pipe, works, arguments)[0]
        return run(pipe, works, DensePolicy(), arguments)
    masks = pixel_masks(mask)
    row = row_of(pipe, works, arguments, len(masks))
    if works.keeps:
        covered = torch.stack(masks).any(0)
        result, course = edited(pipe, works, arguments, options, quality, covered, row)
        row = course.row
        if course.template is not None and not isinstance(result, tuple):
            result.template = Template(course.template.name)
    else:
        works.notes["the mode keeps nothing, so edits run dense"] += 1
        result = run(pipe, works, DensePolicy(), arguments)
    original = original_of(pipe, works, arguments, options)
    if original is None or not gives_pictures(works, arguments):
        return result
    return with_images(result, lambda i: laid_over(i, original, masks, quality.feather, row > 1))


def row_of(pipe: Any, works: PipelineState, arguments: Arguments, masks: int) -> int:
    """How many pictures to edit, or masks of them, the pipeline itself is given."""
    pictures = number_of(arguments.get("image"))
    if pictures > 1 and (
        not takes_picture(pipe, works, arguments) or mixes_pictures(pipe, works, arguments)
    ):
        pictures = 1
    return max(pictures, masks if works.masks else 1)


def edited(
    pipe: Any,
    works: PipelineState,
    arguments: Arguments,
    options: CallOptions,
    quality: Quality,
    covered: Tensor,
    row: int,
) -> tuple[Any, EditPolicy]:
    """An edit, and the course that it took.

    One whose template has lost something by the time that it is read (a damaged file, a directory
    removed), or no longer fits, begins again with the same noise, after the template was recorded
    again. So does one whose template was recorded in other steps: with another template, or none.
    """
    generators = [g for g in listed(arguments.get("generator")) if g is not None]
    states = [generator.get_state() for generator in generators]
    shelf, unfit = works.shelf, set[str]()
    chances = CHANCES
    while True:
        source = chosen_template(pipe, works, arguments, options, quality, unfit)
        renewable = source is not None and options.template is None and not shelf.given(source.name)
        course = EditPolicy(covered, quality, shelf, source, works.steps_of(pipe), works.notes)
        course.insists = renewable and chances > 1
        course.schedule = works.schedule_of(pipe)
        course.given = options.template is not None
        course.row = row
        try:
            result = run(pipe, works, course, arguments)
            if source is not None and not course.in_full:
                shelf.renewed.pop(source.name, None)
            return result, course
        except TemplateIncomplete as lacking:
            assert source is not None, "nothing lacks without a template"
            works.notes[f"{lacking}; recorded again"] += 1
            shelf.lose(source.name)
            chances -= 1
        except ScheduleMismatch as difference:
            assert source is not None, "nothing is unfit without a template"
            if options.template is not None:
                raise InputError(
                    f"template={source.name!r} was recorded {difference}; give this call the "
                    "steps and the scheduler of the recording, or record one in these steps with "
                    "maskfx.template(...) or record=True"
                ) from None
            works.notes[f"a template isn't used: it was recorded {difference}"] += 1
            unfit.add(source.name)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def name_of(template: Any, where: str) -> str:
    """The name of a template that a caller gave."""
    if not isinstance(template, (Template, str)):
        raise InputError(
            f"{where}{template!r:.60}: give what maskfx.template(...) returned, or a result's "
            ".template, or its name"
        )
    return template.name if isinstance(template, Template) else template


def check_options(options: CallOptions, masked: bool, keeps: bool) -> None:
    if options.template is not None:
        name_of(options.template, "template=")
    if options.image is not None and not masked:
        raise InputError(
            "image= without a mask: this pipeline makes pictures from nothing, so a picture is "
            "only of use with mask_image=, the part of it to edit; leave image= out, or give both"
        )
    if (options.template is not None or options.record) and not keeps:
        raise InputError(
            "template= or record=True: the pipeline is compiled with a mode that keeps nothing; "
            'compile(pipe, mode="mask_cache") does'
        )
    if options.template is not None and not masked:
        raise InputError(
            "template= without a mask: pass mask_image=, the part of the picture to edit"
        )
    if options.record and masked:
        raise InputError(
            "record=True with a mask: a template is recorded without one; call maskfx.template() "
            "for a picture, or leave mask_image= out"
        )
