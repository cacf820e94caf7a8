"""State shared by all calls of one pipeline, and the values that calls receive and return."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from maskfx.ir.modules.module_settings import KnownSettings, RunSettings, Switches
from maskfx.ir.values import autocast_dtypes
from maskfx.pipelines.adapters.late_lora import Loras
from maskfx.pipelines.adapters.lora_files import LoraTarget
from maskfx.pipelines.digests import digest
from maskfx.pipelines.encoder_cache import Encoders
from maskfx.pipelines.masks.masks import Pictures
from maskfx.pipelines.masks.videos import makes_video, mask_parameter
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.runs.run import Execute, Shapes
from maskfx.pipelines.templates.later import LaterRecordings
from maskfx.pipelines.templates.template_key import PipelineFingerprint
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.pipelines.waiting import Wait, wait_uninterrupted
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.registry import Adapters, default_adapters
from maskfx.runtime.reuse.patch_calls import PatchCounts

Arguments = dict[str, Any]

PATCH_BYTES = 4 << 30  # of rows that requests keep from step to step, unless compile() limits them
PATCH_REQUESTS = 4  # requests that a block of buffers has room for

# digests of the settings that captures are valid for, and the switches; pipelines may share one
CAPTURED: WeakKeyDictionary[CompiledDenoiser, tuple[str, Switches]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Template:
    """A recorded run; pass it, or its image, to later calls."""

    name: str
    images: Pictures = None

    def __repr__(self) -> str:
        return f"Template({self.name})"


@dataclass(frozen=True)
class CallOptions:
    """Call arguments that maskfx adds to a pipeline's own."""

    quality: Quality | str | None = None
    template: Template | str | None = None
    record: bool = False
    mask_image: object = None  # for a pipeline without this argument
    image: object = None
    lora: Loras = None


@dataclass
class PipelineState:
    """State shared by all calls of one pipeline."""

    call: Callable[..., object]  # the original __call__ of the pipeline's class
    denoisers: dict[str, CompiledDenoiser]
    library: TemplateLibrary
    quality: Quality
    execute: Execute
    autoencoders: Mapping[str, CompiledDenoiser] = field(default_factory=dict)  # by method
    encoders: Encoders | None = None  # those whose outputs calls keep; None in an engine
    alone: bool = False  # whether calls run without an engine
    wait: Wait = wait_uninterrupted  # how a request waits for a recording by another request
    later: LaterRecordings | None = None  # None: no engine records while it is idle
    fingerprint: PipelineFingerprint = field(default_factory=PipelineFingerprint)
    shapes: Shapes = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    probed: dict[tuple[str, frozenset[str]], bool] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)  # digests before the last run
    known: dict[str, KnownSettings] = field(default_factory=dict)
    acting: dict[str, KnownSettings] = field(default_factory=dict)  # at the first call of a run
    usual: Mapping[str, object] = field(default_factory=dict)  # its calls' defaults (call.json)
    adapters: Callable[[], Adapters] = default_adapters  # the LoRA files that calls may name
    lora_target: LoraTarget | None = None  # None until a call names a file
    pool: RollingPool = field(default_factory=lambda: RollingPool(PATCH_BYTES, PATCH_REQUESTS))
    patches: PatchCounts = field(default_factory=PatchCounts)  # of all calls that reuse patches
    # held during a call: threads take turns, because a run observes methods of its pipeline
    turn: threading.RLock = field(default_factory=threading.RLock)

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.call).parameters

    @property
    def undecoded(self) -> dict[str, object]:
        """The arguments with which a call returns latents; none if the pipeline can't."""
        return {"output_type": "latent"} if "output_type" in self.parameters else {}

    @property
    def accepts_mask(self) -> bool:
        """Whether the pipeline itself accepts a mask."""
        return self.mask_name is not None

    @property
    def mask_name(self) -> str | None:
        """The parameter by which the pipeline itself accepts a mask; None without one."""
        return mask_parameter(self.parameters)

    @property
    def makes_video(self) -> bool:
        return makes_video(self.parameters)

    @property
    def records(self) -> bool:
        """Whether this mode records steps."""
        return all(d.settings.mode == "mask_cache" for d in self.denoisers.values())

    @property
    def rolls(self) -> bool:
        """Whether requests of this mode may keep rows of their own from step to step."""
        return all(d.settings.mode != "dense" for d in self.denoisers.values())

    @property
    def codes(self) -> bool:
        """Whether templates hold recordings of the autoencoder's calls."""
        return bool(self.autoencoders)

    @property
    def records_some_steps(self) -> bool:
        """Whether templates store only the steps that edits compute; with `share` all of them."""
        return self.quality.selection.skips and self.library.share == 1

    def follow_settings(self) -> None:
        """Note the plain settings (adapters, switches) of all modules before a run.

        Keys of templates contain them. Captures of autoencoders with other settings are discarded,
        and so is what depends on weights that were overwritten.
        """
        for name, denoiser in {**self.denoisers, **self.autoencoders}.items():
            denoiser.refresh_if_overwritten()
            now, before = self._digest(self.known, name, denoiser), self.settings.get(name)
            self.settings[name] = now
            if name in self.autoencoders and before not in (None, now):
                denoiser.forget()

    def follow(self, name: str, closely: bool = False) -> RunSettings:
        """Return a denoiser's settings at the first call of a run.

        Captures of other settings are discarded, unless they read all that changed as tensors.
        Pipelines set some when they begin, such as attention processors and scales, so those before
        the run may be others. During a run they set switches alone; callbacks may set anything, so
        that all settings are compared at each call (`closely`).
        """
        denoiser = self.denoisers[name]
        now, known = self._digest(self.acting, name, denoiser), CAPTURED.get(denoiser)
        if known is None or known[0] != now:
            CAPTURED[denoiser] = now, Switches(denoiser.module)
            if known is not None:
                denoiser.follow_settings()
        return RunSettings(CAPTURED[denoiser][1], self.acting[name] if closely else None)

    def restore_settings(self) -> None:
        """Give the denoisers the objects and switches that they had before a run that failed.

        Pipelines that set some, such as attention processors, restore them at the end of a run.
        """
        for known in self.known.values():
            known.restore()

    def _digest(self, among: dict[str, KnownSettings], name: str, of: CompiledDenoiser) -> str:
        """Return the digest of a module's settings, which those of the last time may save."""
        known = among.get(name)
        if known is None or known.module is not of.module:
            known = among[name] = KnownSettings(of.module)
        return known.digest()

    def prepared_library(self) -> TemplateLibrary:
        """Return the library with an entry per denoiser, unless a budget needs the size first."""
        if self.library.budget is None:
            for name, denoiser in self.denoisers.items():
                self.library.templates_of(name, denoiser)
        return self.library

    def base(self) -> str:
        """Return the name of the base model in profiles of adapters: a digest of its weights."""
        weights = {name: denoiser.fingerprint() for name, denoiser in self.denoisers.items()}
        return digest(weights)[:32]

    def digest(self, pipe: Pipeline) -> str:
        """Return a digest of all pipeline state that a recording depends on, weights included."""
        modules = {name: denoiser.module for name, denoiser in self.denoisers.items()}
        weights = {name: denoiser.fingerprint() for name, denoiser in self.denoisers.items()}
        parts: list[object] = [self.fingerprint.digest(pipe.components, modules, self.settings)]
        return digest([*parts, weights, *autocast_dtypes()])
