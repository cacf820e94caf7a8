"""Demo of an edit: how much faster it is, and how close to the dense result.

`maskfx demo [NAME]`; needs diffusers, downloads nothing. With a trained pipeline in the package it
edits an image and writes a sheet to look at; otherwise it times a step of a small UNet with random
weights.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import maskfx
from maskfx.cli.demo_sheet import Panel, difference, masked, sheet
from maskfx.errors import InputError
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.masks.masks import grid_of, pooled
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.state import Template
from maskfx.runtime.hardware.cpu_threads import settle, sharing_cores
from maskfx.shipped import FOLDER, names, reference

SIDE = 32  # of the latent: an image of 256 x 256
SHARE = 0.11
ROUNDS = 5
STEPS, PICTURE_ROUNDS, SEED = 25, 3, 1
QUALITY = "balanced"
BRIGHTER = 4
OUT = Path("demo-out")
LIBRARIES = ("diffusers", "transformers")


def main(name: str | None = None, folder: Path = FOLDER, out: Path = OUT) -> None:
    """Edit an image by a trained pipeline, by default the first; else a step of a random one."""
    trained = names(folder)
    if name is not None and name not in trained:
        known = ", ".join(map(repr, trained))
        advice = f"choose one of {known}" if trained else "a checkout makes them: training.build"
        raise InputError(f"demo: no trained pipeline {name!r} in {folder}; {advice}")
    if trained:
        with quiet_libraries():
            edit_picture(name or trained[0], folder, out)
        return
    print(
        "No trained pipeline is in this package, so there is no picture to look at: numbers of a "
        "random one.\nA checkout trains and builds them with training.train and "
        "training.build.\n"
    )
    edit_step()


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Turn off notices and progress bars of diffusers and transformers, and deprecations."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        for library in LIBRARIES:
            log = import_module(f"{library}.utils.logging")
            stack.callback(log.set_verbosity, log.get_verbosity())
            if log.is_progress_bar_enabled():
                stack.callback(log.enable_progress_bar)
            log.set_verbosity_error()
            log.disable_progress_bar()
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


# An image, by a trained pipeline.


@dataclass(frozen=True)
class Example:
    """The example edit in a trained pipeline's folder."""

    image: Image.Image
    mask: Image.Image
    prompt: str

    @property
    def masked(self) -> NDArray[np.bool_]:
        return np.asarray(self.mask) >= 128

    @classmethod
    def of(cls, folder: Path) -> Example:
        def picture(name: str) -> Image.Image:
            return Image.open(folder / "example" / f"{name}.png")

        prompt = (folder / "example" / "prompt.txt").read_text(encoding="utf-8").strip()
        return cls(picture("picture").convert("RGB"), picture("mask").convert("L"), prompt)


@dataclass(frozen=True)
class DemoResult:
    """Image and times of one call of a pipeline."""

    pixels: NDArray[np.uint8]
    whole: float
    step: float  # mean seconds per step, from the end of the first step to that of the last


def edit_picture(name: str, folder: Path, out: Path) -> Path:
    """Edit the example dense and masked, compare the results, and write the sheet."""
    example = Example.of(folder / name)
    plain, pipe = (reference(name, folder=folder) for _ in range(2))
    for one in (plain, pipe):
        one.set_progress_bar_config(disable=True)
    call = {
        **call_of(folder / name),
        "prompt": example.prompt,
        "image": example.image,
        "mask_image": example.mask,
        "num_inference_steps": STEPS,
        "height": example.image.height,
        "width": example.image.width,
    }
    print(
        f"{type(pipe).__name__} {name!r}, trained on painted scenes: {example.prompt!r}, "
        f"{STEPS} steps; CPU, {torch.get_num_threads()} threads."
    )
    start = time.perf_counter()
    maskfx.compile(pipe, quality=QUALITY)
    template = maskfx.template(pipe, **call)
    print(f"compiled, and the picture recorded, in {time.perf_counter() - start:.0f} s")
    call["latents"] = same_noise(pipe, template, example)
    dense, edited, faster = compared(plain, pipe, call)
    path = out / f"{name}.png"
    out.mkdir(parents=True, exist_ok=True)
    tell(example, dense, edited, faster).save(path)
    print(f"to look at: {path}")
    return path


