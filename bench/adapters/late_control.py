"""ControlNets behind a slow link: results in time against results of the step before.

    OMP_NUM_THREADS=1 python -m bench.adapters.late_control

A ControlNet runs in a process of its own (`Engine(own_process=["controlnet"])`), and its results
cross a link of a given speed: after each of its steps the link takes as long as it would for the
bytes that were sent to the process and came back. The sides are `sync` and `late`,
`Quality(control=)`; both run at each speed, in one run, in a changing order, with one thread per
process.

- `none`: no link.
- `10 Gb/s`, `1 Gb/s`: links of these speeds. A CPU step of a small model takes longer, and sends
  less, than a step of SDXL on a GPU, so these links are fast here.
- `as 10 Gb/s for SDXL`: the link takes 1.55 times as long as a step of the UNet. That is what
  108 MiB at 10 Gb/s are to one of the 50 steps of SDXL in 2.9 s (the figures of the Katz paper).

Asked for: 1.2 times faster at SSIM 0.95 or more on the slow link, and within 5 % of no link. With
`--scale shipped` the model is the trained UNet of the package with its ControlNet, and SSIM is the
mean over `--pictures` edits. The other scales have random weights, whose likeness means little:
such ControlNets change little from step to step, or their results matter little. Beside SSIM stand
the relative difference of the latents, that to a run without the ControlNet, and the cosine of the
network's results of neighbouring steps. With `--every`, the denoiser and the networks are computed
at every n-th step, and `late` reads the results of the computed step before. Katz's equations and
Gustafson's bound stand beside the result (bench/adapters/latency_model.py). Writes
adapters-late-control-SCALE.json to bench/results, with `--masked` and `--every` named so too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from bench import harness
from bench.adapters.latency_model import line
from bench.adapters.latency_model import measured as parts_of
from bench.adapters.workflow import SCALES, build_workflow, call_of, nets_of, save_nets
from bench.quality.edits import draw_edit
from bench.quality.metrics import ssim
from bench.report import columns, times
from maskfx.engine.processes.step_process import StepProcess
from maskfx.pipelines.call_defaults import call_of as told_by
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.shipped import FOLDER
from training.adapters import edges_of

SPEEDS = {"none": None, "10 Gb/s": 1.25e9, "1 Gb/s": 1.25e8}
RATIO = "as 10 Gb/s for SDXL"
SHARE = 1.55  # of a UNet step: 108 MiB at 10 Gb/s against 2.9 s / 50
ASKED = {"times_faster": 1.2, "ssim": 0.95, "times_slower_than_no_link": 1.05}
QUALITY = maskfx.Quality.of("all-steps")
SHIPPED = "shipped"  # the scale of the trained model


@dataclass
class Link:
    """A link between the engine and its processes, which carries one message at a time.

    Args:
        bandwidth: bytes per second; None: no link.
    """

    bandwidth: float | None = None
    carried: int = 0  # bytes
    messages: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def carry(self, nbytes: int) -> None:
        """Wait as long as a message takes."""
        with self._lock:
            self.carried += nbytes
            self.messages += 1
            if self.bandwidth is not None:
                time.sleep(nbytes / self.bandwidth)


@contextmanager
def linked(link: Link) -> Iterator[None]:
    """Let the steps of all processes cross the link within the context."""
    run = StepProcess.run

    def slow(self: StepProcess, denoiser: Any, *rest: Any) -> Any:
        before = self.traffic
        result = run(self, denoiser, *rest)
        for earlier, now in zip(before, self.traffic, strict=True):  # sent and received
            link.carry(now - earlier)
        return result

    with mock.patch.object(StepProcess, "run", slow):
        yield


def shipped_call(number: int, steps: int) -> dict[str, Any]:
    """The arguments of a held-out edit with the edges of the scene that it asks for."""
    edit = draw_edit(number)
    return {
        **told_by(FOLDER / "unet"),
        "prompt": edit.prompt,
        "image": Image.fromarray(edit.pixels),
        "mask_image": Image.fromarray(edit.mask),
        "control_image": Image.fromarray(edges_of(edit.wanted)),
        "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(number),
        "height": 256,
        "width": 256,
    }


class Bed:
    """A pipeline with ControlNets, its calls, and an engine with a process per network."""

    def __init__(self, asked: argparse.Namespace, engine: maskfx.Engine, link: Link) -> None:
        self.asked, self.engine, self.link = asked, engine, link
        self.picture = 0  # of several
        trained = asked.scale == SHIPPED
        origin = build_workflow(1 if trained else asked.nets, SCALES[asked.scale])
        self.pipe: Any = None
        call = partial(self.call, "sync", origin=origin)
        with tempfile.TemporaryDirectory() as folder:
            nets = save_nets(Path(folder), nets_of(origin))
            self.model = parts_of(origin, call, nets, []).report()
        self.pipe = maskfx.compile(origin, quality="all-steps")

    def call(self, control: str, origin: Any = None, **more: Any) -> dict[str, Any]:
        """Return the arguments of our pipeline, or of diffusers' `origin`."""
        asked = self.asked
        quality = replace(QUALITY, control=control, every=asked.every)
        if not asked.masked:
            quality = replace(quality, reuse="steps", refresh=1)
        if asked.scale == SHIPPED:
            given = shipped_call(self.picture, asked.steps)
        else:
            pipe = origin or self.pipe
            given = call_of(pipe, SCALES[asked.scale], 1, asked.steps, asked.masked)
        return given if origin is not None else {**given, "quality": quality, **more}

    def run(self, control: str, speed: float | None = None, **more: Any) -> Any:
        self.link.bandwidth = speed
        result = self.engine.submit(self.pipe, **self.call(control, **more)).result().images
        return result if isinstance(result, Tensor) else np.asarray(result[0])

    def step_seconds(self) -> dict[str, float]:
        """Seconds of a step by denoiser, one after the other in this process."""
        state = pipeline_state_of(self.pipe)
        found: dict[str, list[float]] = {name: [] for name in state.denoisers}

        def timed(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                began = time.perf_counter()
                result = step(*given)
                found[name].append(time.perf_counter() - began)
                return result

            return run

        for name, denoiser in state.denoisers.items():
            for method in ("step", "plain_step"):
                denoiser.__dict__[method] = timed(name, getattr(denoiser, method))
        self.pipe(**self.call("sync"))
        for denoiser in state.denoisers.values():
            del denoiser.__dict__["step"], denoiser.__dict__["plain_step"]
        return {name: harness.figure(own)["median"] for name, own in found.items()}


def likeness(bed: Bed) -> dict[str, float]:
    """How alike the pictures of both sides are, and how much the networks matter at all."""
    alike = []
    for number in range(bed.asked.pictures):
        bed.picture = number
        alike.append(ssim(bed.run("sync"), bed.run("late")))
    bed.picture = 0
    latents = [bed.run(side, output_type="latent") for side in ("sync", "late")]
    scale: Any = [0.0] * bed.asked.nets if bed.asked.nets > 1 else 0.0
    without = bed.run("sync", output_type="latent", controlnet_conditioning_scale=scale)
    return {
        "ssim": float(np.mean(alike)),
        "least_ssim": min(alike),
        "relative_difference": float((latents[0] - latents[1]).norm() / latents[0].norm()),
        "without_networks": float((latents[0] - without).norm() / latents[0].norm()),
        "cosine_of_neighbours": neighbours(bed),
    }


def neighbours(bed: Bed) -> float:
    """The least cosine of a network's results at two neighbouring steps."""
    results: list[Tensor] = []
    name = next(name for name in pipeline_state_of(bed.pipe).denoisers if "control" in name)
    denoiser = pipeline_state_of(bed.pipe).denoisers[name]
    for method in ("step", "plain_step"):
        original = getattr(denoiser, method)

        def kept(*given: Any, original: Callable[..., Any] = original) -> Any:
            result = original(*given)
            leaves = [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]
            results.append(torch.cat([leaf.flatten() for leaf in leaves]))
            return result

        denoiser.__dict__[method] = kept
    bed.pipe(**bed.call("sync"))
    del denoiser.__dict__["step"], denoiser.__dict__["plain_step"]
    pairs = zip(results, results[1:], strict=False)
    return min(float(torch.cosine_similarity(a, b, 0)) for a, b in pairs)


def measure(bed: Bed) -> dict[str, Any]:
    for side in ("sync", "late"):  # records the template and starts the process
        bed.run(side)
    spent = bed.step_seconds()
    bed.link.carried = 0
    bed.run("sync")
    per_step = bed.link.carried / bed.asked.steps
    main = max(spent[name] for name in spent if "control" not in name)
    speeds = {**SPEEDS, RATIO: per_step / (SHARE * main)}
    speeds = {name: speeds[name] for name in bed.asked.links or speeds}
    sides = {
        (link, side): (lambda _, side=side, speed=speed: bed.run(side, speed))
        for link, speed in speeds.items()
        for side in ("sync", "late")
    }
    named = {f"{link}, {side}": run for (link, side), run in sides.items()}
    seconds = harness.alternate(named, bed.asked.rounds)
    rows = []
    for link, speed in speeds.items():
        sync, late = (seconds[f"{link}, {side}"] for side in ("sync", "late"))
        row = {
            "link": link,
            "bytes_per_second": speed,
            "link_seconds_per_step": 0.0 if speed is None else per_step / speed,
            "sync_seconds": harness.figure(sync),
            "late_seconds": harness.figure(late),
            "times_faster": harness.ratio(sync, late),
        }
        if "none, late" in seconds:
            row["late_over_no_link"] = harness.ratio(late, seconds["none, late"])
        rows.append(row)
    return {
        "asked": ASKED,
        **bed.model,
        "seconds_of_a_step": spent,
        "bytes_per_step": per_step,
        "links": rows,
        "likeness": likeness(bed),
    }


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--pictures", type=int, default=1, help="for likeness, where trained")
    parser.add_argument("--nets", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--masked", action="store_true", help="edits of a mask, not of all sites")
    parser.add_argument("--every", type=int, default=1, help="of the steps are computed")
    parser.add_argument("--links", nargs="+", choices=(*SPEEDS, RATIO))
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    link = Link()
    with linked(link), maskfx.Engine(own_process=["controlnet"]) as engine:
        found = measure(Bed(asked, engine, link))
    result = {**harness.header("bench.adapters.late_control", given), **vars(asked), **found}
    result["out"] = str(asked.out.name)
    ending = "-masked" if asked.masked else ""
    ending += "" if asked.every == 1 else f"-every-{asked.every}"
    harness.write_json(asked.out / f"adapters-late-control-{asked.scale}{ending}.json", result)
    rows = [["link", "ms on the link per step", "sync s", "late s", "times faster"]]
    rows += [
        [
            row["link"],
            f"{1000 * row['link_seconds_per_step']:.1f}",
            f"{row['sync_seconds']['median']:.2f}",
            f"{row['late_seconds']['median']:.2f}",
            times(row["times_faster"]),
        ]
        for row in found["links"]
    ]
    print(columns(rows))
    print(line(found))
    alike = found["likeness"]
    trained = "trained weights" if asked.scale == SHIPPED else "random weights, which says little"
    print(f"SSIM {alike['ssim']:.4f} (at least {alike['least_ssim']:.4f}), {trained};")
    print(
        f"latents differ by {alike['relative_difference']:.4f}, without the networks by "
        f"{alike['without_networks']:.4f}; neighbouring results have a cosine of "
        f"{alike['cosine_of_neighbours']:.4f} or more"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
