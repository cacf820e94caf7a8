"""Whole calls of the shipped pipelines: encoders, steps, decoder and pasting, edit by edit.

    python -m bench.whole_calls --model unet --edits 100

Sides: diffusers as it is, and with its denoiser and decoder compiled by torch.compile; maskfx in
each quality, which encodes and decodes only where the picture differs from the template's, and with
Inductor; and with the picture encoded and decoded in full. Each edit runs on all sides, in changing
order; templates are recorded before, and not counted, nor is what compiles. Writes
results/whole-calls-<model>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import maskfx
from bench.harness import ROOT, figure, header, write_json
from bench.quality.edits import draw_edit
from bench.quality.metrics import psnr, ssim
from maskfx.pipelines.call_defaults import call_of

RESULTS = ROOT / "bench" / "results"
STEPS, SIDE = 25, 256
HOST_BYTES = 1 << 30  # of the templates of each
WARM = 3  # edits before the ones that are judged: Inductor compiles meanwhile
DENSE = ("dense", "dense, torch.compile")
INDUCTOR = ", Inductor"


def run(pipe: Any, edit: Any, index: int, told: dict[str, Any], **more: Any) -> Any:
    from PIL import Image

    return pipe(
        **{"num_inference_steps": STEPS, **told},
        prompt=edit.prompt,
        image=Image.fromarray(edit.pixels),
        mask_image=Image.fromarray(edit.mask),
        generator=torch.Generator().manual_seed(index),
        height=SIDE,
        width=SIDE,
        **more,
    ).images[0]


def qualities_of(names: Sequence[str]) -> dict[str, maskfx.Quality]:
    """The quality of each side of maskfx."""
    found = {name: maskfx.Quality.of(name) for name in names}
    full = {f"{name}, full VAE": replace(one, vae="full") for name, one in found.items()}
    return found | full | {name + INDUCTOR: one for name, one in found.items()}


def sides_of(model: str, sides: Sequence[str]) -> dict[str, Any]:
    """The pipeline of each side; sides that differ in their quality alone share one."""
    dense, compiled, eager, inductor = (maskfx.reference(model) for _ in range(4))
    for pipe in (dense, compiled, eager, inductor):
        pipe.set_progress_bar_config(disable=True)
    denoiser = compiled.unet if model == "unet" else compiled.transformer
    denoiser.compile(dynamic=False)
    compiled.vae.decoder.compile(dynamic=False)
    tiers = [maskfx.Tiers(host_bytes=HOST_BYTES) for _ in range(2)]
    eager = maskfx.compile(eager, tiers=tiers[0])
    inductor = maskfx.compile(inductor, tiers=tiers[1], inductor=True)
    ours = {name: inductor if name.endswith(INDUCTOR) else eager for name in sides}
    return dict(zip(DENSE, (dense, compiled), strict=True)) | ours


def measure(model: str, edits: int, names: Sequence[str]) -> dict[str, Any]:
    folder = Path(maskfx.__file__).parent / "shipped" / model
    told = call_of(folder)
    sides = qualities_of(names)
    pipes = sides_of(model, list(sides))
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    likeness: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for index in range(-WARM, edits):
        edit = draw_edit(1_000 + index)
        for name in (names[0], names[0] + INDUCTOR):  # the templates
            run(pipes[name], edit, index + 1, told, quality=sides[name])
        order = [*pipes][index % len(pipes) :] + [*pipes][: index % len(pipes)]
        made = {}
        for name in order if index % 2 else reversed(order):
            start = time.perf_counter()
            more = {} if name in DENSE else {"quality": sides[name]}
            made[name] = np.asarray(run(pipes[name], edit, index + 1, told, **more))
            if index >= 0:
                seconds[name].append(time.perf_counter() - start)
        wanted = np.where(edit.mask[..., None], made["dense"], edit.pixels)
        for name in sides if index >= 0 else ():
            likeness[name].append((psnr(wanted, made[name], edit.mask), ssim(wanted, made[name])))
    return {
        "asked": "balanced at least 5 times as fast a whole call, on both models, over 100 edits",
        "model": model,
        "edits": edits,
        "sides": {
            name: {
                "times_faster": figure(
                    [d / s for d, s in zip(seconds["dense"], seconds[name], strict=True)]
                ),
                "times_faster_than_torch_compile": figure(
                    [d / s for d, s in zip(seconds[DENSE[1]], seconds[name], strict=True)]
                ),
                "times_faster_together": sum(seconds["dense"]) / sum(seconds[name]),
                "psnr_inside": statistics.mean(p for p, _ in likeness[name]),
                "psnr_least": min(p for p, _ in likeness[name]),
                "ssim": statistics.mean(s for _, s in likeness[name]),
            }
            for name in sides
        },
        "seconds": {name: figure(values) for name, values in seconds.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="bench.whole_calls", description=__doc__)
    parser.add_argument("--model", default="unet", choices=("unet", "dit"))
    parser.add_argument("--edits", type=int, default=100)
    parser.add_argument("--qualities", nargs="+", default=["fast", "balanced"])
    options = parser.parse_args(given)
    result = header("bench.whole_calls", given) | measure(
        options.model, options.edits, options.qualities
    )
    write_json(RESULTS / f"whole-calls-{options.model}.json", result)
    for name, side in result["sides"].items():
        print(f"{name:24} " + "  ".join(f"{k} {v}" for k, v in side.items()))


if __name__ == "__main__":
    main()