def same_noise(pipe: object, template: Template, example: Example) -> Tensor:
    """Return both runs' initial latents: new noise in the mask, the template's noise elsewhere."""
    kept: Tensor = pipeline_state_of(pipe).library.start(template.name)[0]
    own = torch.randn(kept.shape, generator=torch.Generator().manual_seed(SEED))
    mask = torch.from_numpy(example.masked)
    if kept.dim() == 4:
        return torch.where(pooled(mask, kept.shape[-2:]), own, kept)
    grid = grid_of(kept.shape[1], *mask.shape)
    if grid is None:
        raise InputError(
            f"demo: the latents, of shape {tuple(kept.shape)}, aren't square patches of the "
            f"example image, {mask.shape[1]}x{mask.shape[0]}; give an example of another size"
        )
    return torch.where(pooled(mask, grid).reshape(-1, 1), own, kept)


@contextlib.contextmanager
def settling(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make these modules use the cores that other programs leave, as maskfx's graphs do.

    Their parts set the number of threads when they are called, if the calling thread shares cores.
    """
    parts = {part for module in modules for part in module.modules()}
    hooks = [part.register_forward_pre_hook(lambda *_: settle()) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compared(
    plain: Pipeline, pipe: Pipeline, call: Mapping[str, object]
) -> tuple[DemoResult, DemoResult, float]:
    """Run the same edit dense and masked in turn, after a warm-up round.

    Return the results with median times, and how much faster a step of the edit is: the median of
    the rounds' ratios. Both sides use the cores that other programs leave.
    """
    runs: tuple[list[DemoResult], list[DemoResult]] = ([], [])
    modules = [part for part in plain.components.values() if isinstance(part, nn.Module)]
    with settling(modules):
        for index in range(1 + PICTURE_ROUNDS):
            for one, kept in zip((plain, pipe), runs, strict=True):
                result = timed(one, call)
                if index:
                    kept.append(result)
    dense, edited = (
        DemoResult(
            kept[0].pixels,
            statistics.median(one.whole for one in kept),
            statistics.median(one.step for one in kept),
        )
        for kept in runs
    )
    ratios = [one.step / other.step for one, other in zip(*runs, strict=True)]
    return dense, edited, statistics.median(ratios)


def timed(pipe: Pipeline, call: Mapping[str, object]) -> DemoResult:
    ends: list[float] = []

    def stepped(_: object, step: int, t: object, values: dict[str, object]) -> dict[str, object]:
        ends.append(time.perf_counter())
        return values

    generator = torch.Generator().manual_seed(SEED)  # for other noise of a pipeline
    with sharing_cores():
        start = time.perf_counter()
        made = pipe(**call, generator=generator, callback_on_step_end=stepped).images[0]
        whole = time.perf_counter() - start
    return DemoResult(np.asarray(made), whole, (ends[-1] - ends[0]) / (len(ends) - 1))


def tell(example: Example, dense: DemoResult, edited: DemoResult, faster: float) -> Image.Image:
    """Print the comparison, and draw it."""
    picture, mask = np.asarray(example.image), example.masked
    inside = similarity(edited.pixels, dense.pixels, mask)
    kept = bool((edited.pixels[~mask] == picture[~mask]).all())
    # diffusers returns unmasked pixels decoded by the autoencoder; the sheet shows the original's
    dense_pixels = np.where(mask[..., None], dense.pixels, picture)
    outside = "the picture's own pixels, all of them" if kept else "CHANGED"
    every = Quality.of(QUALITY).every
    print(
        f"\nOnly what is masked is computed, in about one step of {every}; in the others the\n"
        f"denoiser's outputs are extrapolated (quality={QUALITY!r}).\n"
        f"a step, on average: dense {1e3 * dense.step:.0f} ms, edit {1e3 * edited.step:.0f} ms: "
        f"{faster:.1f} times faster (medians of {PICTURE_ROUNDS} alternating rounds,\n"
        f"both sides on the cores that other programs leave)\n"
        f"the whole call, text and autoencoder too: {dense.whole:.2f} s, {edited.whole:.2f} s\n"
        f"likeness to the dense result: {inside:.1f} dB inside the mask (PSNR); "
        f"outside it has {outside}\n"
    )
    return sheet(
        f"“{example.prompt}”",
        [
            Panel(picture, "the picture"),
            Panel(masked(picture, mask), "what to change", (f"{mask.mean():.0%} of it is masked",)),
            Panel(
                dense_pixels,
                "dense: everything computed",
                (f"{1e3 * dense.step:.0f} ms a step", f"{dense.whole:.2f} s the whole call"),
            ),
            Panel(
                edited.pixels,
                f"maskfx: the masked part, 1 step of {every}",
                (
                    f"{1e3 * edited.step:.0f} ms a step: {faster:.1f} times faster",
                    f"{edited.whole:.2f} s the whole call",
                ),
            ),
            Panel(
                difference(edited.pixels, dense_pixels, BRIGHTER),
                f"their difference, {BRIGHTER} times brighter",
                (f"{inside:.1f} dB inside the mask", f"outside: {outside}"),
            ),
        ],
    )


def similarity(one: NDArray[np.uint8], other: NDArray[np.uint8], mask: NDArray[np.bool_]) -> float:
    """Return the peak signal-to-noise ratio of the masked pixels in dB; 100 if they are equal."""
    wrong = float(np.mean((one[mask].astype(float) - other[mask].astype(float)) ** 2))
    return 100.0 if wrong == 0 else float(10 * np.log10(255**2 / wrong))


# A step, by a UNet with random weights.


def edit_step() -> None:
    """Build, record, edit, time and compare; print the results."""
    denoiser, inputs = build()
    mask = stroke(SIDE, SHARE)
    print(
        f"A UNet shaped like Stable Diffusion 1.5's, narrower, with random weights; a latent of "
        f"{SIDE} x {SIDE},\n{int(mask.sum())} of its {mask.numel()} sites "
        f"({float(mask.float().mean()):.0%}) masked by a stroke; "
        f"CPU, {torch.get_num_threads()} threads."
    )
    start = time.perf_counter()
    compiled = maskfx.compile(denoiser, example_inputs=inputs)
    print(f"\ncompiled in {time.perf_counter() - start:.0f} s")
    with torch.no_grad():
        _, cache = compiled.record(**inputs)
        print(f"recorded one step: {cache.nbytes() / 1e6:.0f} MB kept")
        step = maskfx.EditStep(inputs, mask, cache)
        expected = denoiser(**inputs)[0]
        (edited,) = compiled.edit([step])
        worst = float((edited[0] - expected).abs().max() / expected.abs().max())
        plain = copy.deepcopy(denoiser)  # hooks of a captured module would be run by its graph
        with settling([plain]):
            runs = alternate([lambda: plain(**inputs), lambda: compiled.edit([step])], ROUNDS)
    dense, edit = map(statistics.median, runs)
    faster = statistics.median(one / other for one, other in zip(*runs, strict=True))
    print(
        f"\ndense {1e3 * dense:.0f} ms, edit {1e3 * edit:.0f} ms: {faster:.1f} times faster "
        f"(medians of {ROUNDS} alternating rounds, both sides on the cores that other programs "
        "leave)"
    )
    print(f"the edit repeats the dense result: largest error {worst:.1e} of the largest value\n")
    print(compiled.explain(SHARE))


def build() -> tuple[torch.nn.Module, dict[str, object]]:
    """Return the UNet, and its inputs at one step: unconditional and conditional."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=SIDE,
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=8,
    ).eval()
    inputs = {
        "sample": torch.randn(2, 4, SIDE, SIDE),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(2, 77, 64),
        "return_dict": False,
    }
    return unet, inputs


def stroke(side: int, share: float) -> Tensor:
    """Return a mask of a slanted, curved brush stroke that covers this share of a square."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    along = (x + 0.5) / side
    middle = side * (0.35 + 0.25 * along + 0.08 * torch.sin(6 * along))
    distance = (y + 0.5 - middle).abs() + side * (along - 0.5).abs().sub(0.35).clamp(min=0) * 9
    count = round(share * side * side)
    return distance <= distance.flatten().kthvalue(count).values


def alternate(runs: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Return the seconds of each, run in turn in every round, after one warm-up round."""
    times: list[list[float]] = [[] for _ in runs]
    for index in range(rounds + 1):
        for run, seconds in zip(runs, times, strict=True):
            with sharing_cores():
                start = time.perf_counter()
                run()
                if index:
                    seconds.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
