"""Serve one call of a compiled pipeline: record it, edit, or run it dense."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from maskfx.errors import InputError, MaskError
from maskfx.ir import progress
from maskfx.pipelines.call import PipelineCall
from maskfx.pipelines.handlers.call_handler import DenseHandler, SelectedStepsHandler
from maskfx.pipelines.handlers.edit_handler import EditHandler, InterruptedHandler
from maskfx.pipelines.handlers.patch_handler import PatchHandler, PatchSessions
from maskfx.pipelines.handlers.template_reader import TemplateReader
from maskfx.pipelines.masks.masks import overlay, pixel_masks
from maskfx.pipelines.masks.unrecognized_masks import reason, unrecognized_masks
from maskfx.pipelines.masks.videos import (
    VideoMask,
    for_frames,
    frame_masks,
    latent_channels,
    overlay_video,
    spans_of,
)
from maskfx.pipelines.outputs import as_list, set_template, with_images
from maskfx.pipelines.parts.modular import asked_for
from maskfx.pipelines.recording import RecordingInterrupted, find_template, record_result
from maskfx.pipelines.schedules.schedule import steps_read_mask
from maskfx.pipelines.state import Template
from maskfx.pipelines.templates.template_library import (
    ScheduleMismatch,
    TemplateIncomplete,
    TemplateSource,
)
from maskfx.runtime.hardware.cpu_threads import sharing_cores

log = logging.getLogger(__name__)

NOTED = 0.5  # seconds of capture from which the first edit's cost names it
CHANCES = 3  # attempts at an edit whose template loses entries during the run


def serve_call(call: PipelineCall) -> object:
    """Run a call and return the pipeline's result."""
    with call.with_files() as running:
        return asked_for(run_call(running), call.arguments)


def run_call(call: PipelineCall) -> object:
    if call.mask is not None:
        return serve_edit(call)
    if call.options.record:
        return record_result(call)[0]
    note_unrecognized_masks(call)
    return run_whole(call)


def note_unrecognized_masks(call: PipelineCall) -> None:
    """Note arguments of a call without a mask that look like one; log each for the first time."""
    notes, parameters = call.state.notes, call.state.parameters
    for name in unrecognized_masks(call.arguments):
        text = reason(name, type(call.pipe).__name__, parameters)
        if text not in notes:
            log.warning("%s", text)
        notes[text] += 1


def run_whole(call: PipelineCall) -> object:
    """Run a call of the whole picture; its quality may extrapolate steps and keep patches."""
    patches = patch_sessions(call)
    if patches is None:
        quality = call.quality
        if quality.unmasked and quality.selection.skips:
            return call.run(SelectedStepsHandler(quality.whole_selection, quality.forecast))
        return call.run(DenseHandler())
    with closing(patches):
        return call.run(PatchHandler(call.quality, patches))


def patch_sessions(call: PipelineCall) -> PatchSessions | None:
    """Return what reuses the patches of a call across its steps; None if its quality doesn't."""
    settings, state = call.quality.patch_reuse, call.state
    if settings is None:
        return None
    if not state.rolls:
        state.notes["the mode keeps nothing, so no patches are reused"] += 1
        return None
    return PatchSessions(settings, state.pool, state.notes, state.patches, call.quality.refresh)


def serve_edit(call: PipelineCall) -> object:
    """Run an edit; outside the mask the result has the original's pixels.

    Where the scheduler applies the mask, white may be what it keeps: the pipeline runs as it is. So
    does one that accepts a mask itself, if nothing is masked.
    """
    if call.state.accepts_mask and steps_read_mask(call.pipe):
        call.state.notes["its scheduler applies the mask, in its own way, so edits run dense"] += 1
        return call.run(DenseHandler())
    masks = masks_of(call)
    if masks is None:
        call.state.notes["the form of its own mask isn't known, so edits run dense"] += 1
        return call.run(DenseHandler())
    if call.state.accepts_mask and call.options.template is None and not torch.stack(masks).any():
        call.state.notes["its mask masks nothing: the pipeline runs as it is"] += 1
        return call.run(DenseHandler())
    check_picture(call)
    row = call.count_edited(len(masks))
    if call.state.records:
        began = time.perf_counter()
        with progress.tally() as spent, sharing_cores():
            result, handler = run_edit(call, torch.stack(masks), row)
        report_cost(handler, spent, time.perf_counter() - began)
        row = handler.row
        if handler.template is not None:
            set_template(result, Template(handler.template.name))
    else:
        call.state.notes["the mode keeps no templates, so edits compute the whole picture"] += 1
        result = run_whole(call)
    original = call.original()
    if original is None or not call.returns_pictures:
        return result
    feather = call.quality.feather
    if call.state.makes_video:
        return with_images(result, lambda video: overlay_video(video, original, masks, feather))
    return with_images(result, lambda images: overlay(images, original, masks, feather, row > 1))


