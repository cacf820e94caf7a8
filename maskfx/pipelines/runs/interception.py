"""Intercepts the methods of a pipeline that a run observes: latents, steps, crops, progress bar.

The pipeline's code is not modified: for the time of the run its objects have wrappers of these
methods among their attributes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager

from maskfx.errors import InputError
from maskfx.ir import progress
from maskfx.pipelines.deferred import force_all
from maskfx.pipelines.parts.modular import BLOCKS, blocks_of, loops_of, observed_blocks
from maskfx.pipelines.parts.pipeline import StepOutput, nested_pipelines
from maskfx.pipelines.parts.stand_in import CURRENT
from maskfx.pipelines.runs.run import PipelineRun
from maskfx.pipelines.schedules.schedule import schedulers_of

BAR = "_progress_bar_config"  # diffusers' attribute of a pipeline
# arguments that determine which steps run
CHOSEN = ("strength", "num_inference_steps", "denoising_start")


def is_within_run(pipe: object) -> bool:
    """Return True for a pipeline that another one runs, in a run of that one."""
    run = CURRENT.get()
    if not isinstance(run, PipelineRun):
        return False
    return any(part is pipe for part in nested_pipelines(run.pipe)[1:])


@contextmanager
def watched(run: PipelineRun) -> Iterator[None]:
    """Pass the pipeline's latents, steps and crops through the run within the context."""
    places = [*watched_methods(run), *titled_bar(run)]
    before = [owner.__dict__.get(name) for owner, name, _ in places]
    for owner, name, wrapper in places:
        owner.__dict__[name] = wrapper
    try:
        yield
    finally:
        for (owner, name, _), old in reversed(list(zip(places, before, strict=True))):
            if old is None:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = old


def watched_methods(run: PipelineRun) -> Iterator[tuple[object, str, object]]:
    """Yield owner, name and wrapper of each method that the run observes, or of the blocks."""
    for pipe in nested_pipelines(run.pipe):
        blocks = blocks_of(pipe)
        if blocks is not None:
            yield pipe, BLOCKS, observed_blocks(blocks, run.prepare, own_bar(run))
        elif hasattr(pipe, "prepare_latents"):
            yield pipe, "prepare_latents", watch_latents(pipe.prepare_latents, run)
        if hasattr(pipe, "get_timesteps"):
            yield pipe, "get_timesteps", watch_timesteps(pipe.get_timesteps, type(pipe).__name__)
        processor: object = getattr(pipe, "mask_processor", None)
        if hasattr(processor, "get_crop_region"):
            yield processor, "get_crop_region", watch_crop(processor.get_crop_region, run)
    for scheduler in schedulers_of(run.pipe):
        yield scheduler, "step", WatchedStep(run, scheduler, scheduler.step)


def titled_bar(run: PipelineRun) -> Iterator[tuple[object, str, dict[str, object]]]:
    """Yield the pipelines' settings of their progress bars with the title that the handler sets.

    A bar with a title is drawn where maskfx draws its own.
    """
    own = own_bar(run)
    for pipe in nested_pipelines(run.pipe):
        if own is not None and hasattr(pipe, "progress_bar"):
            yield pipe, BAR, {**getattr(pipe, BAR, {}), **own}


def own_bar(run: PipelineRun) -> dict[str, object] | None:
    """Return settings of the progress bars for the handler's title; None without a title."""
    if run.handler.title is None:
        return None
    hide = not run.handler.title or bars_disabled(run.pipe) or not progress.shows()
    return {"desc": run.handler.title, "leave": False, "disable": hide}


def bars_disabled(pipe: object) -> bool:
    """Return True after `pipe.set_progress_bar_config(disable=True)`."""
    configs = [getattr(part, BAR, None) for part in (pipe, *loops_of(pipe))]
    return any(isinstance(config, dict) and bool(config.get("disable")) for config in configs)


def watch_latents(original: Callable[..., object], run: PipelineRun) -> Callable[..., object]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_latents(*args: object, **kwargs: object) -> object:
        named = signature.bind(*args, **kwargs).arguments
        outputs = original(*args, **kwargs)
        return run.prepare(outputs, named.get("height"), named.get("width"))

    return prepare_latents


def watch_timesteps(original: Callable[..., object], pipe: str) -> Callable[..., object]:
    """Refuse a strength that leaves no step, with which pipelines fail in their first operators."""

    @functools.wraps(original)
    def get_timesteps(*args: object, **kwargs: object) -> object:
        found = original(*args, **kwargs)
        times = found[0] if isinstance(found, tuple) else found
        if isinstance(times, Sized) and len(times) == 0:
            named = inspect.signature(original).bind(*args, **kwargs).arguments
            given = (f"{name}={named[name]}" for name in CHOSEN if named.get(name) is not None)
            raise InputError(
                f"{pipe} has no step to run with {', '.join(given) or 'these arguments'}: "
                "raise strength or num_inference_steps"
            )
        return found

    return get_timesteps


class WatchedStep:
    """A scheduler's `step` that reports to the run. A copy of the scheduler gets a copy of it."""

    def __init__(
        self, run: PipelineRun, owner: object, original: Callable[..., StepOutput]
    ) -> None:
        self.run, self.owner, self.original = run, owner, original
        functools.update_wrapper(self, original)

    def __call__(self, *args: object, **kwargs: object) -> object:
        args, kwargs = force_all((args, kwargs))
        return self.run.after_step(self.original(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, object]) -> WatchedStep:
        owner = memo.get(id(self.owner))
        if owner is None or not inspect.ismethod(self.original):
            return self
        return WatchedStep(self.run, owner, self.original.__func__.__get__(owner))


def watch_crop(original: Callable[..., Sequence[int]], run: PipelineRun) -> Callable[..., object]:
    @functools.wraps(original)
    def get_crop_region(*args: object, **kwargs: object) -> object:
        box = original(*args, **kwargs)
        left, top, right, bottom = box
        run.box = (int(left), int(top), int(right), int(bottom))
        return box

    return get_crop_region
