"""Runs one job on the engine, from its input pixels to its result image.

Owns the progress events, previews and spans of a running job. Knows nothing of other jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from PIL import Image

from maskfx.engine.engine import Engine
from maskfx.engine.ticket import Ticket, TicketState
from maskfx.pipelines.adapters.lora import Lora
from maskfx.pipelines.callbacks import reads_only
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.state import Template
from maskfx.runtime.reuse.step_selection import WHOLE
from maskfx.serve.errors import ApiError
from maskfx.serve.messages import Job, JobProgress
from maskfx.serve.models.call_signature import CALLBACK, TENSORS
from maskfx.serve.models.canvas import Canvas, resized
from maskfx.serve.models.control_images import control_argument
from maskfx.serve.models.generated_images import GeneratedPictures, edits_by_generator
from maskfx.serve.models.job_spans import JobSpans
from maskfx.serve.models.model import Made, PreviewMade, Tell
from maskfx.serve.models.pipeline_set import PipelineMember, PipelineSet
from maskfx.serve.models.warmup import WarmupFindings
from maskfx.serve.request import Pictures, RequestKind, loras_in


@dataclass(eq=False)
class JobState:
    """A job in flight."""

    job: Job
    pictures: Pictures
    began: float = field(default_factory=time.monotonic)
    ticket: Ticket | None = None
    cancelled: bool = False
    stepped: int = 0
    sketched: int = 0

    def seconds_left(self) -> float | None:
        """Return the seconds until the job's deadline; None if it has none."""
        if self.job.left is None:
            return None
        return max(0.0, self.job.left - (time.monotonic() - self.began))

    @property
    def waits(self) -> bool:
        """Whether it waits for an adapter, or for another one's recording."""
        return self.ticket is not None and self.ticket.state is TicketState.WAITING

    def submitted(self, ticket: Ticket) -> Ticket:
        self.ticket = ticket
        if self.cancelled:  # before the submission
            ticket.cancel()
        return ticket

    def cancel(self) -> None:
        self.cancelled = True
        if self.ticket is not None:
            self.ticket.cancel()


