"""Serve one call of a compiled pipeline: check its options, then record, edit or run it dense."""

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

CHANCES = 3  # attempts at an edit whose template loses entries during the run


def serve(
    pipe: Any, shared: PipelineState, args: tuple[Any, ...], options: CallOptions, given: Any
) -> Any:
    """Serve one call of a pipeline: record it, edit, or run it dense."""
    arguments = arguments_of(shared.call, (pipe, *args), given)
    arguments.pop("self", None)
    shared.follow_settings()
    mask = arguments.get("mask_image") if shared.masks else options.mask_image
    quality = shared.quality if options.quality is None else Quality.of(options.quality)
    check_options(options, mask is not None, shared.keeps)
    if mask is None:
        if options.record:
            return record_picture(pipe, shared, arguments)[0]
        return run(pipe, shared, DensePolicy(), arguments)
    masks = pixel_masks(mask)
    row = row_of(pipe, shared, arguments, len(masks))
    if shared.keeps:
        covered = torch.stack(masks).any(0)
        result, policy = edited(pipe, shared, arguments, options, quality, covered, row)
        row = policy.row
        if policy.template is not None and not isinstance(result, tuple):
            result.template = Template(policy.template.name)
    else:
        shared.notes["the mode keeps nothing, so edits run dense"] += 1
        result = run(pipe, shared, DensePolicy(), arguments)
    original = original_of(pipe, shared, arguments, options)
    if original is None or not gives_pictures(shared, arguments):
        return result
    return with_images(result, lambda i: laid_over(i, original, masks, quality.feather, row > 1))


def row_of(pipe: Any, shared: PipelineState, arguments: Arguments, masks: int) -> int:
    """Return how many images to edit, or masks of them, the pipeline itself receives."""
    pictures = number_of(arguments.get("image"))
    if pictures > 1 and (
        not takes_picture(pipe, shared, arguments) or mixes_pictures(pipe, shared, arguments)
    ):
        pictures = 1
    return max(pictures, masks if shared.masks else 1)


def edited(
    pipe: Any,
    shared: PipelineState,
    arguments: Arguments,
    options: CallOptions,
    quality: Quality,
    covered: Tensor,
    row: int,
) -> tuple[Any, EditPolicy]:
    """Run an edit; return its result and the policy of the run.

    If the template has lost an entry by the time it is read (a damaged file, a removed directory),
    or no longer fits, the edit restarts with the same noise after the template was recorded again.
    If the template was recorded with another schedule, it restarts with another template or none.
    """
    generators = [g for g in listed(arguments.get("generator")) if g is not None]
    states = [generator.get_state() for generator in generators]
    library, unfit = shared.library, set[str]()
    chances = CHANCES
    while True:
        source = chosen_template(pipe, shared, arguments, options, quality, unfit)
        renewable = (
            source is not None and options.template is None and not library.given(source.name)
        )
        policy = EditPolicy(covered, quality, library, source, shared.steps_of(pipe), shared.notes)
        policy.insists = renewable and chances > 1
        policy.schedule = shared.schedule_of(pipe)
        policy.given = options.template is not None
        policy.row = row
        try:
            result = run(pipe, shared, policy, arguments)
            if source is not None and not policy.in_full:
                library.renewed.pop(source.name, None)
            return result, policy
        except TemplateIncomplete as lacking:
            assert source is not None, "nothing lacks without a template"
            shared.notes[f"{lacking}; recorded again"] += 1
            library.lose(source.name)
            chances -= 1
        except ScheduleMismatch as difference:
            assert source is not None, "nothing is unfit without a template"
            if options.template is not None:
                raise InputError(
                    f"template={source.name!r} was recorded {difference}; give this call the "
                    "steps and the scheduler of the recording, or record one in these steps with "
                    "maskfx.template(...) or record=True"
                ) from None
            shared.notes[f"a template isn't used: it was recorded {difference}"] += 1
            unfit.add(source.name)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def name_of(template: Any, where: str) -> str:
    """Return the name of a template passed by the caller; `where` begins the error message."""
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
