"""State shared by all runs of one pipeline, and one run of the pipeline's own code."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maskfx.ir.module_settings import settings_of
from maskfx.pipelines.call_policy import CallPolicy
from maskfx.pipelines.outputs import forced_result
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.run import Execute, PipelineRun, Shapes, watched
from maskfx.pipelines.schedule import Schedule, schedule_of, steps_of
from maskfx.pipelines.stand_in import running
from maskfx.pipelines.template_key import PipelineFingerprint, digest
from maskfx.pipelines.template_library import Aside, TemplateLibrary, patiently
from maskfx.runtime.denoiser import CompiledDenoiser

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Template:
    """A recorded run; pass it, or its image, to later calls."""

    name: str
    images: Any = None

    def __repr__(self) -> str:
        return f"Template({self.name})"


@dataclass
class PipelineState:
    """State shared by all runs of one pipeline."""

    call: Callable[..., Any]  # the original __call__ of the pipeline's class
    denoisers: dict[str, CompiledDenoiser]
    library: TemplateLibrary
    quality: Quality
    execute: Execute
    aside: Aside = patiently  # how a request waits for a recording by another request
    surroundings: PipelineFingerprint = field(default_factory=PipelineFingerprint)
    shapes: Shapes = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    learned: dict[tuple[str, frozenset[str]], bool] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)  # its calls' defaults (call.json)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.call).parameters

    @property
    def masks(self) -> bool:
        """Whether the pipeline itself accepts a mask."""
        return "mask_image" in self.parameters

    @property
    def keeps(self) -> bool:
        """Whether this mode records steps."""
        return all(d.settings.mode == "mask_cache" for d in self.denoisers.values())

    @property
    def thins(self) -> bool:
        """Whether templates store only some steps; with `share` or a budget they store all."""
        return (
            self.quality.selection.skips and self.library.share == 1 and self.library.budget is None
        )

    @staticmethod
    def steps_of(pipe: Any) -> Callable[[], int | None]:
        """Return a function for the number of steps of the current run; None until it is known."""
        return functools.partial(steps_of, pipe)

    @staticmethod
    def schedule_of(pipe: Any) -> Callable[[], Schedule]:
        """Return a function for the schedule of the current run."""
        return functools.partial(schedule_of, pipe)

    def follow_settings(self) -> None:
        """Discard captures of denoisers whose plain settings (adapters, switches) changed."""
        for name, denoiser in self.denoisers.items():
            now = settings_of(denoiser.module)
            if self.settings.setdefault(name, now) != now:
                self.settings[name] = now
                denoiser.forget()

    def entered(self) -> TemplateLibrary:
        """Return the library with an entry per denoiser, unless a budget needs the size first."""
        if self.library.budget is None:
            for name, denoiser in self.denoisers.items():
                self.library.of(name, denoiser)
        return self.library

    def around(self, pipe: Any) -> str:
        """Return a digest of all pipeline state that a recording depends on, weights included."""
        modules = {name: denoiser.module for name, denoiser in self.denoisers.items()}
        weights = {name: denoiser.fingerprint() for name, denoiser in self.denoisers.items()}
        return digest([self.surroundings.digest(pipe.components, modules, self.settings), weights])


@dataclass(frozen=True)
class CallOptions:
    """Call arguments that maskfx adds to a pipeline's own."""

    quality: Quality | str | None = None
    template: Template | str | None = None
    record: bool = False
    mask_image: Any = None  # for a pipeline without this argument
    image: Any = None


def run(pipe: Any, shared: PipelineState, policy: CallPolicy, arguments: Mapping[str, Any]) -> Any:
    """Run the pipeline's own code once."""
    if "_num_timesteps" in vars(pipe):
        pipe._num_timesteps = None  # left by the previous run
    own = PipelineRun(shared.denoisers, policy, shared.execute, shared.shapes, notes=shared.notes)
    with watched(pipe, own), running(own):
        return forced_result(shared.call(pipe, **arguments))
