"""A ControlNet in a process of its own on the denoiser's GPU against both in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from bench import harness
from bench.adapters.workflow import SCALES, build_workflow, call_of

STEPS = 10
EXACT = 1e-3  # of fp32 latents after all steps


def nets(device: torch.device, rounds: int, small: bool) -> dict[str, Any]:
    """Latents of an edit by both ways, whose relative difference is `error`, and their seconds."""
    scale = SCALES["tiny" if small else "half"]
    plain = build_workflow(1, scale).to(device)
    pipe = maskfx.compile(plain, quality="all-steps")
    chosen = maskfx.OwnProcesses(("controlnet",), devices=(str(device),))
    found: dict[str, Tensor] = {}

    def edit(name: str, engine: maskfx.Engine, _: int) -> None:
        given = pytree.tree_map_only(
            Tensor, lambda value: value.to(device), call_of(plain, scale, 1, STEPS)
        )
        latents = engine.submit(pipe, **given, output_type="latent").result().images
        found[name] = latents.cpu()

    with maskfx.Engine() as one, maskfx.Engine(own_process=chosen) as two:
        sides = {"in_line": partial(edit, "in_line", one), "process": partial(edit, "process", two)}
        for run in sides.values():
            run(0)  # records, captures, and starts the process
        seconds = harness.alternate(sides, rounds)
        counts = two.services.counts()
    wanted = found["in_line"]
    error = float((found["process"] - wanted).norm() / wanted.norm())
    return {
        "error": error,
        "correct": error < EXACT and counts.processes == 1 and not counts.computed_here,
        "seconds": {name: harness.figure(own) for name, own in seconds.items()},
        "in_line_over_process": harness.ratio(seconds["in_line"], seconds["process"]),
    }
