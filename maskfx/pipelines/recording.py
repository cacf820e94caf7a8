"""Find the template that serves an edit, or record it before the edit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from math import inf

import torch

from maskfx.errors import AdapterError, BudgetError, Cancelled, EngineError, InputError
from maskfx.ir import progress
from maskfx.pipelines.adapters.late_lora import Loras
from maskfx.pipelines.call import PipelineCall
from maskfx.pipelines.call_checks import template_name
from maskfx.pipelines.digests import digest
from maskfx.pipelines.handlers.call_handler import RecordHandler
from maskfx.pipelines.masks.masks import empty_mask, is_picture
from maskfx.pipelines.masks.videos import frames_of, is_video
from maskfx.pipelines.outputs import as_list, images_of, set_template, single_pictures
from maskfx.pipelines.parts.modular import errors_hidden
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.state import CallOptions, PipelineState, Template
from maskfx.pipelines.templates.later import Record
from maskfx.pipelines.templates.template_key import (
    TEMPLATE,
    TemplateKey,
    count_pictures,
    seeded_noise,
)
from maskfx.pipelines.templates.template_library import TemplateSource
from maskfx.runtime.reuse.step_selection import EVERY_STEP

log = logging.getLogger(__name__)

# cancelled, past its deadline, or without its adapter: the next request records
STOPPED = (EngineError, BudgetError, AdapterError)


class RecordingInterrupted(Cancelled):
    """The caller interrupted the pipeline (`_interrupt`) while it recorded a template."""


def find_template(call: PipelineCall, mismatched: Collection[str] = ()) -> TemplateSource | None:
    """Return the template that serves an edit, recorded if necessary; None to run without one.

    `mismatched` are templates that were tried and turned out to have another schedule.
    """
    library = call.state.library
    if call.options.template is not None:
        return passed_template(call, template_name(call.options.template, "template="))
    if call.quality.reuse == "steps":
        return None
    known = None if call.state.accepts_mask else source_of_image(call)
    if known is not None and known.name not in mismatched and library.whole(known.name):
        return known
    if not call.accepts_image():
        return None  # no image to record it from: the edit reuses earlier steps of its run
    name = ensure_template(call)
    return None if name is None or name in mismatched else TemplateSource(name)


def prefetch_template(call: PipelineCall) -> bool:
    """Begin to read the template that serves an edit, if it is recorded; return whether it is."""
    library = call.state.library
    if library.tiers.store is None or call.mask is None:
        return False
    if call.options.template is not None:
        name = template_name(call.options.template, "template=")
    elif call.quality.reuse != "steps" and call.state.accepts_mask:
        name = call.template_key().name
    else:
        return False
    found = library.has(name)
    if found:
        call.state.prepared_library().prefetch(name, rows=True)
    return found


def passed_template(call: PipelineCall, name: str) -> TemplateSource:
    """Return the template that the caller passed, and which of its images the call edits."""
    if not call.state.library.whole(name):
        raise InputError(
            f"template={name!r}: no such template, or it was evicted; record it again with "
            "maskfx.template(...) or record=True"
        )
    known = source_of_image(call)
    return known if known is not None and known.name == name else TemplateSource(name)


def source_of_image(call: PipelineCall) -> TemplateSource | None:
    """Return the template of the run that made the call's image; None if it isn't known."""
    image = call.options.image if call.options.image is not None else call.image
    return call.state.library.pictures.get(digest(image)) if image is not None else None


def ensure_template(call: PipelineCall) -> str | None:
    """Return the template of this call, recorded if its quality asks for that now; None without."""
    library, key = call.state.library, call.template_key()
    if library.budget is not None and not library.selection.covers(key.selection):
        call.state.notes[
            "a quality that computes steps which a budget's templates don't store; these edits go "
            "by their own steps (compile with this quality to store them)"
        ] += 1
        return None
    request = library.attempts.count_request(key.name)
    if not library.whole(key.name) and library.attempts.refusal(key.name, request) is None:
        if is_for_later(call, key, request):
            return None
        key = try_to_record(call, key, request)
    why = library.attempts.refusal(key.name, request)
    if why is not None:
        call.state.notes[f"{why}; edits go by their own steps"] += 1
        return None
    library.prefetch(key.name)
    return key.name


def is_for_later(call: PipelineCall, key: TemplateKey, request: int) -> bool:
    """Return True if a missing template is left to later requests, or to idle time."""
    reuse, later = call.quality.reuse, call.state.later
    if reuse == "idle" and later is not None:
        return not later.waits(key.name, partial(record_over, call), request)
    return reuse in ("auto", "idle") and request == 1


def try_to_record(call: PipelineCall, key: TemplateKey, request: float) -> TemplateKey:
    """Record a template and return its key.

    On failure, it is refused to this request and some of the following ones.
    """
    library = call.state.library
    try:
        key = record_accepted(call, key, request)
    except STOPPED:
        raise
    except Exception as error:  # the call itself will raise what is wrong, if anything
        library.refuse(key.name, f"recording fails: {type(error).__name__}: {error!s:.200}")
        return key
    if library.attempts.refusal(key.name, request) is not None:  # another request tried meanwhile
        return key
    if library.is_stored(key.name, call.state.denoisers):
        library.attempts.succeed(key.name)
    else:
        library.refuse(key.name, "a template is larger than the tiers that hold it")
    return key


def record_accepted(call: PipelineCall, key: TemplateKey, request: float = inf) -> TemplateKey:
    """Record a template with an empty prompt, or, if that fails, with the call's; return its key.

    Some pipelines accept no empty prompt. Their templates depend on the prompt, so each prompt has
    its own. A pipeline without its text encoder accepts states alone, whose templates are recorded
    with states of zeros.
    """
    state, empty = call.state, call.empty_prompt
    try:
        record_template(call, key, request)
    except (*STOPPED, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        own = call.template_key(own_prompt=True)
        if own.name == key.name or state.probed.get(empty, False):
            raise
        record_template(call, own, request)
        state.probed[empty] = False
        told = "text states are recorded as zeros" if empty[1] else "each prompt has a template"
        state.notes[f"{told}: an empty prompt fails: {error!s:.100}"] += 1
        return own
    state.probed.setdefault(empty, True)
    return key


def record_template(call: PipelineCall, key: TemplateKey, request: float = inf) -> None:
    """Record a template, unless another run did so meanwhile, or failed to.

    Each of several images gets the noise that it would get alone, if the pipeline accepts one
    generator per image.
    """
    state, library = call.state, call.state.library
    if state.later is not None:
        state.later.begin(key.name)
    with library.recording(key.name, state.wait):
        if library.whole(key.name) or library.attempts.refusal(key.name, request) is not None:
            return
        if "generator" not in state.parameters:
            run_recording(call, key)
            return
        repeats = key.arguments.get("num_images_per_prompt") or 1
        count = count_pictures(key.arguments.get("image")) * repeats
        if count > 1:
            try:
                run_recording(call, key, generator=[seeded_noise(TEMPLATE) for _ in range(count)])
                return
            except (TypeError, ValueError, AttributeError) as error:
                log.debug("all samples of a template get the same noise: %s", error)
        run_recording(call, key, generator=seeded_noise(TEMPLATE))


def run_recording(call: PipelineCall, key: TemplateKey, **noise: object) -> None:
    """Run the pipeline once with the arguments of the template, and record the run."""
    state = call.state
    crops = key.arguments.get("padding_mask_crop") is not None
    latent = ("latent output", frozenset[str]())
    known = "output_type" in state.parameters and state.probed.get(latent, True)
    if not known or crops or state.codes:  # pipelines paste a crop into the image
        run_whole_recording(call, key, **noise)
        return
    generators = [(g, g.get_state()) for g in as_list(noise.get("generator"))]
    try:
        run_whole_recording(call, key, output_type="latent", **noise)
    except ValueError as error:
        if "output" not in str(error):
            raise
        for generator, before in generators:
            generator.set_state(before)
        run_whole_recording(call, key, **noise)
        state.probed[latent] = False  # only output types of pixels are accepted


def run_whole_recording(call: PipelineCall, key: TemplateKey, **changed: object) -> None:
    """Run the pipeline once with the arguments of the template and others; record the run.

    The outputs of steps that the template doesn't store are extrapolated.
    """
    state = call.state
    title = "recording of the template"
    library, recorded = state.library, key.selection
    handler = RecordHandler(library, key.name, recorded, title, state.codes, skips=recorded.skips)
    with progress.work("recording", title), errors_hidden():
        call.as_recorded().with_arguments(key.arguments).run(handler, **changed)
        if vars(call.pipe).get("_interrupt"):  # the steps after that are missing
            raise RecordingInterrupted(
                f"{type(call.pipe).__name__}: the recording of a template was interrupted "
                "(_interrupt is True), and nothing of it is kept; call again to record it"
            )
        handler.finish()


def record_result(call: PipelineCall) -> tuple[object, Template]:
    """Run a call and record it; return its result and the template of the image it made.

    A call that names a quality records the steps that edits in it compute; others record all.
    """
    state, name = call.state, call.run_name()
    library = state.library
    if call.quality.control == "late":
        state.notes['control="late" with record=True: the recorded run is made with "sync"'] += 1
    if call.quality.parallel == "late":
        state.notes['parallel="late" with record=True: the recorded run is made with "sync"'] += 1
    if library.budget is not None:
        recorded = library.selection
    else:
        named = call.options.quality is not None and library.share == 1
        recorded = call.quality.selection if named else EVERY_STEP
    with library.recording(name, state.wait):
        handler = RecordHandler(library, name, recorded, codes=state.codes)
        result = call.run(handler)
        handler.finish()
    if not library.is_stored(name, state.denoisers):
        state.notes["a picture's template isn't kept: it is larger than the tiers' room"] += 1
    images = images_of(result) if call.returns_pictures else None
    pixels = is_video(images) if state.makes_video else is_picture(images)
    template = Template(name, images if pixels else None)
    library.add_pictures(name, [digest(one) for one in single_pictures(template.images)])
    set_template(result, template)
    return result, template


def prepare_template(call: PipelineCall) -> Template:
    """Record the template of a call, pin it in memory and return it.

    If the pipeline makes images from nothing, the run itself is the template, prompt and noise
    included.
    """
    state, pipeline = call.state, type(call.pipe).__name__
    if not call.accepts_image():
        template = record_result(call)[1]
    else:
        call = with_blank_mask(call)
        key = record_accepted(call, call.template_key())
        template = Template(key.name, call.image)
    if not state.library.is_stored(template.name, state.denoisers):
        state.library.forget(template.name)
        raise BudgetError(
            f"maskfx.template({pipeline}): the template doesn't fit beside those that "
            "are pinned, nor on disk; forget some (pipe.forget), or compile with larger tiers "
            "(tiers=maskfx.Tiers(host_bytes=...)) or with a budget="
        )
    state.library.pin(template.name)
    return template


def with_blank_mask(call: PipelineCall) -> PipelineCall:
    """Return a call without a mask with one that masks nothing, if its pipeline accepts masks."""
    state = call.state
    if state.mask_name is None or call.mask is not None:
        return call
    mask = empty_mask(call.image)
    blank = [mask] * len(frames_of(call.image)) if state.makes_video else mask
    call = call.with_arguments({**call.arguments, state.mask_name: blank})
    if not call.quality.any_mask and call.sends_mask():
        raise InputError(
            f"maskfx.template({type(call.pipe).__name__}): the denoiser's inputs depend on the "
            "mask, so a template serves one mask; pass mask_image= too, or compile with a quality "
            "of any_mask=True"
        )
    return call


def with_prompt(state: PipelineState, given: Mapping[str, object]) -> dict[str, object]:
    """Return arguments of a recording with an empty prompt, if the pipeline wants one."""
    wanted = {"image", "prompt"} <= set(state.parameters)
    prompted = any("prompt" in name for name in given)
    return {**given} if prompted or not wanted else {**given, "prompt": ""}


def record_over(call: PipelineCall, pipe: Pipeline, state: PipelineState) -> Template:
    """Record the template of a call, which may have ended, over another copy of its pipeline."""
    return record_for_later(call.over(pipe, state))


def recording_of(args: tuple[object, ...], given: Mapping[str, object], lora: Loras) -> Record:
    """Return what records the template of a call with these arguments."""

    def record(pipe: Pipeline, state: PipelineState) -> Template:
        arguments, options = with_prompt(state, given), CallOptions(lora=lora)
        return record_for_later(PipelineCall.bind(pipe, state, args, arguments, options))

    return record


def record_for_later(call: PipelineCall) -> Template:
    """Record the template of a call that no request waits for, and return it; it isn't pinned.

    It evicts no template that is in use: without room for it, BudgetError is raised.
    """
    library, pipeline = call.state.library, type(call.pipe).__name__
    with call.with_files() as held, progress.hidden():
        if not held.accepts_image():
            raise InputError(f"{pipeline}: nothing is recorded ahead without a picture to edit")
        held = with_blank_mask(held)
        key = held.template_key()
        with library.tiers.sparing(key.name):
            key = try_to_record(held, key, inf)
        why = library.attempts.refusal(key.name, 0)
        if why is not None:
            raise BudgetError(f"{pipeline}: the template isn't recorded: {why}")
        return Template(key.name, call.image)
