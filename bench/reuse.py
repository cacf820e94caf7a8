"""Edits without a template: the time and the error of reusing a request's own earlier calls.

    OMP_NUM_THREADS=1 python -m bench.reuse --threads 1

A whole sampling loop, timed inside the denoiser only, against the dense run of the same loop with
the module itself. The weights are random, and cut so that the output changes smoothly with time
(`smooth_in_time`), as a trained denoiser's does; how much it turns from call to call stands in the
result. So the times say what reuse costs, and the errors how the settings compare on one smooth
field; errors with the weights as they were drawn stand beside them, for a field that extrapolating
can't follow. How good pictures are, only trained models can say. Writes bench/results/reuse.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import maskfx
from bench import harness, masks, shapes
from bench.report import columns, times
from maskfx.runtime.reuse.policy import OUTSIDES, CallKind, ReusePolicy
from maskfx.runtime.reuse.session import CallKey

INTERVALS = (2, 4, 8)
RATIOS = (0.1, 0.2)
FEWER_BLOCKS = {"c": {"num_layers": 1, "num_single_layers": 2}}
SLOWEST_TURN = 1000.0  # timesteps; what turns faster is cut off
LINEAR_GAIN = 1.7  # torch draws linear weights so small that sites would hardly see each other


def smooth_in_time(module: nn.Module) -> nn.Module:
    """Cut what turns more than once over all timesteps off the embedding of time.

    An embedding has sines from one radian per timestep down. Random weights mix all of them, so
    that neighbouring steps would have nothing in common; training teaches a model to be smooth.
    """
    for part in module.modules():
        if type(part).__name__ != "TimestepEmbedding":
            continue
        weight: Tensor = part.linear_1.weight  # type: ignore[union-attr, assignment]
        half = weight.shape[1] // 2
        frequency = torch.exp(-math.log(10_000) * torch.arange(half) / half)
        slow = (frequency <= 2 * math.pi / SLOWEST_TURN).repeat(2)
        weight.data[:, : 2 * half] *= slow
    return module


def enlarge(module: nn.Module) -> nn.Module:
    """Let linear layers keep the variance, so that the mask depends on what it reads outside."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.data *= LINEAR_GAIN
    return module


@dataclass(frozen=True)
class Side:
    """How one loop is run: dense without a policy."""

    policy: ReusePolicy | None
    blend: bool
    template: Mapping[CallKey, maskfx.StepCache] = field(default_factory=dict)


@dataclass
class Run:
    """What one loop came to."""

    latents: Tensor
    outputs: list[Tensor]
    seconds: list[float]
    kinds: list[CallKind]
    recordings: dict[CallKey, maskfx.StepCache]


