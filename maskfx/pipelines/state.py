"""Works: what all runs of one pipeline share, and one run of the pipeline's own code."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maskfx.pipelines.call_policy import CallPolicy
from maskfx.pipelines.outputs import forced_result
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.run import Execute, PipelineRun, Shapes, watched
from maskfx.pipelines.schedule import Schedule, schedule_of, steps_of
from maskfx.pipelines.stand_in import running
from maskfx.pipelines.template_key import PipelineFingerprint, digest, settings_of
from maskfx.pipelines.template_library import Aside, TemplateLibrary, patiently
from maskfx.runtime.denoiser import CompiledDenoiser

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Template:
    """A recorded run: hand it to later calls, or its picture."""

    name: str
    images: Any = None

    def __repr__(self) -> str:
        return f"Template({self.name})"


@dataclass
class PipelineState:
    """What all runs of one pipeline share."""

    call: Callable[..., Any]  # the pipeline class's own __call__
    denoisers: dict[str, CompiledDenoiser]
    library: TemplateLibrary
    quality: Quality
    execute: Execute
    aside: Aside = patiently  # how a request waits for another's recording
    surroundings: PipelineFingerprint = field(default_factory=PipelineFingerprint)
    shapes: Shapes = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    learned: dict[tuple[str, frozenset[str]], bool] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)  # what its calls are told (call.json)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.call).parameters

    @property
    def masks(self) -> bool:
        """Does the pipeline itself take a mask?"""
        return "mask_image" in self.parameters

    @property
    def keeps(self) -> bool:
        """Are there recorded steps in this mode?"""
        return all(d.settings.mode == "mask_cache" for d in self.denoisers.values())

    @property
    def thins(self) -> bool:
        """Does a template keep some steps only? Where neighbours serve steps, all have theirs."""
        return (
            self.quality.selection.skips and self.library.share == 1 and self.library.budget is None
        )

    @staticmethod
    def steps_of(pipe: Any) -> Callable[[], int | None]:
        """How many steps the pipeline's run under way has, once it is known."""
        return functools.partial(steps_of, pipe)

    @staticmethod
    def schedule_of(pipe: Any) -> Callable[[], Schedule]:
        """The steps that the pipeline's run under way makes."""
        return functools.partial(schedule_of, pipe)

    def follow_settings(self) -> None:
        """Capture a denoiser again whose plain settings changed: adapters, switches."""
        for name, denoiser in self.denoisers.items():
            now = settings_of(denoiser.module)
            if self.settings.setdefault(name, now) != now:
                self.settings[name] = now
                denoiser.forget()

    def entered(self) -> TemplateLibrary:
        """The shelf, with a place for each denoiser where none needs a picture's size."""
        if self.library.budget is None:
            for name, denoiser in self.denoisers.items():
                self.library.of(name, denoiser)
        return self.library

    def around(self, pipe: Any) -> str:
        """All of a pipeline that a recording is a function of: other weights, other latents too."""
        modules = {name: denoiser.module for name, denoiser in self.denoisers.items()}
        weights = {name: denoiser.fingerprint() for name, denoiser in self.denoisers.items()}
        return digest([self.surroundings.digest(pipe.components, modules, self.settings), weights])


@dataclass(frozen=True)
class CallOptions:
    """What maskfx adds to a pipeline's own arguments."""

    quality: Quality | str | None = None
    template: Template | str | None = None
    record: bool = False
    mask_image: Any = None  # where the pipeline has no such argument
    image: Any = None


def run(pipe: Any, shared: PipelineState, policy: CallPolicy, arguments: Mapping[str, Any]) -> Any:
    """The pipeline's own code, once."""
    if "_num_timesteps" in vars(pipe):
        pipe._num_timesteps = None  # of the run before
    own = PipelineRun(shared.denoisers, policy, shared.execute, shared.shapes, notes=shared.notes)
    with watched(pipe, own), running(own):
        return forced_result(shared.call(pipe, **arguments))
