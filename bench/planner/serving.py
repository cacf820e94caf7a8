"""Planned loads through the server: cached rows cross a throttled link while steps compute.

    python -m bench.planner.serving [--model NAME] [--links 1] [--sides SIDE ...] [--short]

One server per side, all over HTTP with real processes, on the CPU; they are asked in turn, in a
changing order, and each edit is the same for all. `resident` has all rows at hand: the defaults of
`maskfx serve` on a CPU. The others load them over a link of a multiple of the bandwidth at which a
step's loads take as long as its compute, measured first: `planned` by the server's defaults,
`ahead` without plans, `naive` as its graph asks for them, so that loads and compute take turns.
Wanted: planned within 1.1 of resident. Writes results/planner-serving.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ROOT, figure, header, ratio, write_json
from bench.load.client import Target, edit, target
from bench.masks import make
from bench.report import columns

WANTED = 1.1  # times resident
SITE = 8  # pixels
SIDES: dict[str, dict[str, Any]] = {
    "resident": {},
    "planned": {},
    "ahead": {"plans": "off", "overlap": "on"},
    "naive": {"plans": "off", "overlap": "off"},
}


# The bandwidth at which loads take as long as compute, measured in a process of its own.


def measure(options: argparse.Namespace, programs: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.planner.serving", "--measure", "--model", options.model]
    command += ["--side", str(options.side), "--steps", str(options.steps)]
    command += ["--ratio", str(options.ratio), "--programs", str(programs)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Bytes that a step of one edit loads, and seconds that it computes, if nothing is planned."""
    from PIL import Image

    import maskfx
    from maskfx.pipelines.compile import pipeline_state_of
    from maskfx.serve.models.model_source import load_pipeline

    pipe = load_pipeline(options.model, "float32", "cpu")
    compiled = maskfx.compile(pipe, plans=True, loader=maskfx.Loader(), programs=options.programs)
    picture = np.random.default_rng(0).integers(0, 256, (options.side, options.side, 3), np.uint8)
    mask = Image.fromarray(mask_of(options).astype(np.uint8) * 255)
    given = {"image": Image.fromarray(picture), "mask_image": mask, "strength": 1.0}
    compiled("", num_inference_steps=options.steps, **given)
    [denoiser] = pipeline_state_of(compiled).denoisers.values()
    planner: Any = denoiser.planner
    _, batch = planner._batches.items()[-1]
    costs = next(iter(planner.known._found.values()))
    usual = [[menu[0] for menu in block.members] for block in batch.blocks]
    compute = sum(c.compute_seconds for block in usual for c in block)
    compute += sum(costs.fixed) + costs.around
    nbytes = sum(c.load_bytes for block in usual for c in block)
    return {"bytes_per_step": nbytes, "compute_seconds_per_step": compute}


def mask_of(options: argparse.Namespace) -> np.ndarray[Any, Any]:
    across = options.side // SITE
    grid = make("strokes", across, across, options.ratio, seed=0).numpy()
    return np.asarray(grid.repeat(SITE, 0).repeat(SITE, 1))


# One link.


