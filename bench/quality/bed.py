"""One trained pipeline as diffusers runs it, some edits in one call, timed at its denoiser.

All sides get the same noise, prompt, picture and mask; what a side gives is laid into the
original's pixels by the same rule.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from bench.quality.edits import draw_edit
from maskfx.pipelines.masks.masks import pooled
from training.edits import Edit
from training.scenes import SIDE

Pixels = NDArray[np.uint8]
EACH = ("prompt", "image", "mask_image", "generator", "latents")  # of a call, one per picture

WARM_UP = 1_000_000  # the number of an edit that is never judged


@dataclass(frozen=True)
class Made:
    """What one side made of an edit: its share of the seconds of those that were made together.

    `whole_seconds` has encoders and the autoencoder too.
    """

    pixels: Pixels
    seconds: float  # inside the denoiser
    whole_seconds: float
    calls: int


@dataclass
class Clock:
    """Sums the time between starts and stops."""

    seconds: float = 0.0
    calls: int = 0
    since: float = 0.0

    def start(self) -> None:
        self.since = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.since
        self.calls += 1

    def reset(self) -> None:
        self.seconds, self.calls = 0.0, 0


@dataclass(frozen=True)
class Case:
    """An edit and its noise: the edit's own inside the mask, the background's elsewhere."""

    index: int
    edit: Edit
    own: Tensor
    background: Tensor

    @cached_property
    def sites(self) -> Tensor:
        """The latent's sites that the mask touches."""
        return pooled(torch.from_numpy(self.edit.mask), self.own.shape[-2:])

    def latents(self, background: Tensor | None = None) -> Tensor:
        elsewhere = self.background if background is None else background
        return torch.where(self.sites, self.own, elsewhere)

    def other_background(self) -> Tensor:
        return noise(self.own.shape, 30_000_000 + self.index)

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(self.edit.pixels)

    @property
    def mask_image(self) -> Image.Image:
        return Image.fromarray(self.edit.mask)

    def laid(self, made: Made) -> Made:
        """With the original's own pixels outside the mask."""
        inside = self.edit.mask[..., None]
        return replace(made, pixels=np.where(inside, made.pixels, self.edit.pixels))


Change = Callable[[Case], dict[str, Any]]


class Bed:
    """`origin` is never touched, copies of it are; `pipe` is the one that diffusers runs."""

    def __init__(self, name: str, origin: Any, steps: int, told: Mapping[str, Any]) -> None:
        self.name, self.origin, self.steps, self.told = name, origin, steps, told
        self.origin.set_progress_bar_config(disable=True)
        self.pipe = copy.deepcopy(origin)
        self.clock = Clock()
        self.timestep = 0.0  # of the call under way, as the scheduler counts
        # a run of a picture that isn't judged, by which caches measure the model
        self.calibrate: Callable[[], object] = lambda: self.run([self.case(WARM_UP)])
        self.denoiser.register_forward_pre_hook(self._starts, with_kwargs=True)
        self.denoiser.register_forward_hook(self._ends)

    @property
    def denoiser(self) -> nn.Module:
        return denoiser_of(self.pipe)

    def case(self, index: int) -> Case:
        own = self.noise_of(index)
        return Case(index, draw_edit(index), own, noise(own.shape, 20_000_000 + index))

    def noise_of(self, index: int, size: int = SIDE) -> Tensor:
        """The own noise of an edit, for a picture of a number of pixels along its sides."""
        channels = self.origin.vae.config.latent_channels
        return noise(torch.Size((1, channels, size // 8, size // 8)), 10_000_000 + index)

    def arguments(self, case: Case) -> dict[str, Any]:
        """A call of the pipeline; `generator` is for what else it draws."""
        return {
            **self.told,
            "prompt": case.edit.prompt,
            "image": case.image,
            "mask_image": case.mask_image,
            "num_inference_steps": self.steps,
            "generator": torch.Generator().manual_seed(case.index),
            "latents": case.latents(),
            "height": SIDE,
            "width": SIDE,
        }

    def given(self, latents: Tensor) -> Tensor:
        """As the pipeline takes them: some want patches of sites."""
        pack = getattr(self.origin, "_pack_latents", None)
        return latents if pack is None else pack(latents, *latents.shape)

    def run(self, cases: Sequence[Case], change: Change | None = None) -> list[Made]:
        """Diffusers' own way, densely unless its denoiser was set otherwise: one call for all.

        `change` gives what is another in a case's arguments; their pictures must have one size.
        """
        calls = [self.arguments(case) | (change(case) if change else {}) for case in cases]
        together = calls[0] | {name: [call[name] for call in calls] for name in EACH}
        together["latents"] = self.given(torch.cat(together["latents"]))
        self.clock.reset()
        start = time.perf_counter()
        images = self.pipe(**together).images
        whole = (time.perf_counter() - start) / len(cases)
        seconds, calls_made = self.clock.seconds / len(cases), self.clock.calls
        return [Made(np.asarray(one), seconds, whole, calls_made) for one in images]

    def dense(self, cases: Sequence[Case]) -> list[Made]:
        return [case.laid(made) for case, made in zip(cases, self.run(cases), strict=True)]

    def _starts(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        at = kwargs.get("timestep", args[1] if len(args) > 1 else 0.0)
        scheduler = self.pipe.scheduler
        self.timestep = float(torch.as_tensor(at).flatten()[0])
        if (scheduler.timesteps - self.timestep).abs().min() > 1e-3:  # some get parts of one
            self.timestep *= scheduler.config.num_train_timesteps
        self.clock.start()

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.clock.stop()


def denoiser_of(pipe: Any) -> nn.Module:
    found: nn.Module = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return found


def noise(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
