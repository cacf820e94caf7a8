"""One trained pipeline as diffusers runs it, one edit after another, timed at its denoiser.

All sides get the same noise, prompt, picture and mask; what a side gives is laid into the
original's pixels by the same rule.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from bench.quality_edits import draw_edit
from bench.reference.edits import CALLS, Edit
from bench.reference.scenes import SIDE
from maskfx.pipelines.masks import pooled

Pixels = NDArray[np.uint8]

WARM_UP = 1_000_000  # the number of an edit that is never judged


@dataclass(frozen=True)
class Made:
    """What one side made of an edit. `whole_seconds` has encoders and the autoencoder too."""

    pixels: Pixels
    seconds: float  # inside the denoiser
    whole_seconds: float
    calls: int


@dataclass
class Clock:
    """Sums the time inside what it is put around."""

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

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.start()
            try:
                return run(*args, **kwargs)
            finally:
                self.stop()

        return timed


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

    def laid_over(self, pixels: Pixels) -> Pixels:
        """The original's own pixels outside the mask."""
        return np.where(self.edit.mask[..., None], pixels, self.edit.pixels)


class Bed:
    """`origin` is never touched, copies of it are; `pipe` is the one that diffusers runs."""

    def __init__(self, name: str, origin: Any, steps: int) -> None:
        self.name, self.origin, self.steps = name, origin, steps
        self.origin.set_progress_bar_config(disable=True)
        self.pipe = copy.deepcopy(origin)
        self.clock = Clock()
        self.timestep = 0.0  # of the call under way
        self.denoiser.register_forward_pre_hook(self._starts, with_kwargs=True)
        self.denoiser.register_forward_hook(self._ends)

    @property
    def denoiser(self) -> nn.Module:
        return denoiser_of(self.pipe)

    def case(self, index: int) -> Case:
        channels = self.origin.vae.config.latent_channels
        shape = torch.Size((1, channels, SIDE // 8, SIDE // 8))
        edit = draw_edit(index, whole=self.name == "dit")
        own, background = noise(shape, 10_000_000 + index), noise(shape, 20_000_000 + index)
        return Case(index, edit, own, background)

    def arguments(self, case: Case, **changes: Any) -> dict[str, Any]:
        """A call of the pipeline; `generator` is for what else it draws."""
        usual = {
            "prompt": case.edit.prompt,
            "image": case.image,
            "mask_image": case.mask_image,
            "num_inference_steps": self.steps,
            "generator": torch.Generator().manual_seed(case.index),
            "latents": case.latents(),
            "height": SIDE,
            "width": SIDE,
            **CALLS[self.name],
        }
        return {**usual, **changes}

    def run(self, case: Case, **changes: Any) -> Made:
        """Diffusers' own way, densely unless its denoiser was told otherwise."""
        return timed_call(self.pipe, self.clock, self.arguments(case, **changes))

    def dense(self, case: Case) -> Made:
        made = self.run(case)
        return Made(case.laid_over(made.pixels), made.seconds, made.whole_seconds, made.calls)

    def _starts(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        at = kwargs.get("timestep", args[1] if len(args) > 1 else 0.0)
        self.timestep = float(torch.as_tensor(at).flatten()[0])
        self.clock.start()

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.clock.stop()


def denoiser_of(pipe: Any) -> nn.Module:
    found: nn.Module = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return found


def noise(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def timed_call(pipe: Any, clock: Clock, arguments: dict[str, Any]) -> Made:
    clock.reset()
    start = time.perf_counter()
    image = pipe(**arguments).images[0]
    whole = time.perf_counter() - start
    return Made(np.asarray(image), clock.seconds, whole, clock.calls)