class Loop:
    """One request: a denoiser, a scheduler, noise, a template and a mask."""

    def __init__(self, shape: shapes.Shape, grid: Tensor, steps: int, smooth: bool = True) -> None:
        self.shape, self.grid, self.steps = shape, grid, steps
        self.module = enlarge(shape.build())
        if smooth:
            smooth_in_time(self.module)
        self.denoiser = maskfx.compile(self.module, example_inputs=shape.inputs(0))
        self.fixed = shape.inputs(0)
        self.latent = "sample" if shape.has_convolutions else "hidden_states"
        self.template: Tensor = shape.inputs(100)[self.latent]

    def scheduler(self) -> Any:
        """Flow matching as Flux has it at 1024 x 1024; v-prediction for UNets stays bounded."""
        import diffusers

        library: Any = diffusers  # its schedulers have no types
        if self.shape.has_convolutions:
            ddim = library.DDIMScheduler(
                prediction_type="v_prediction", beta_schedule="scaled_linear", clip_sample=False
            )
            ddim.set_timesteps(self.steps)
            return ddim
        flow = library.FlowMatchEulerDiscreteScheduler(shift=3.0)
        flow.set_timesteps(sigmas=list(np.linspace(1.0, 1 / self.steps, self.steps)))
        return flow

    def run(self, side: Side) -> Run:
        """The whole loop."""
        scheduler, mask = self.scheduler(), self.shape.as_mask(self.grid)
        session = None
        if side.policy is not None:
            session = maskfx.EditSession(mask, side.policy, side.template)
        noise = latents = self.fixed[self.latent]
        run = Run(latents, [], [], [], {})
        for ordinal, t in enumerate(scheduler.timesteps):
            time_ = t if self.shape.has_convolutions else t / 1000
            inputs = {**self.fixed, self.latent: latents, "timestep": time_.reshape(1)}
            start = time.perf_counter()
            if session is None:
                output: Tensor = self.module(**inputs)[0]
            else:
                [result] = self.denoiser.step([session.ask(ordinal, "", inputs)])
                output = session.take(ordinal, "", result)[0]
            run.seconds.append(time.perf_counter() - start)
            run.outputs.append(output)
            latents = scheduler.step(output, t, latents).prev_sample
            if side.blend:
                kept = self.noised(scheduler, ordinal, noise)
                active = mask[:, None] if self.shape.packed else mask
                latents = torch.where(active, latents, kept)
        run.latents = latents
        if session is not None:
            run.kinds, run.recordings = list(session.kinds.values()), session.recordings
        return run

    def noised(self, scheduler: Any, ordinal: int, noise: Tensor) -> Tensor:
        """The template's latents before the next call, as inpainting pipelines put them back."""
        if self.shape.has_convolutions:
            following = scheduler.timesteps[ordinal + 1 : ordinal + 2]
            if not len(following):
                return self.template
            noised: Tensor = scheduler.add_noise(self.template, noise, following)
            return noised
        sigma = scheduler.sigmas[ordinal + 1]
        mixed: Tensor = sigma * noise + (1 - sigma) * self.template
        return mixed


def sides_of(calls: int) -> dict[str, Side]:
    """Dense and every setting; a name holds all of it."""
    sides: dict[str, Side] = {}
    for blend in (False, True):
        place = "blended" if blend else "free"
        sides[f"dense {place}"] = Side(None, blend)
        for interval in INTERVALS:
            for outside in OUTSIDES[: 1 if blend else 2]:  # blending overwrites it
                policy = ReusePolicy("steps", interval, outside=outside, keep="none")
                sides[f"r={interval} {outside} {place}"] = Side(policy, blend)
    for interval in INTERVALS[1:]:
        policy = ReusePolicy("steps", interval, last=1, calls=calls, keep="none")
        sides[f"r={interval} {policy.outside} free, last dense"] = Side(policy, False)
    return sides


def with_template(loop: Loop) -> dict[str, Side]:
    """What a next request costs: all of its calls recorded, or those of a run with r=4."""
    full = loop.run(Side(ReusePolicy("template"), False)).recordings
    sparse = ReusePolicy("auto", 4, keep="all")
    some = loop.run(Side(sparse, False)).recordings
    return {
        "template of all calls free": Side(ReusePolicy("template"), False, full),
        "template of r=4 free": Side(sparse, False, some),
    }


def measure(loop: Loop, rounds: int) -> dict[str, Any]:
    """Every side in every round, in a changing order; what each comes to."""
    calls = len(loop.scheduler().timesteps)
    sides = {**sides_of(calls), **with_template(loop)}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    loop.run(sides["dense free"])  # what is made once for a module and a mask isn't counted
    loop.run(sides[f"r={INTERVALS[-1]} hold free"])

    def once(name: str, _: int) -> None:
        runs[name].append(loop.run(sides[name]))

    harness.alternate({name: partial(once, name) for name in sides}, rounds)
    rows = []
    for name, side in sides.items():
        dense = runs["dense blended" if side.blend else "dense free"]
        rows.append({"side": name, **row_of(loop, side, runs[name], dense)})
    return {
        "masked": float(loop.grid.float().mean()),
        "calls": calls,
        "turn_per_call": turns(runs["dense free"][0]),
        "seconds_per_call": per_kind([r for name in sides for r in runs[name]]),
        "rows": rows,
    }


def errors(loop: Loop) -> dict[str, Any]:
    """Untimed: how far the unblended sides are from dense."""
    sides = {name: side for name, side in sides_of(loop.steps).items() if not side.blend}
    runs = {name: loop.run(side) for name, side in sides.items()}
    dense = runs.pop("dense free")
    found = {name: errors_of(loop, run.latents, dense.latents) for name, run in runs.items()}
    return {"turn_per_call": turns(dense), "errors": found}


