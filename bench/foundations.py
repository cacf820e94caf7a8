"""Saved programs, pieces and late inputs: what each of them saves.

    python -m bench.foundations artifact --shape c
    python -m bench.foundations pieces --shape c
    python -m bench.foundations late

artifact: seconds to the first edit of a process that captures, and of one that finds the programs
on disk; each in a process of its own, alternating. pieces: Inductor's steps whose rows are at hand,
come over a link as slow as the compute while the pieces run, or come before the whole graph
starts. late: ControlNets in the denoiser's process, and beside it in processes of their own.
Writes results/foundations-<part>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch

import maskfx
from bench import late_inputs, masks, shapes
from bench.engine.bed import build, smooth_picture
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.shapes import Shape
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.cache.loader import Loader

RESULTS = ROOT / "bench" / "results"
STEPS = 6  # of an edit with ControlNets
DEEP = {  # full depth; narrow, so that two cores capture it within minutes
    "flux": replace(
        shapes.SHAPES["c"],
        name="flux",
        title="Flux at its full depth of 19 + 38 blocks, width 128",
        config={
            **shapes.SHAPES["c"].config,
            "num_layers": 19,
            "num_single_layers": 38,
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 6, 6],
        },
        size=shapes.Size(16, 16, 77),
    ),
    "sdxl": replace(
        shapes.SHAPES["b"],
        name="sdxl",
        title="SDXL's UNet at its full depth (transformers of 1, 2 and 10 blocks), width 64 to 256",
        config={
            **shapes.SHAPES["b"].config,
            "block_out_channels": (64, 128, 256),
            "attention_head_dim": (4, 4, 8),
            "transformer_layers_per_block": (1, 2, 10),
            "projection_class_embeddings_input_dim": 256 + 6 * 128,
        },
        size=shapes.Size(32, 32, 77),
    ),
}


def edits(shape: Shape, denoiser: maskfx.CompiledDenoiser, ratio_: float = 0.1) -> Any:
    """A recorded step and one edit of it."""
    inputs = shape.inputs(0)
    _, cache = denoiser.record(**inputs)
    grid = masks.make(masks.KINDS[0], shape.size.height, shape.size.width, ratio_, 0)
    return [maskfx.EditStep(inputs, shape.as_mask(grid), cache)]


# Saved programs.


def first_edit(shape: Shape, directory: str) -> dict[str, Any]:
    """Compile, record and edit once in this process, and compare with the eager module."""
    module = shape.build()
    start = time.perf_counter()
    with torch.no_grad():
        denoiser = maskfx.compile(module, programs=directory)
        steps = edits(shape, denoiser)
        (found,) = denoiser.edit(steps)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        denoiser.edit(edits(shape, denoiser))
        again = time.perf_counter() - start
        wanted = module(**steps[0].inputs)
    found, wanted = (value[0] for value in (found, wanted))
    programs = [one.program for one in denoiser.compilations if one.program is not None]
    return {
        "seconds": seconds,
        "again": again,  # a recording and an edit where all is ready
        "error": float((found - wanted).norm() / wanted.norm()),
        "nodes": [len(program.module.graph.nodes) for program in programs],
        "codes": [program.code for program in programs],
    }


def artifact(shape: Shape, rounds: int) -> dict[str, Any]:
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            directory = f"{folder}/{number}"
            cold.append(in_process(shape.name, directory))
            warm.append(in_process(shape.name, directory))
        held = sum(p.stat().st_size for p in Path(folder).rglob("*.program")) / rounds
    assert all(one["codes"] == cold[0]["codes"] for one in (*cold, *warm))
    seconds = [[one["seconds"] for one in side] for side in (cold, warm)]
    steps = [one["again"] for one in (*cold, *warm)]
    added = [[one["seconds"] - one["again"] for one in side] for side in (cold, warm)]
    return {
        "asked": "the first edit of a second start at least 10 times as quick",
        "title": shape.title,
        "times_as_quick": ratio(*seconds),
        "seconds": {"captures": figure(seconds[0]), "loads": figure(seconds[1])},
        "seconds_of_the_steps": figure(steps),
        "times_as_quick_without_the_steps": ratio(*added),
        "times_as_quick_if_loads_took_no_time": ratio(seconds[0], [one["again"] for one in warm]),
        "bytes": held,
        "nodes": cold[0]["nodes"],
        "largest_error": max(one["error"] for one in (*cold, *warm)),
    }


def in_process(name: str, directory: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.foundations", "first-edit", "--shape", name]
    done = subprocess.run(
        [*command, "--programs", directory], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# Pieces.


def pieces(shape: Shape, rounds: int) -> dict[str, Any]:
    """Steps of Inductor's code; loads begin with the step, as in a first step."""
    torch.set_num_threads(1)  # the loader copies on the other core
    module = shape.build()
    loader = Loader()
    sides = {
        name: maskfx.compile(module, inductor=True, loader=loader) for name in ("pieces", "whole")
    }
    steps = {name: edits(shape, denoiser) for name, denoiser in sides.items()}
    sides["pieces"].edit(steps["pieces"])
    graphs = type(sides["whole"]._executor.graphs)
    with mock.patch.object(graphs, "_waited", return_value=frozenset()):
        sides["whole"].edit(steps["whole"])  # compiled as one, as if no input were waited for
    runs = {name: list(d._executor.graphs.runners.values())[-1] for name, d in sides.items()}
    (batch,) = sides["pieces"].batches(steps["pieces"])
    program, frame, members = batch
    names = list(program.interface.inputs)
    nbytes = sum(job.nbytes for job in frame.jobs(members, names))
    alone: list[float] = []  # seconds that loads take by themselves

    def resident(_: int) -> None:
        """Rows at hand; until the next one, the link is as slow as this."""
        start = time.perf_counter()
        at_hand(sides["whole"], steps["whole"])
        alone.append(time.perf_counter() - start)
        loader.bandwidth = nbytes / alone[-1]

    resident(0)
    found = alternate(
        {
            "at hand": resident,
            "at hand, in pieces": lambda _: at_hand(sides["pieces"], steps["pieces"]),
            "pieces": lambda _: sides["pieces"].edit(steps["pieces"]),
            "whole": lambda _: sides["whole"].edit(steps["whole"]),
        },
        rounds,
    )
    loader.close()
    return {
        "asked": "pieces at most 1.1 of rows at hand where loads take as long as compute",
        "title": shape.title,
        "pieces": len(runs["pieces"].pieces),
        "bytes_loaded": nbytes,
        "bytes_per_second": nbytes / figure(alone)["median"],
        "seconds": {name: figure(samples) for name, samples in found.items()},
        "pieces_over_at_hand": ratio(found["pieces"], found["at hand"]),
        "whole_over_at_hand": ratio(found["whole"], found["at hand"]),
        "cutting_alone": ratio(found["at hand, in pieces"], found["at hand"]),
    }