@dataclass(frozen=True, eq=False)
class JobRunner:
    """Runs jobs on one pipeline set."""

    family: PipelineSet
    engine: Engine
    warmth: WarmupFindings
    tell: Tell
    whole: str = "all-steps"  # which steps of whole pictures are computed, a name in `WHOLE`
    generated: GeneratedPictures = field(default_factory=GeneratedPictures)

    def made(self, state: JobState) -> Made:
        """Run a job and return its result; raises the error that ended it."""
        request, pictures = state.job.request, state.pictures
        if request.kind is RequestKind.GENERATE:
            return self._generated(state)
        editor = self.family.editor
        records = request.kind in (RequestKind.RECORD, RequestKind.AHEAD)
        if editor is None and (records or not edits_by_generator(self.family)):
            raise unsupported("image", "This model makes pictures from text only.")
        if len(pictures.images) != 1 and not (pictures.images and self.warmth.mixes):
            raise ApiError(
                "invalid_value", "This model edits one image; send exactly one.", param="image"
            )
        canvas = Canvas.of(pictures.images[0], pictures.mask, request.size, self.family.multiple)
        if editor is None:
            return self._edit_of_generated(state, canvas) or refuse_picture(canvas)
        if records:
            return self._recorded(state, editor, canvas)
        return self._edit_of_generated(state, canvas) or self._edited(state, editor, canvas)

    def _generated(self, state: JobState) -> Made:
        if not self.warmth.generates:
            raise unsupported(
                "prompt", "This model edits pictures and can't generate them from a prompt alone."
            )
        if state.pictures.images or state.pictures.mask is not None:
            raise unsupported("image", "A generation accepts no image; send it as an edit.")
        size = state.job.request.size or self.family.size()
        canvas = Canvas.blank(size, self.family.multiple)
        if self.family.generator is not None:
            # recordings are made in time, and compute all patches and steps
            late = "late" in (state.job.request.late_control, state.job.request.late_parallel)
            reuses = state.job.request.reuse not in (None, "off")
            skips = WHOLE[self._steps_of(state)].skips
            more = {} if late or reuses or skips else self.generated.recording(self.family)
            more = more or self._whole(state, self.family.generator)
            made = self._run(state, self.family.generator, canvas, more)
            if made.template is not None:
                arguments = self._arguments(state, self.family.generator, canvas)
                self.generated.add(made.template, self.family.generator, arguments)
            return made
        assert self.family.editor is not None, "a family has a member"
        more = {"strength": 1.0} if self.family.editor.signature.has("strength") else {}
        return self._edited(state, self.family.editor, canvas, **more)

    def _edit_of_generated(self, state: JobState, canvas: Canvas) -> Made | None:
        """Edit a generated picture by the recording of its generation; None if it can't be."""
        generator, request = self.family.generator, state.job.request
        alone = len(state.pictures.images) == 1
        set_otherwise = (request.strength, request.template) != (None, None)
        if generator is None or not alone or canvas.whole or set_otherwise:
            return None
        picture = canvas.image()
        template = self.generated.template(picture, self.family)
        if template is None:
            return None
        try:
            arguments = self._arguments(state, generator, canvas)
        except ApiError:
            if self.family.editor is None:
                raise
            return None  # a parameter that only the editor accepts
        if not self.generated.serves(template, generator, arguments):
            return None
        given: dict[str, object] = {"mask_image": canvas.mask_image()}
        if generator.signature.has("image"):  # that of a ControlNet
            given["template"] = Template(template, picture)
        else:
            given["image"] = picture
        return self._run(state, generator, canvas, given)

    def _edited(
        self, state: JobState, member: PipelineMember, canvas: Canvas, **more: object
    ) -> Made:
        """Run an edit; an edit of the whole image is a dense run."""
        given: dict[str, object] = {"image": pictured(state, canvas), **more}
        if not canvas.whole:
            given["mask_image"] = canvas.mask_image()
        elif member.signature.has("mask_image"):
            # a dense run reads no cached rows, so don't record a template for it
            usual = pipeline_state_of(member.pipe).quality.whole(self._steps_of(state))
            quality = replace(usual, reuse="steps", refresh=1)
            given |= {"mask_image": canvas.mask_image(), "quality": quality}
        else:
            given |= self._whole(state, member)
        return self._run(state, member, canvas, given)

    def _whole(self, state: JobState, member: PipelineMember) -> dict[str, object]:
        """Return the options of a whole picture: which steps and patches it may reuse."""
        name, usual = self._steps_of(state), pipeline_state_of(member.pipe).quality
        skips = WHOLE[name].skips
        return {"quality": usual.whole(name)} if skips or usual.patches is not None else {}

    def _steps_of(self, state: JobState) -> str:
        """Return which steps of a whole picture are computed."""
        asked = state.job.request.quality
        return self.whole if asked is None or asked == "auto" else asked

    def _recorded(self, state: JobState, member: PipelineMember, canvas: Canvas) -> Made:
        """Record a template with the same call arguments as its later edits."""
        job, user = state.job, state.job.request.user
        given = self._arguments(state, member, canvas) | {"image": pictured(state, canvas)}
        if job.request.kind is RequestKind.AHEAD:
            if self.generated.template(canvas.image(), self.family) is not None:
                return Made(job.id, job.attempt, None, steps=0, mask_ratio=1.0)
            ticket = self.engine.record_idle(member.pipe, user=user, **given)
        else:
            left, told = state.seconds_left(), self._spells(state)
            ticket = self.engine.record(member.pipe, deadline=left, user=user, told=told, **given)
        made = state.submitted(ticket).result()
        answer = Made(job.id, job.attempt, None, steps=ticket.steps, mask_ratio=1.0)
        return self._with_template(answer, made.name)

    def _run(
        self, state: JobState, member: PipelineMember, canvas: Canvas, given: dict[str, Any]
    ) -> Made:
        job = state.job
        arguments = self._arguments(state, member, canvas) | given
        request, usual = job.request, pipeline_state_of(member.pipe).quality
        quality = arguments.get("quality", usual)
        if request.late_control is not None:
            quality = replace(quality, control=request.late_control)
        if request.late_parallel is not None:
            quality = replace(quality, parallel=request.late_parallel)
        if request.reuse is not None:
            quality = reusing(quality, usual, request.reuse)
        if quality is not arguments.get("quality", usual):
            arguments["quality"] = quality
        if member.signature.calls_back:
            arguments[CALLBACK] = self._listener(state, canvas)
            arguments[TENSORS] = ["latents"]
        left, told = state.seconds_left(), self._spells(state)
        ticket = self.engine.submit(
            member.pipe, deadline=left, user=job.request.user, told=told, **arguments
        )
        result = state.submitted(ticket).result()
        pixels = canvas.finished(result.images[0])
        if told is not None:
            told.decoded()
        steps = state.stepped or ticket.steps
        ratio = ticket.sites / ticket.whole if ticket.whole else 1.0
        share = ticket.patches.share if ticket.patches.total else None
        answer = Made(job.id, job.attempt, pixels, steps=steps, mask_ratio=ratio, patch_share=share)
        served = getattr(result, "template", None)
        return answer if served is None else self._with_template(answer, served.name)

    def _arguments(self, state: JobState, member: PipelineMember, canvas: Canvas) -> dict[str, Any]:
        """Return the call arguments shared by all calls of this job."""
        request, controls = state.job.request, state.pictures.controls
        signature = member.signature
        signature.check(request, len(controls))
        if request.late_control == "late" and len(pipeline_state_of(member.pipe).denoisers) == 1:
            raise unsupported("control", "This model has no network beside its denoiser.")
        if request.late_parallel == "late" and self.engine.runner.ranks == 1:
            raise unsupported("parallel", "One process computes each step of this server.")
        member.ip_adapters.check(request, len(state.pictures.shown))
        found = signature.arguments(request)
        loras = self._loras(request.lora)
        loras += member.ip_adapters.loras(request, len(state.pictures.shown))
        if loras:
            found["lora"] = loras
        shown = [*map(Image.fromarray, state.pictures.shown)]
        found |= member.ip_adapters.pictures(request, shown)
        width, height = canvas.padded
        if signature.has("height") and signature.has("width"):
            found |= {"height": height, "width": width}
        if signature.has("max_area"):  # else the pipeline rescales the sides to a default area
            found["max_area"] = height * width
        if signature.has("generator"):
            found["generator"] = torch.Generator().manual_seed(request.seed)
        if controls or request.nets is not None:
            fitted = (canvas.extended(resized(control, canvas.size)) for control in controls)
            images = [*map(Image.fromarray, fitted)]
            found |= control_argument(signature, canvas, images, request.nets)
        return found

    def _loras(self, text: str | None) -> list[tuple[str, float] | Lora]:
        """Return the names and weights of a request's LoRAs, which are all registered."""
        if text is None:
            return []
        adapters, found = pipeline_state_of(self.family.main.pipe).adapters(), loras_in(text)
        for name, _ in found:
            if name not in adapters:
                raise ApiError("lora_not_found", f"There is no LoRA {name!r}.", param="lora")
        return [*found]

    def _with_template(self, made: Made, name: str) -> Made:
        return replace(made, template=name, template_bytes=dict(self.family.library.nbytes(name)))

    # Events of a running job.

    def _spells(self, state: JobState) -> JobSpans | None:
        job = state.job
        return JobSpans(job.id, job.attempt, state.began, self.tell) if job.traced else None

    def _listener(self, state: JobState, canvas: Canvas) -> Callable[..., dict[str, object]]:
        job = state.job

        @reads_only
        def stepped(
            pipe: object, index: int, time: object, tensors: dict[str, Any]
        ) -> dict[str, object]:
            total = int(getattr(pipe, "num_timesteps", None) or index + 1)
            if index == 0:
                state.sketched = 0  # the run may have been restarted
            state.stepped = index + 1
            self.tell(JobProgress(job.id, job.attempt, index + 1, total))
            if index + 1 in sketch_steps(job.request.previews, total):
                self._preview(state, canvas, tensors.get("latents"))
            return {}

        return stepped

    def _preview(self, state: JobState, canvas: Canvas, latents: Any) -> None:
        """Send a preview at the requested size, with the input's pixels outside the mask."""
        sketcher = self.warmth.sketcher
        drawn = None if sketcher is None else sketcher.draw(latents, canvas.padded)
        if drawn is not None and not state.cancelled:
            job, pixels = state.job, canvas.finished(drawn)
            self.tell(PreviewMade(job.id, job.attempt, state.sketched, pixels))
            state.sketched += 1


