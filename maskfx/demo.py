"""A first edit on a small UNet with random weights: how much faster, and how exact.

`python -m maskfx.demo`; needs diffusers, downloads nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import maskfx

SIDE = 32  # of the latent: a picture of 256 x 256
SHARE = 0.11
ROUNDS = 5


def main() -> None:
    """Build, record, edit, time and compare; print what came out."""
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
        dense, edit = alternate([lambda: denoiser(**inputs), lambda: compiled.edit([step])], ROUNDS)
    print(
        f"\ndense {1e3 * dense:.0f} ms, edit {1e3 * edit:.0f} ms: {dense / edit:.1f} times faster "
        f"(medians of {ROUNDS} alternating rounds)"
    )
    print(f"the edit repeats the dense result: largest error {worst:.1e} of the largest value\n")
    print(compiled.explain(SHARE))


def build() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The UNet, and what a pipeline passes at one step: unconditional and conditional."""
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
    """A slanted, curved brush stroke that covers this share of a square."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    along = (x + 0.5) / side
    middle = side * (0.35 + 0.25 * along + 0.08 * torch.sin(6 * along))
    distance = (y + 0.5 - middle).abs() + side * (along - 0.5).abs().sub(0.35).clamp(min=0) * 9
    count = round(share * side * side)
    return distance <= distance.flatten().kthvalue(count).values


def alternate(runs: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each, one after another in every round, after one round to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for index in range(rounds + 1):
        for run, seconds in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if index:
                seconds.append(time.perf_counter() - start)
    return [statistics.median(s) for s in times]


if __name__ == "__main__":
    main()