def at_hand(denoiser: maskfx.CompiledDenoiser, steps: Any) -> None:
    """An edit without loads: rows are picked where the graph reads them."""
    loads = denoiser._executor.graphs.loads
    loads.loader, loader = None, loads.loader
    try:
        denoiser.edit(steps)
    finally:
        loads.loader = loader


# Late inputs.


def late(rounds: int, nets: Sequence[int] = (1, 2, 3)) -> dict[str, Any]:
    return {
        "asked": "one engine step a denoising step; bit-equal; within 10 % of sum_over_largest",
        "by_nets": [late_with(count, rounds) for count in nets],
    }


def late_with(nets: int, rounds: int) -> dict[str, Any]:
    """Edits of a pipeline with a number of ControlNets, one thread for each process."""
    torch.set_num_threads(1)
    pipe, call = control_pipeline(nets)
    pipe(**call(0))  # records the template
    alone = pipe(**call(1))[0]
    outputs: dict[str, torch.Tensor] = {}

    def run(name: str, engine: maskfx.Engine) -> Callable[[int], Any]:
        def once(_: int) -> None:
            outputs[name] = engine.submit(pipe, **call(1)).result()[0]

        return once

    with maskfx.Engine() as one, maskfx.Engine(own_process=["controlnet"]) as several:
        sides = {"one process": run("one process", one), "beside": run("beside", several)}
        for side in sides.values():
            side(0)
        before = len(one.steps), len(several.steps)
        seconds = alternate(sides, rounds)
        counts = len(one.steps) - before[0], len(several.steps) - before[1]
        with late_inputs.heads() as head:
            sides["beside"](0)
        rest = alternate({"": sides["one process"]}, rounds, time.process_time)[""]
        spent, steps = late_inputs.shares(pipe, call(1))
        denoisers = pipeline_state_of(pipe).denoisers
        works = {name: partial(denoisers[name].step, steps[name]) for name in spent}
        (net, *_) = names = [name for name in spent if name != "unet"]
        pair = {name: works[name] for name in (net, "unet")}
        slower = late_inputs.side_by_side(pair, STEPS * rounds)
        here = several.services.counts().computed_here
    parts = [spent[name] for name in names], spent["unet"], head
    sums = {name: sum(seconds_) for name, seconds_ in spent.items()}
    left = max(0.0, figure(rest)["median"] - sum(sums.values()))
    cores = len(os.sched_getaffinity(0))
    slowest = max(one["median"] for one in slower.values())
    return {
        "nets": nets,
        "times_as_quick": ratio(seconds["one process"], seconds["beside"]),
        "seconds_by_denoiser": sums,
        "seconds_of_each_step": spent,
        "seconds_before_a_net_is_read": head,
        "seconds_of_no_denoiser": left,
        "slower_side_by_side": slower,
        "sum_over_largest": sum(sums.values()) / max(sums.values()),
        "most_possible": late_inputs.most_possible(*parts, left, cores),
        "most_possible_side_by_side": late_inputs.most_possible(*parts, left, cores, slowest),
        "katz": katz(*parts, left),
        "engine_steps_per_denoising_step": [n / (rounds * STEPS) for n in counts],
        "bit_equal_in_one_process": bool(torch.equal(outputs["one process"], alone)),
        "error_beside": float((outputs["beside"] - alone).norm() / alone.norm()),
        "steps_computed_here": here,
        "seconds": {name: figure(samples) for name, samples in seconds.items()},
    }