def errors_of(loop: Loop, got: Tensor, wanted: Tensor) -> dict[str, float]:
    def at(grid: Tensor) -> float:
        return distance(loop.shape.masked(got, grid), loop.shape.masked(wanted, grid))

    return {"error_inside": at(loop.grid), "error_outside": at(~loop.grid)}


def turns(dense: Run) -> harness.Figure:
    """How much the output changes from one call to the next."""
    pairs = zip(dense.outputs, dense.outputs[1:], strict=False)
    return harness.figure([distance(after, before) for before, after in pairs])


def row_of(loop: Loop, side: Side, own: list[Run], dense: list[Run]) -> dict[str, Any]:
    seconds = [sum(run.seconds) for run in own]
    return {
        "policy": vars(side.policy) if side.policy else None,
        "blended": side.blend,
        "full_calls": sum(k in (CallKind.DENSE, CallKind.RECORD) for k in own[0].kinds),
        "seconds": harness.figure(seconds),
        "times_faster": harness.ratio([sum(run.seconds) for run in dense], seconds),
        **errors_of(loop, own[0].latents, dense[0].latents),
    }


def distance(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def per_kind(runs: Sequence[Run]) -> dict[str, float]:
    """Median seconds of a call of each kind; "module" is the dense side's."""
    found: dict[str, list[float]] = {}
    for run in runs:
        names = [kind.value for kind in run.kinds] or ["module"] * len(run.seconds)
        for name, seconds in zip(names, run.seconds, strict=True):
            found.setdefault(name, []).append(seconds)
    return {name: statistics.median(samples) for name, samples in found.items()}


def table(result: dict[str, Any]) -> str:
    lines = [["m", "side", "full calls", "denoiser s", "x dense", "error inside", "outside"]]
    for mask in result["masks"]:
        for row in mask["rows"]:
            full = str(row["full_calls"]) if row["policy"] else str(mask["calls"])
            line = [f"{mask['masked']:.3f}", row["side"], full, f"{row['seconds']['median']:.2f}"]
            line += [times(row["times_faster"])]
            line += [f"{row['error_inside']:.1e}", f"{row['error_outside']:.1e}"]
            lines.append(line)
    return columns(lines)


def rough_table(rough: dict[str, Any]) -> str:
    lines = [["weights as drawn: side", "error inside", "outside"]]
    for name, found in rough["errors"].items():
        lines.append([name, f"{found['error_inside']:.1e}", f"{found['error_outside']:.1e}"])
    return columns(lines)


def choose(name: str, quick: bool) -> shapes.Shape:
    """A shape with few blocks, or its small stand-in."""
    shape = shapes.choose(name, quick)
    fewer = {} if quick else FEWER_BLOCKS.get(name, {})
    title = f"{shape.title}; with {fewer}" if fewer else shape.title
    return replace(shape, title=title, config={**shape.config, **fewer})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.reuse", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--shape", default="c", choices=[*"abc", "cw"], help="default c")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, 8 steps, one round")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.rounds = 8, 1
    torch.set_num_threads(options.threads)
    shape = choose(options.shape, options.quick)
    result = {
        **harness.header("bench.reuse", arguments),
        "weights": "random, smoothed in time: errors compare settings, they don't rate pictures",
        "shape": options.shape,
        "title": shape.title,
        "steps": options.steps,
        "rounds": options.rounds,
        "masks": [],
    }
    path = options.out / ("reuse.json" if options.shape == "c" else f"reuse-{options.shape}.json")
    with torch.no_grad():
        for ratio in RATIOS:
            grid = masks.make("square", shape.size.height, shape.size.width, ratio)
            result["masks"].append(measure(Loop(shape, grid, options.steps), options.rounds))
            harness.write_json(path, result)
        rough = errors(Loop(shape, grid, options.steps, smooth=False))
    result["not_smooth_in_time"] = {"masked": result["masks"][-1]["masked"], **rough}
    print(table(result), rough_table(rough), sep="\n\n")
    harness.write_json(path, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