def pictured(state: JobState, canvas: Canvas) -> Image.Image | list[Image.Image]:
    """Return the edited image, followed by the unmodified reference images if there are any."""
    others = state.pictures.images[1:]
    return [canvas.image(), *map(Image.fromarray, others)] if others else canvas.image()


def sketch_steps(count: int, total: int) -> set[int]:
    """Return the steps after which to send `count` previews: evenly spaced, not after the last."""
    places = {round(k * total / (count + 1)) for k in range(1, count + 1)}
    return {place for place in places if 1 <= place < total}


def refuse_picture(canvas: Canvas) -> NoReturn:
    """Raise ApiError for a picture that a model without an editor can't edit."""
    if canvas.whole:
        raise ApiError(
            "missing_parameter",
            "This model edits a part of a picture that it made; send a mask of that part.",
            param="mask",
        )
    raise ApiError(
        "invalid_value",
        "This model edits pictures only that it made itself, as the PNG that it sent, with the "
        "steps, the guidance, the LoRAs and the control images that made them, and no such run is "
        "kept for this one; make the picture again, with its prompt and seed, and edit the result.",
        param="image",
    )


def unsupported(param: str, message: str) -> ApiError:
    return ApiError("unsupported_parameter", message, param=param)


def reusing(quality: Quality, usual: Quality, reuse: str) -> Quality:
    """Return a quality with a request's choice of how patches are reused.

    Args:
        quality: The quality of the call.
        usual: That of the server, with its judge and its other settings of patches.
        reuse: The request's field: "off", "judge", or a threshold.
    """
    if reuse == "off":
        return replace(quality, patches=None)
    patches = usual.patch_reuse
    if patches is None:
        raise unsupported("reuse", "This server reuses no patches; leave reuse out.")
    if reuse == "judge":
        if patches.judge is None:
            raise ApiError(
                "invalid_value",
                "This server has no trained judge; send a threshold such as 0.1, or off.",
                param="reuse",
            )
        return replace(quality, patches=patches)
    return replace(quality, patches=replace(patches, threshold=float(reuse), judge=None))