async def compare(
    servers: dict[str, Target], options: argparse.Namespace, rounds: int
) -> dict[str, Any]:
    """Ask all sides the same, in turn; the first calls record the template."""
    call = edit(
        options.side, "a house", mask_of(options), seed=1, num_inference_steps=options.steps
    )
    pictures = {}
    for name, server in servers.items():
        for _ in range(2):
            answer = await server.call(call)
            if answer is None or answer.status != 200:
                raise RuntimeError(f"{name}: {answer and answer.body[:300]!r}")
        pictures[name] = answer.picture().astype(int)
    before = {name: await steps_of(server) for name, server in servers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    names = list(servers)
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.monotonic()
            await asyncio.gather(*(servers[name].call(call) for _ in range(options.together)))
            seconds[name].append(time.monotonic() - began)
    after = {name: await steps_of(server) for name, server in servers.items()}
    steps = {
        name: {key: after[name][key] - before[name][key] for key in after[name]} for name in names
    }
    each = {name: steps[name]["seconds"] / steps[name]["count"] for name in names}
    others = [name for name in names if name != "resident"]
    return {
        "seconds": {name: figure(found) for name, found in seconds.items()},
        "over_resident": {n: ratio(seconds[n], seconds["resident"]) for n in others},
        "seconds_per_step": each,
        "bubble_per_step": {n: steps[n]["bubble"] / steps[n]["count"] for n in names},
        "step_over_resident": {name: each[name] / each["resident"] for name in others},
        "largest_difference_of_pixels": max(
            int(abs(pictures[n] - pictures["resident"]).max()) for n in others
        ),
    }


async def steps_of(server: Target) -> dict[str, float]:
    """How many steps the server made, how long they took and waited for loads."""
    return {
        "count": await server.metric("step_latency_seconds_count"),
        "seconds": await server.metric("step_latency_seconds_sum"),
        "bubble": await server.metric("plan_bubble_seconds_sum"),
    }


def run_link(
    options: argparse.Namespace, bandwidth: float, rounds: int, programs: Path
) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for name in options.sides:
            settings = SIDES[name]
            own = {"model": options.model, "max_num_seqs": 4, **settings}
            own["cache_dir"] = str(folder / name)
            if name != "resident":
                own["link_bandwidth"] = bandwidth
                compiled = programs if name == "planned" else folder / "resident" / "programs"
                shutil.copytree(compiled, folder / name / "programs")
            print(f"{name}: starts", file=sys.stderr, flush=True)
            servers[name] = stack.enter_context(target(**own))
        found = asyncio.run(compare(servers, options, rounds))
        lines = [json.loads(x) for x in servers["planned"].log if '"cached_rows"' in x]
        return found | {"planned_log": [line["loaded"] for line in lines]}


# The whole.


def table(links: Sequence[dict[str, Any]]) -> str:
    rows = [["link", "side", "s a call", "of resident", "ms a step", "of resident", "bubble ms"]]
    for link in links:
        for name, took in link["seconds"].items():
            call = link["over_resident"].get(name, {"median": 1.0})["median"]
            step = link["step_over_resident"].get(name, 1.0)
            rows.append(
                [
                    f"{link['of_even']:g}",
                    name,
                    f"{took['median']:.3f}",
                    f"{call:.2f}",
                    f"{1e3 * link['seconds_per_step'][name]:.1f}",
                    f"{step:.2f}",
                    f"{1e3 * link['bubble_per_step'][name]:.1f}",
                ]
            )
    return columns(rows)


def main(command: Sequence[str]) -> int:
    options = parse(command)
    if options.measure:
        print(json.dumps(measured(options)))
        return 0
    result: dict[str, Any] = header("bench.planner.serving", command)
    rounds = 2 if options.short else options.rounds
    with tempfile.TemporaryDirectory() as programs:
        return compared(options, result, rounds, Path(programs))


def compared(
    options: argparse.Namespace, result: dict[str, Any], rounds: int, programs: Path
) -> int:
    """Measure the even link, then all sides at each link; write the result."""
    found = measure(options, programs)
    even = found["bytes_per_step"] / found["compute_seconds_per_step"]
    result |= {"even": found | {"bytes_per_second": even}, "rounds": rounds, "links": []}
    result["note"] = "the link is a thread that copies and then sleeps; loads cross no real bus"
    for share in options.links:
        link = run_link(options, share * even, rounds, programs)
        result["links"].append({"of_even": share, "bytes_per_second": share * even, **link})
    even_links = [link for link in result["links"] if link["of_even"] == 1.0]
    result["wanted"] = f"planned within {WANTED} of resident where loads take as long as compute"
    result["met"] = all(
        link["over_resident"]["planned"]["median"] <= WANTED
        and link["step_over_resident"]["planned"] <= WANTED
        for link in even_links
    )
    print(table(result["links"]), "met" if result["met"] else "MISSED", sep="\n")
    write_json(Path(options.out), result)
    return 0


def parse(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.planner.serving", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", default="", help="a folder or a shipped model; the first one")
    parser.add_argument("--links", type=float, nargs="+", default=[1.0], help="of the even one")
    parser.add_argument("--ratio", type=float, default=0.15, help="masked share")
    parser.add_argument("--side", type=int, default=256, help="of the picture in pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--together", type=int, default=1, help="calls at once")
    parser.add_argument("--short", action="store_true", help="to see that it works")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--programs", help=argparse.SUPPRESS)
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "planner-serving.json"))
    options = parser.parse_args(command)
    if not {"resident", "planned"} <= set(options.sides):
        parser.error("--sides: include resident and planned, which are compared")
    options.sides = [name for name in SIDES if name in options.sides]
    if not options.model:
        from maskfx import shipped

        options.model = shipped.names()[0]
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
