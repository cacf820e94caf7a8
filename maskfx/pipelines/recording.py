"""Find the template that serves an edit, or record it before the edit."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Mapping
from math import inf
from typing import Any

from maskfx.errors import BudgetError, EngineError, InputError
from maskfx.pipelines.call_policy import RecordPolicy
from maskfx.pipelines.masks import is_picture, nothing_masked
from maskfx.pipelines.outputs import images_of, listed, single_pictures
from maskfx.pipelines.probe import gives_pictures, takes_picture, tells_mask
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.state import Arguments, CallOptions, PipelineState, Template, run
from maskfx.pipelines.template_key import (
    TEMPLATE,
    arguments_of,
    digest,
    noise_of,
    number_of,
    recorded_arguments,
)
from maskfx.pipelines.template_library import TemplateSource
from maskfx.runtime.reuse.step_selection import EVERY_STEP, StepSelection

log = logging.getLogger(__name__)


def chosen_template(
    pipe: Any,
    shared: PipelineState,
    arguments: Arguments,
    options: CallOptions,
    quality: Quality,
    unfit: Collection[str] = (),
) -> TemplateSource | None:
    """Return the template that serves an edit, recorded if necessary; None to run without one.

    `unfit` are templates that were tried and turned out to have another schedule.
    """
    known = None
    if options.template is not None or not shared.masks:  # else the image's origin is irrelevant
        picture = options.image if options.image is not None else arguments.get("image")
        known = shared.library.pictures.get(digest(picture)) if picture is not None else None
    if options.template is not None:
        given = options.template
        name = given.name if isinstance(given, Template) else given
        if not shared.library.whole(name):
            raise InputError(
                f"template={name!r} isn't there (any more); record it again with "
                "maskfx.template(...) or record=True"
            )
        return known if known is not None and known.name == name else TemplateSource(name)
    if quality.reuse == "steps":
        return None
    if known is not None and known.name not in unfit and shared.library.whole(known.name):
        return known
    if not takes_picture(pipe, shared, arguments):
        return None  # no image to record it from: the edit reuses earlier steps of its run
    made = recorded_template(pipe, shared, arguments, quality)
    return None if made is None or made in unfit else TemplateSource(made)


def recorded_template(
    pipe: Any, shared: PipelineState, arguments: Arguments, quality: Quality
) -> str | None:
    """Return the template of this call; with "auto" it is recorded at the second request for it."""
    waits = quality.reuse == "auto"
    recorded, name, selection = template_of(pipe, shared, arguments, quality)
    asked = shared.library.ask(name)
    if not shared.library.whole(name) and shared.library.refusal(name, asked) is None:
        if waits and asked == 1:
            return None
        try_to_record(pipe, shared, recorded, name, selection, asked)
    why = shared.library.refusal(name, asked)
    if why is not None:
        shared.notes[f"{why}; edits go by their own steps"] += 1
        return None
    shared.library.prefetch(name)
    return name


def try_to_record(
    pipe: Any,
    shared: PipelineState,
    arguments: Arguments,
    name: str,
    selection: StepSelection,
    asked: int,
) -> None:
    """Record a template; on failure, refuse it to this request and some of the following ones."""
    library = shared.library
    try:
        record(pipe, shared, arguments, name, selection, asked)
    except (EngineError, BudgetError):  # cancelled or past its deadline: the next request records
        raise
    except Exception as error:  # the call itself will raise what is wrong, if anything
        library.refuse(name, f"recording fails: {type(error).__name__}: {error!s:.200}")
        return
    if library.refusal(name, asked) is not None:  # another request tried meanwhile
        return
    if library.kept(name, shared.denoisers):
        library.refused.pop(name, None)
    else:
        library.refuse(name, "a template is larger than the tiers that hold it")


def template_of(
    pipe: Any, shared: PipelineState, arguments: Arguments, quality: Quality
) -> tuple[Arguments, str, StepSelection]:
    """Return the arguments that record a call's template, its name, and the steps that it stores.

    These are all steps, or those that the pipeline's default quality computes if they suffice.
    """
    masked = shared.masks and (
        arguments.get("padding_mask_crop") is not None
        or (not quality.any_mask and tells_mask(pipe, shared, arguments))
    )
    recorded, name = recorded_arguments(shared.call, arguments, masked, shared.usual)
    whole, own = digest([name, shared.around(pipe)])[:32], shared.quality.selection
    if not shared.thins or not own.covers(quality.selection) or shared.library.has(whole):
        return recorded, whole, EVERY_STEP
    return recorded, digest([whole, own.key()])[:32], own


def record(
    pipe: Any,
    shared: PipelineState,
    arguments: Arguments,
    name: str,
    selection: StepSelection,
    asked: float = inf,
) -> None:
    """Record a template, unless another run did so meanwhile, or failed to.

    Each of several images gets the noise that it would get alone, if the pipeline accepts one
    generator per image.
    """
    with shared.library.recording(name, shared.aside):
        if shared.library.whole(name) or shared.library.refusal(name, asked) is not None:
            return
        steps, schedule = shared.steps_of(pipe), shared.schedule_of(pipe)
        latent = {"output_type": "latent"} if "output_type" in shared.parameters else {}
        if arguments.get("padding_mask_crop") is not None:
            latent = {}  # pipelines paste the crop into the image

        def made(**noise: Any) -> None:
            policy = RecordPolicy(shared.library, name, selection, steps, schedule)
            run(pipe, shared, policy, {**arguments, **latent, **noise})
            policy.finish()

        if "generator" not in shared.parameters:
            made()
            return
        count = number_of(arguments.get("image")) * (arguments.get("num_images_per_prompt") or 1)
        if count > 1:
            try:
                made(generator=[noise_of(TEMPLATE) for _ in range(count)])
                return
            except (TypeError, ValueError, AttributeError) as error:
                log.debug("a template's samples share their noise: %s", error)
        made(generator=noise_of(TEMPLATE))


def record_picture(pipe: Any, shared: PipelineState, arguments: Arguments) -> tuple[Any, Template]:
    """Run a call and record it; return its result and the template of the image it made."""
    name = name_of_run(pipe, shared, arguments)
    library = shared.library
    with library.recording(name, shared.aside):
        policy = RecordPolicy(library, name, schedule=shared.schedule_of(pipe))
        result = run(pipe, shared, policy, arguments)
        policy.finish()
    if not library.kept(name, shared.denoisers):
        shared.notes["a picture's template isn't kept: it is larger than the tiers' room"] += 1
    images = images_of(result) if gives_pictures(shared, arguments) else None
    made = Template(name, images if is_picture(images) else None)
    library.made(name, [digest(one) for one in single_pictures(made.images)])
    if not isinstance(result, tuple):
        result.template = made
    return result, made


def name_of_run(pipe: Any, shared: PipelineState, arguments: Arguments) -> str:
    """Return a key that is equal for runs that make the same image.

    A run without a generator, or with callbacks, gets a unique key.
    """
    kept = {n: v for n, v in arguments.items() if "callback" not in n and n != "generator"}
    noise = [g.get_state() for g in listed(arguments.get("generator")) if g is not None]
    changed = any("callback" in n and v is not None for n, v in arguments.items())
    own = None if noise and not changed else uuid.uuid4().hex
    return digest([kept, noise, own, shared.around(pipe)])[:32]


def prepare_template(
    pipe: Any, shared: PipelineState, args: tuple[Any, ...], given: Mapping[str, Any]
) -> Template:
    """Record the template of a call, pin it in memory and return it.

    If the pipeline makes images from nothing, the run itself is the template, prompt and noise
    included.
    """
    own = dict(given)
    if "image" in shared.parameters and not any("prompt" in n for n in own):
        own["prompt"] = ""
    arguments = arguments_of(shared.call, (pipe, *args), own)
    arguments.pop("self", None)
    shared.follow_settings()
    if not (shared.masks or takes_picture(pipe, shared, arguments)):
        made = record_picture(pipe, shared, arguments)[1]
    else:
        if shared.masks and arguments.get("mask_image") is None:
            arguments["mask_image"] = nothing_masked(arguments.get("image"))
            if not shared.quality.any_mask and tells_mask(pipe, shared, arguments):
                raise InputError(
                    f"{type(pipe).__name__} tells its denoiser of the mask, so a template is of "
                    "one mask; pass mask_image= too, or compile with a quality of any_mask=True"
                )
        recorded, name, selection = template_of(pipe, shared, arguments, shared.quality)
        record(pipe, shared, recorded, name, selection)
        made = Template(name, arguments.get("image"))
    if not shared.library.kept(made.name, shared.denoisers):
        shared.library.forget(made.name)
        raise BudgetError(
            f"maskfx.template({type(pipe).__name__}): the template doesn't fit beside those that "
            "are pinned, nor on disk; forget some (pipe.forget), or compile with larger tiers "
            "(tiers=maskfx.runtime.cache.tiers.Tiers(host_bytes=...)) or with a budget="
        )
    shared.library.pin(made.name)
    return made
