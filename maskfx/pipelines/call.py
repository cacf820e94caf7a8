"""PipelineCall: one call of a compiled pipeline, from its arguments to runs of the pipeline's code.

What a pipeline does with its mask and image is found by probes: runs that end with the first step.
The answers are cached for each set of argument names.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from maskfx.errors import EngineError
from maskfx.ir import progress
from maskfx.pipelines.adapters.late_lora import from_start, held, prefetch, resolved
from maskfx.pipelines.adapters.lora import CallAdapters, applied
from maskfx.pipelines.adapters.lora_files import LoraTarget
from maskfx.pipelines.call_checks import check_generators, check_options, check_quality
from maskfx.pipelines.callbacks import callbacks_of, may_set, without_callbacks
from maskfx.pipelines.digests import digest
from maskfx.pipelines.handlers.autoencoder import AutoencoderCalls
from maskfx.pipelines.handlers.call_handler import CallHandler, DenseHandler
from maskfx.pipelines.masks.given_masks import accepted_mask
from maskfx.pipelines.masks.masks import Pictures, in_floats, is_picture, like_mask
from maskfx.pipelines.masks.videos import VIDEO, frame_count, is_video, length_of
from maskfx.pipelines.outputs import as_list, force_images
from maskfx.pipelines.parts.alterations import alters_modules
from maskfx.pipelines.parts.modular import errors_hidden, with_state
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.parts.stand_in import put_back, running
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.runs.alone import adapters_written
from maskfx.pipelines.runs.interception import watched
from maskfx.pipelines.runs.late_results import LateResults
from maskfx.pipelines.runs.late_rows import LateRows
from maskfx.pipelines.runs.probe import (
    CallInputs,
    FirstStepHandler,
    InputRecorder,
    ProbeFinished,
    autoencoders_of,
    encodings_of,
    grows_within_batch,
    same_inputs,
)
from maskfx.pipelines.runs.run import Execute, PipelineRun
from maskfx.pipelines.state import Arguments, CallOptions, PipelineState, Template
from maskfx.pipelines.templates.template_key import (
    TemplateKey,
    bind_arguments,
    count_pictures,
    is_states_of_text,
    recording_arguments,
    seeded_noise,
)
from maskfx.runtime.reuse.step_selection import EVERY_STEP

# why a run with parallel="late" may be one that waits
WITHOUT = "steps are divided by Engine(ranks=2) or more; two neighbouring steps must be computed"


@dataclass(frozen=True)
class PipelineCall:
    """One call of a compiled pipeline."""

    pipe: Pipeline
    state: PipelineState
    arguments: Arguments  # the pipeline's own, by name
    options: CallOptions
    quality: Quality
    adapters: CallAdapters = CallAdapters()

    @classmethod
    def bind(
        cls,
        pipe: Pipeline,
        state: PipelineState,
        args: Sequence[object],
        given: Mapping[str, object],
        options: CallOptions | None = None,
    ) -> PipelineCall:
        """Bind and check the arguments of a call."""
        options = options or CallOptions()
        arguments = bind_arguments(state.call, (pipe, *args), given)
        arguments.pop(next(iter(state.parameters)), None)  # the pipeline, whatever its name there
        arguments = with_state(arguments, state.parameters)
        name = state.mask_name
        if name in arguments:
            given_mask = arguments[name]
            arguments[name] = (
                in_floats(given_mask)
                if state.makes_video
                else accepted_mask(given_mask, name, arguments)
            )
        state.follow_settings()
        quality = state.quality if options.quality is None else Quality.of(options.quality)
        adapters = CallAdapters.of(resolved(options.lora, state.adapters, state.base))
        adapters.check(pipe.components, state.denoisers)
        call = cls(pipe, state, arguments, options, quality, adapters)
        check_options(options, call.mask is not None, state.records)
        check_quality(quality, state.quality, list(state.denoisers))
        check_generators(arguments.get("generator"))
        return call

    def with_arguments(self, arguments: Arguments) -> PipelineCall:
        return replace(self, arguments=arguments)

    def over(self, pipe: Pipeline, state: PipelineState) -> PipelineCall:
        """Return the same call, without callbacks, of another copy of the pipeline."""
        found = CallAdapters.of(resolved(self.options.lora, state.adapters, state.base))
        arguments = without_callbacks(self.arguments)
        return replace(self, pipe=pipe, state=state, arguments=arguments, adapters=found)

    @contextmanager
    def with_files(self) -> Iterator[PipelineCall]:
        """Hold the files of the call's adapters within the context."""
        with held(self.adapters, self.state.adapters, self._target) as adapters:
            yield replace(self, adapters=adapters)

    def prefetch_files(self) -> None:
        """Begin to load the files of the call's adapters that aren't in memory."""
        prefetch(self.adapters, self.state.adapters, self._target)

    def _target(self) -> LoraTarget:
        """Return what LoRA files are checked against."""
        if self.state.lora_target is None:
            self.state.lora_target = LoraTarget.of(self.pipe)
        return self.state.lora_target

    def as_recorded(self) -> PipelineCall:
        """Return the call with the adapters that its template is recorded with."""
        return replace(self, adapters=self.adapters.recorded)

    # Arguments.

    @property
    def mask(self) -> Pictures:
        """The mask, passed to the pipeline or to maskfx; None without one."""
        own = self.state.mask_name
        return self.options.mask_image if own is None else self.arguments.get(own)

    @property
    def image(self) -> Pictures:
        """The pipeline's own `image`: the picture to edit, references or a control image.

        A pipeline that enlarges pictures has the one to edit in `original_image`, if it takes it.
        One that makes videos has a video, if it takes one; pictures are frames to begin with.
        """
        if self.state.makes_video:
            return self.arguments.get(VIDEO)
        original = self.arguments.get("original_image")
        return self.arguments.get("image") if original is None else original

    @property
    def returns_pictures(self) -> bool:
        """Whether the result is pixels and not latents."""
        parameter = self.state.parameters.get("output_type")
        usual = parameter.default if parameter is not None else "pil"
        return bool(self.arguments.get("output_type", usual) != "latent")

    def original(self) -> Pictures:
        """Return the image whose pixels are kept outside the mask; None if it isn't pixels.

        Of a recorded video it is the result, as the argument may be a video to go on from.
        """
        template = self.options.template
        recorded = template.images if isinstance(template, Template) else None
        found: Pictures = self.options.image
        if found is None and self.state.makes_video:
            found = recorded
        if found is None and self.accepts_image():
            found = self.image[0] if self.combines_images() else self.image
        found = recorded if found is None else found
        pixels = is_video(found) if self.state.makes_video else is_picture(found)
        return found if pixels else None

    def count_edited(self, masks: int) -> int:
        """Return how many images to edit, or masks of them, the pipeline itself receives."""
        if self.state.makes_video:  # its masks are those of frames
            return 1
        images = count_pictures(self.image)
        if images > 1 and (not self.accepts_image() or self.combines_images()):
            images = 1
        return max(images, masks if self.state.accepts_mask else 1)

    def frames_made(self, masks: int) -> int:
        """Return the number of frames of the video that the call makes; 1 if it isn't known."""
        defaults = {name: p.default for name, p in self.state.parameters.items()}
        return length_of(self.arguments, defaults, masks)

    # What the pipeline does with its arguments.

    def sends_mask(self) -> bool:
        """Return True if the denoisers' inputs depend on the mask."""

        def probe() -> bool:
            black, white = (
                self._first_inputs(**{str(self.state.mask_name): like_mask(self.mask, value)})
                for value in (0, 1)
            )
            return not same_inputs(black, white)

        return self._probed("mask", probe, unknown=True)

    def accepts_image(self) -> bool:
        """Return True if `image` is the image to edit.

        That image is encoded into latents; a control image may not be. Without an autoencoder the
        run begins with its pixels, mixed with noise by `strength`. Latents that the caller passes
        may replace those of the image, so the probe runs without them. A video that isn't as long
        as the result is one to go on from.
        """
        if self.state.accepts_mask:
            return True
        if self.image is None:
            return False
        frames = frame_count(self.image) if self.state.makes_video else 0
        if frames and frames != self.frames_made(frames):
            return False
        if not autoencoders_of(self.pipe):
            return "strength" in self.state.parameters

        def probe() -> bool:
            given = self.arguments.get("latents") is not None
            with encodings_of(self.pipe) as encodings:
                self._first_inputs(**({"latents": None} if given else {}))
            return bool(encodings)

        return self._probed("image", probe, unknown=False)

    def combines_images(self) -> bool:
        """Return True if each result is made from all images passed, the first of which is edited.

        In other pipelines each is made from one. The probe passes one more image: in those, the
        batch grows, or the call fails, or nothing grows.
        """
        images = self.image
        if not isinstance(images, (list, tuple)) or len(images) < 2 or not self.accepts_image():
            return False
        if self.state.makes_video:
            return False

        def probe() -> bool:
            try:
                few, more = (
                    self._first_inputs(image=several)
                    for several in ([*images], [*images, images[-1]])
                )
            except EngineError:
                raise
            except Exception:  # the added image has no prompt
                return False
            return grows_within_batch(few, more)

        return self._probed("pictures", probe, unknown=False)

    def _probed(self, what: str, probe: Callable[[], bool], unknown: bool) -> bool:
        """Return the cached answer for arguments of these names; `unknown` if the probe fails."""
        given = self.arguments.items()
        names = frozenset(n for n, v in given if v is not None and "callback" not in n)
        known = self.state.probed
        if (what, names) not in known:
            try:
                with progress.work("probe", f"probe of {what}="):
                    known[what, names] = probe()
            except EngineError:  # cancelled or past its deadline: no answer about the pipeline
                raise
            except Exception as error:  # the call itself will raise what is wrong, if anything
                self.state.notes[f"what becomes of {what}= isn't known: {error!s:.100}"] += 1
                return unknown
        return known[what, names]

    def _first_inputs(self, **changed: object) -> CallInputs:
        """Return the denoisers' inputs at the first step of a run with changed arguments.

        It runs without callbacks, and with separate noise.
        """
        state = self.state
        arguments = without_callbacks(self.arguments)
        if "generator" in state.parameters:
            arguments["generator"] = seeded_noise("probe")
        recorder = InputRecorder(state.denoisers, state.execute)
        run = PipelineRun(self.pipe, state.denoisers, FirstStepHandler(), recorder)
        with suppress(ProbeFinished), errors_hidden():
            self._run(run, {**arguments, **changed})
        return recorder.inputs

    # Names.

    @property
    def empty_prompt(self) -> tuple[str, frozenset[str]]:
        """The key of `state.probed` for whether an empty prompt may replace the call's."""
        given = self.arguments.items()
        states = frozenset(name for name, value in given if is_states_of_text(name, value))
        return "empty prompt", states

    def reads_text(self) -> bool:
        """Return True if the pipeline can have an empty prompt in place of the call's."""
        parts = self.pipe.components.items()
        states = self.empty_prompt[1]
        return not states or any("tokenizer" in name and part is not None for name, part in parts)

    def template_key(self, own_prompt: bool = False) -> TemplateKey:
        """Return the key of this call's template, recorded with an empty prompt or with its own.

        It stores all steps, or those that the pipeline's default quality computes if they suffice;
        the others are extrapolated.
        """
        state = self.state
        accepted = self.reads_text() and state.probed.get(self.empty_prompt, True)
        own_prompt = own_prompt or not accepted
        masked = state.accepts_mask and (
            self.arguments.get("padding_mask_crop") is not None
            or (not self.quality.any_mask and self.sends_mask())
        )
        arguments, name = recording_arguments(
            state.call, self.arguments, masked, state.usual, own_prompt, state.mask_name
        )
        adapters = self.adapters.recorded.key
        whole = digest([name, state.digest(self.pipe), *([adapters] if adapters else [])])[:32]
        own = state.quality.selection
        covered = state.records_some_steps and own.covers(self.quality.selection)
        if not covered or state.library.has(whole):
            return TemplateKey(whole, arguments, EVERY_STEP)
        return TemplateKey(digest([whole, own.key(), "extrapolated"])[:32], arguments, own)

    def run_name(self) -> str:
        """Return a name that is equal for runs that make the same image.

        A run without a generator, or with callbacks, gets a unique name.
        """
        kept = without_callbacks(self.arguments)
        kept.pop("generator", None)
        noise = [g.get_state() for g in as_list(self.arguments.get("generator")) if g is not None]
        unique = None if noise and not callbacks_of(self.arguments) else uuid.uuid4().hex
        adapters = [self.adapters.key] if self.adapters.key else []
        return digest([kept, noise, unique, self.state.digest(self.pipe), *adapters])[:32]

    # Runs.

    def run(self, handler: CallHandler, **changed: object) -> object:
        """Run the pipeline's own code once, with changed arguments."""
        state = self.state
        adapted = {name for one in self.adapters.items for name in one.adapter.parts}
        methods = {n: c for n, c in state.autoencoders.items() if n.split(".")[0] not in adapted}
        kept = None if state.encoders is None else state.encoders.cache
        coding = AutoencoderCalls(methods, handler, state.notes, kept)
        late = LateResults() if self.quality.control == "late" and not handler.records else None
        apart = self.quality.parallel == "late" and not handler.records
        rows = LateRows(self.quality.first) if apart else None
        whole = state.alone and type(handler) is DenseHandler
        run = PipelineRun(
            self.pipe,
            state.denoisers,
            handler,
            state.execute,
            state.shapes,
            coding,
            notes=state.notes,
            adapters=from_start(self.adapters, state.wait),
            wait=state.wait,
            late=late,
            rows=rows,
            follow=partial(state.follow, closely=may_set(self.arguments)),
            at_once=not (late or rows) and (whole or alters_modules(self.pipe)),
        )
        if "_num_timesteps" in vars(self.pipe):
            vars(self.pipe)["_num_timesteps"] = None  # left by the previous run
        result = self._run(run, {**self.arguments, **changed})
        if not run.hooks:
            state.notes["a run in which the pipeline called none of its compiled denoisers"] += 1
        if late is not None and not late.read:
            state.notes['control="late": no step reads the results of the step before'] += 1
        if rows is not None and not rows.reads:
            state.notes[f'parallel="late": no step reads rows of the step before ({WITHOUT})'] += 1
        return result

    def _run(self, run: PipelineRun, arguments: Arguments) -> object:
        components, denoisers = self.pipe.components, self.state.denoisers
        modules = [denoiser.module for denoiser in denoisers.values()]
        for part in {*modules, *(p for p in components.values() if isinstance(p, nn.Module))}:
            put_back(part)
        around = run.adapters.around(components, denoisers)
        ended = nullcontext() if run.late is None else run.late.finished()
        execution: AbstractContextManager[Execute] = nullcontext(run.execute)
        if run.adapters.items and self.state.alone and not may_set(arguments):
            execution = adapters_written(components, denoisers)
        try:
            with execution as run.execute, watched(run), running(run), applied(around), ended:
                return force_images(self.state.call(self.pipe, **arguments))
        except BaseException:
            self.state.restore_settings()
            raise
        finally:
            if run.rows is not None:
                run.rows.forget()