def katz(
    nets: Sequence[Sequence[float]], unet: Sequence[float], head: Sequence[float], left: float
) -> dict[str, Any]:
    """Return Katz's equations and Gustafson's bound for nets that are in memory already.

    Args:
        nets: Seconds of each net at each step.
        unet: Seconds of the UNet at each step.
        head: Of these, before it reads a net's result.
        left: Seconds of no denoiser.
    """
    from bench.adapters.latency_model import Parts

    base, before = mean(unet), min(mean(head), mean(unet))
    parts = Parts([], [], [], left, list(map(mean, nets)), base, base - before, 0.0, len(unet))
    return {name: own for name, own in parts.report().items() if name != "parts"}


def control_pipeline(nets: int, width: int = 64) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """A compiled inpainting pipeline with ControlNets of its UNet's shape, and its calls."""
    import diffusers
    from PIL import Image

    make: Any = diffusers  # its classes have no types
    plain = build(width)
    torch.manual_seed(1)
    controls = [make.ControlNetModel.from_unet(plain.unet).eval() for _ in range(nets)]
    for net in controls:
        for parameter in net.parameters():  # its last layers begin as zero
            if not bool(parameter.any()):
                torch.nn.init.normal_(parameter, std=0.02)
    pipe = make.StableDiffusionControlNetInpaintPipeline(
        **{**plain.components, "controlnet": controls if nets > 1 else controls[0]},
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    side = 256
    image = smooth_picture(side, 0)
    mask = Image.fromarray((masks.make(masks.KINDS[0], side, side, 0.1, 0) * 255).byte().numpy())

    def call(seed: int) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(seed)
        control = [smooth_picture(side, 10 + i) for i in range(nets)]
        return {
            "prompt_embeds": torch.randn(1, 77, 384, generator=noise),
            "negative_prompt_embeds": torch.zeros(1, 77, 384),
            "image": image,
            "mask_image": mask,
            "control_image": control if nets > 1 else control[0],
            "height": side,
            "width": side,
            "num_inference_steps": STEPS,
            "strength": 1.0,
            "generator": noise,
            "output_type": "latent",
            "return_dict": False,
        }

    return maskfx.compile(pipe, quality="all-steps"), call


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="bench.foundations", description=__doc__)
    parser.add_argument("part", choices=("artifact", "pieces", "late", "first-edit"))
    parser.add_argument("--shape", default="c", choices=(*shapes.SHAPES, *DEEP))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--programs", default="")
    options = parser.parse_args(given)
    shape = DEEP.get(options.shape) or shapes.SHAPES[options.shape]
    if options.part == "first-edit":
        torch.set_num_threads(1)
        print(json.dumps(first_edit(shape, options.programs)))
        return
    result = header("bench.foundations", given)
    match options.part:
        case "artifact":
            result |= artifact(shape, options.rounds)
        case "pieces":
            result |= pieces(shape, options.rounds)
        case "late":
            result |= late(options.rounds)
    name = options.part if options.part == "late" else f"{options.part}-{shape.name}"
    write_json(RESULTS / f"foundations-{name}.json", result)
    shown = {k: v for k, v in result.items() if k not in ("hardware", "versions")}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
