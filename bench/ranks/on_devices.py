"""Two ranks on one device, or on two: whether steps are those of one process, and how fast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from bench import masks
from bench.shapes import Shape
from maskfx import DenseStep, EditStep, Ranks
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_group import RankGroup

BOUND = 1e-4  # relative error in fp32
HALVES = Partition(((1.0, 1.0),) * 2)


def links(device: torch.device) -> list[str]:
    """Return the backends by which two ranks can exchange here; NCCL needs two GPUs."""
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    return ["rings", "gloo", *(["nccl"] if several else [])]


def check(
    shape: Shape, build: Callable[..., Any], device: torch.device, backend: str, rounds: int
) -> dict[str, Any]:
    """Compute an edit and a dense member on two ranks, and again after one was killed.

    Args:
        shape: The denoiser.
        build: Makes its module.
        device: Its device; with NCCL the second rank has another one.
        backend: What the ranks exchange with.
        rounds: How often the steps are timed.
    """
    torch.backends.cudnn.allow_tf32 = False
    denoiser = maskfx.compile(build(shape, device, torch.float32))
    if backend == "nccl":
        ranks = Ranks(2, backend=backend)
    else:
        ranks = Ranks(devices=[device] * 2, backend=backend)
    group = RankGroup(denoiser, ranks)

    def inputs(seed: int) -> Any:
        return pytree.tree_map_only(Tensor, lambda v: v.to(device), shape.inputs(seed))

    cache = denoiser.record(**inputs(0))[1]
    size = shape.size
    mask = shape.as_mask(masks.make("strokes", size.height, size.width, 0.2, 7))
    steps = [EditStep(inputs(0), mask, cache), DenseStep(inputs(1))]
    wanted = denoiser.step(steps)

    def run(ways: str) -> tuple[float, float]:
        split = group.on(2, HALVES, ways)  # type: ignore[arg-type]
        took, worst = [], 0.0
        for _ in range(rounds):
            began = time.perf_counter()
            got = denoiser.step(steps, split)
            took.append(time.perf_counter() - began)
            for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
                worst = max(worst, float((one - other).norm() / other.norm()))
        return worst, min(took)

    try:
        found = {way: run(way) for way in ("gathered", "keys by rank", "heads")}
        processes = group.pool.ranks
        computed = processes is not None and group.computed_here == group.failures == 0
        if processes is not None:
            os.kill(processes.all[1].child.pid, signal.SIGKILL)
        found["after one was killed"] = run("gathered")
        worst = max(error for error, _ in found.values())
        return {
            "error": worst,
            "limit": BOUND,
            "correct": computed and worst < BOUND and group.computed_here == 0,
            "seconds": {name: seconds for name, (_, seconds) in found.items()},
            "exchange": group.costs.exchange,
        }
    finally:
        group.stop()