def masks_of(call: PipelineCall) -> list[Tensor] | None:
    """Return a call's masks; None for a video's own mask in a form that isn't known."""
    if not call.state.makes_video:
        return pixel_masks(call.mask)
    try:
        return pixel_masks(frame_masks(call.mask))
    except MaskError:
        if call.state.accepts_mask:
            return None
        raise


def check_picture(call: PipelineCall) -> None:
    """Refuse pictures of which none is the one that the mask is of."""
    images = call.image
    if call.state.makes_video:
        return
    nested = isinstance(images, (list, tuple)) and any(isinstance(v, (list, tuple)) for v in images)
    if nested and call.accepts_image():
        raise InputError(
            "mask_image= with rows of pictures in image= (lists in a list): the pipeline arranges "
            "them in one grid, and the mask's place in it isn't known; leave mask_image= out, or "
            "pass the picture to edit alone, if the pipeline accepts it"
        )


def report_cost(handler: EditHandler, spent: Mapping[str, float], seconds: float) -> None:
    """Report what the first edit of a picture cost beyond the edit itself."""
    capture, recording = spent.get("capture", 0.0), spent.get("recording", 0.0)
    parts = []
    if capture >= NOTED:
        parts.append(f"capture {duration(capture)}")
    if recording and handler.template is not None:
        parts.append(f"template of {handler.template.steps} steps {duration(recording)}")
    if parts:
        later = duration(seconds - sum(spent.values()))
        progress.report(
            f"first edit: {', '.join(parts)}; later edits of this picture about {later}"
        )


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def run_edit(call: PipelineCall, masks: Tensor, row: int) -> tuple[object, EditHandler]:
    """Run the pipeline once with an edit; return its result and the handler of the run.

    Of several masks the edit is that of all; those of a video belong to its frames, the last one to
    all frames after it.

    If the template has lost an entry by the time it is read (a damaged file, a removed directory),
    or no longer fits, the edit restarts with the same noise after the template was recorded again.
    If the template was recorded with another schedule, it restarts with another template or none.
    """
    state, passed = call.state, call.options.template is not None
    mask, several = masks.any(0), state.makes_video and len(masks) > 1
    everything = bool(masks.all() if several else mask.all())
    modules = (denoiser.module for denoiser in state.denoisers.values())
    channels = [n for module in modules for n in latent_channels(module)]
    length = call.frames_made(len(masks)) if state.makes_video else 1
    frames = for_frames(masks, length) if several else None
    video = VideoMask(frames, channels, length, spans_of(call.pipe))
    mismatched: set[str] = set()
    chances = CHANCES
    while True:
        try:
            # an edit of everything reads nothing of a template
            source = None if everything and not passed else find_template(call, mismatched)
        except RecordingInterrupted as interrupted:
            state.notes[str(interrupted)] += 1
            ending = InterruptedHandler(mask, call.quality, None, state.notes, row, pipe=call.pipe)
            return call.run(ending), ending
        template = None
        if source is not None:
            renewable = not passed and not state.library.made_picture(source.name) and chances > 1
            template = TemplateReader(state.library, source, renewable)
        patches = patch_sessions(call)
        handler = EditHandler(
            mask, call.quality, template, state.notes, row, passed, patches, video=video
        )
        try:
            with same_noise(call), closing(patches):
                result = call.run(handler)
        except TemplateIncomplete as lost:
            assert source is not None, "nothing is lost without a template"
            state.notes[f"{lost}; recorded again"] += 1
            state.library.lose(source.name)
            chances -= 1
        except ScheduleMismatch as difference:
            assert source is not None, "nothing differs without a template"
            if passed:
                raise schedule_error(source, difference) from None
            state.notes[f"a template isn't used: it was recorded {difference}"] += 1
            mismatched.add(source.name)
        else:
            if source is not None and not handler.in_full:
                state.library.attempts.renewed.pop(source.name, None)
            return result, handler


@contextmanager
def closing(patches: PatchSessions | None) -> Iterator[None]:
    """Give the memory of a run's patches back at its end."""
    try:
        yield
    finally:
        if patches is not None:
            patches.close()


@contextmanager
def same_noise(call: PipelineCall) -> Iterator[None]:
    """Reset the call's generators if the run ends with an error, so that a restart gets the same.

    Recording a template in between doesn't use them.
    """
    generators = [g for g in as_list(call.arguments.get("generator")) if g is not None]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except (TemplateIncomplete, ScheduleMismatch):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        raise


def schedule_error(source: TemplateSource, difference: ScheduleMismatch) -> InputError:
    return InputError(
        f"template={source.name!r} was recorded {difference}; give this call the "
        "steps and the scheduler of the recording, or record one in these steps with "
        "maskfx.template(...) or record=True"
    )
