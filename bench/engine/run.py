"""Continuous batching against one call at a time and against batches of whole pictures.

    python -m bench.engine [--model shipped] [--steps 25] [--requests 60] [--loads 0.9 2.0]

A half-width Stable Diffusion inpainting pipeline with random weights, or the trained one that the
package ships, edits a few templates. Masks are as large as a production service's (log-normal, mean
0.11). Sides named "every step" forecast none; the other ones of ours have the --quality that is
asked for. The parts, all in one process run:

throughput  as many requests as the batch holds, all there at once, by batch size: diffusers one by
            one, diffusers in batches (one call of several pictures), maskfx one by one, the engine,
            and both of ours with every step computed
arrivals    the same Poisson arrivals for each side, see bench/engine/arrivals.py
cores       steps beside helpers and other programs, see bench/engine/cores.py
overhead    what a step costs beyond its denoiser's time, by the number of requests; how long a
            latent takes to another process and back
memory      what the process holds after each quarter of many small requests
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench.engine.arrivals import Plan, arrivals, rows_of, wait_all
from bench.engine.bed import ENCODINGS, TEMPLATES, Bench, Request, open_bench, requests
from bench.engine.cores import cores
from bench.harness import ROOT, alternate, figure, header, ratio, resident, write_json
from maskfx.engine.processes.helper_processes import HelperProcesses
from maskfx.pipelines.runs import execute as executing

RESULTS = ROOT / "bench" / "results"
BATCHES = (1, 2, 4, 8)
EVERY_STEP = maskfx.Quality()
PARTS = ("overhead", "cores", "throughput", "arrivals", "memory")
ROUNDS = 5  # of the same requests, for what a step costs beyond its denoiser


# Throughput.


def throughput(
    bench: Bench, rounds: int, batches: Sequence[int], quality: str, only: Sequence[str]
) -> list[dict[str, Any]]:
    """The same requests by every side, or by `only` some; rounds of all, one after another."""
    group = bench.requests(max(batches), seed=100, even=True)
    qualities = {quality: quality, "fast": "fast", "every step": EVERY_STEP}
    sides: dict[str, Callable[[int], Any]] = {
        "diffusers one by one": lambda _: [bench.dense([r]) for r in group],
        f"maskfx one by one, {quality}": lambda _: [
            bench.edits(**bench.call(r, quality=quality)) for r in group
        ],
    }
    alone = list(sides)
    for batch in batches:
        sides[f"diffusers batched {batch}"] = partial(in_batches, bench, group, batch)
        for name, own in qualities.items():
            sides[f"engine, {name} {batch}"] = partial(by_engine, bench, group, batch, own)
    named = {name: name.rstrip("0123456789 ") for name in sides}
    if unknown := set(only) - set(named.values()):
        raise SystemExit(f"--sides: {unknown}: there are {set(named.values())}")
    sides = {name: side for name, side in sides.items() if not only or named[name] in only}
    bench.dense(group[:1])
    for name, side in sides.items():  # templates and each mask's tables are made
        if not name.startswith("diffusers"):
            side(0)
    times = alternate(sides, rounds)
    found = []
    for batch in batches:
        own = {name: times[name] for name in alone if name in times}
        own |= {
            name.removesuffix(f" {batch}"): seconds
            for name, seconds in times.items()
            if name not in alone and name.endswith(f" {batch}")
        }
        row: dict[str, Any] = {"batch": batch, "requests": len(group)}
        for name, seconds in own.items():
            row[name] = {"requests_per_second": len(group) / statistics.median(seconds)}
            for base in ("one by one", "batched"):
                if f"diffusers {base}" in own:
                    row[name][f"x {base}"] = ratio(own[f"diffusers {base}"], seconds)
        found.append(row)
        print(batch, {n: round(row[n].get("x one by one", {}).get("median", 0), 2) for n in own})
    return found


def in_batches(bench: Bench, group: Sequence[Request], batch: int, _: int) -> None:
    for start in range(0, len(group), batch):
        bench.dense(group[start : start + batch])


def by_engine(bench: Bench, group: Sequence[Request], batch: int, quality: Any, _: int) -> None:
    with maskfx.Engine(maskfx.BatchPolicy(batch=batch), running=batch) as engine:
        wait_all(engine, bench, group, quality=quality)


# Overhead.


@contextmanager
def timed_denoiser(spent: list[float]) -> Iterator[None]:
    """How long the denoiser itself takes within each step."""
    original = executing.run_parts

    def run_parts(*args: Any) -> None:
        start = time.perf_counter()
        original(*args)
        spent.append(time.perf_counter() - start)

    executing.run_parts = run_parts  # type: ignore[assignment]
    try:
        yield
    finally:
        executing.run_parts = original


def overhead(bench: Bench) -> list[dict[str, float]]:
    """A step's time beyond its denoiser's, by requests."""
    found = []
    for batch in BATCHES:
        spent: list[float] = []
        group = bench.requests(batch, seed=50)
        with maskfx.Engine(maskfx.BatchPolicy(batch=batch, patience=5.0), running=batch) as engine:
            wait_all(engine, bench, group)
            engine.steps.clear()
            with timed_denoiser(spent):
                for _ in range(ROUNDS):
                    wait_all(engine, bench, group)
            extra = [s.seconds - d for s, d in zip(engine.steps, spent, strict=True)]
            full = [e for s, e in zip(engine.steps, extra, strict=True) if s.requests == batch]
        found.append({"requests": batch, "milliseconds": 1e3 * statistics.median(full or extra)})
        print(found[-1])
    return found


def memory(count: int) -> list[dict[str, float]]:
    """Resident bytes after each quarter of a number of requests of a tiny pipeline."""
    bench = open_bench(32, 64, 2, prepack=True)
    group = requests(64, 64, seed=9)
    found = []
    with maskfx.Engine(maskfx.BatchPolicy(batch=8)) as engine:
        done = 0
        for quarter in range(1, 5):
            while done < quarter * count / 4:
                wait_all(engine, bench, group[:16])
                done += 16
            gc.collect()
            found.append({"requests": done, "mib": resident("VmRSS") / 2**20})
            print(found[-1])
    return found


class Echo(torch.nn.Module):
    """Gives back what it gets."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


class NoSteps:
    """An engine that does nothing, as helper processes see it."""

    def stepping(self) -> bool:
        return False

    def errand(self, work: Callable[[], None]) -> None:
        work()


def handover(pixels: int, repeats: int = 200) -> dict[str, float]:
    """A latent to another process and back, in milliseconds."""
    helpers = HelperProcesses(1)
    helpers.start(NoSteps())
    part = Echo()
    helpers.register(part)
    latent = torch.randn(1, 4, pixels // 8, pixels // 8)
    times = []
    for _ in range(repeats + 20):
        start = time.perf_counter()
        helpers.run(part, "__call__", (latent,), {})
        times.append(1e3 * (time.perf_counter() - start))
    helpers.stop()
    return figure(times[20:])


def main(command: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("half-width", "shipped"), default="half-width")
    parser.add_argument("--quality", default="balanced", help="of ours: fast, balanced, faithful")
    parser.add_argument(
        "--compiled-as", nargs="*", default=["prepack"], choices=("prepack", "inductor")
    )
    parser.add_argument("--pixels", type=int, default=256)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--templates", type=int, default=TEMPLATES)
    parser.add_argument("--rows", choices=ENCODINGS, default="32bit", help="of templates")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--loads", type=float, nargs="*", default=[0.9, 2.0])
    parser.add_argument("--heavy", type=float, nargs="*", default=[], help="loads of ours alone")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=5, help="of requests, sides in turn")
    parser.add_argument("--resume", action="store_true", help="arrivals: go on with --out's blocks")
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sides", nargs="*", default=[], help="throughput: these alone")
    parser.add_argument("--small", type=int, default=2000, help="requests of the memory part")
    parser.add_argument("--out", default=str(RESULTS / "engine.json"))
    given = parser.parse_args(command)
    result = header("bench.engine", command)
    path = Path(given.out)
    bench = open_bench(
        given.width if given.model == "half-width" else None,
        given.pixels,
        given.steps,
        given.templates,
        ENCODINGS[given.rows],
        given.quality,
        **dict.fromkeys(given.compiled_as, True),
    )
    for part in given.parts:
        if part == "overhead":
            result["handover_ms"] = handover(given.pixels)
            print("handover ms", result["handover_ms"])
            result["overhead"] = overhead(bench)
        elif part == "cores":
            result["cores"] = cores(bench, given.rounds, given.batch)
        elif part == "throughput":
            args = given.rounds, given.batches, given.quality, given.sides
            result["throughput"] = throughput(bench, *args)
        elif part == "arrivals":
            plan = Plan(given.requests, given.blocks, given.batch, given.loads, given.heavy)
            begun = json.loads(path.read_text())["blocks"] if given.resume else {}
            started = result["started"]
            for blocks in arrivals(bench, plan, begun, started):
                result |= {"arrivals": rows_of(blocks), "blocks": blocks}
                write_json(path, result)
        else:
            result["memory"] = memory(given.small)
        write_json(path, result)
    picture(result, path.with_suffix(".png"))


def picture(result: dict[str, Any], path: Path) -> None:
    """Throughput by batch, latency by load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [draw for part, draw in PANELS.items() if part in result]
    if not panels:
        return
    figure_, places = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for draw, place in zip(panels, places[0], strict=True):
        draw(place, result)
    figure_.tight_layout()
    figure_.savefig(path, dpi=120)


def draw_throughput(place: Any, result: dict[str, Any]) -> None:
    rows = result["throughput"]
    for name in (name for name in rows[0] if name not in ("batch", "requests")):
        rates = [row[name]["requests_per_second"] for row in rows]
        place.plot([row["batch"] for row in rows], rates, marker="o", label=name)
    place.set(xlabel="requests at once", ylabel="requests per second", title="Throughput")
    place.set_ylim(bottom=0)
    legend_below(place)


def draw_arrivals(place: Any, result: dict[str, Any]) -> None:
    served = result["arrivals"]
    loads = sorted({row["load"] for row in served})
    names = list(dict.fromkeys(row["side"] for row in served))
    for n, name in enumerate(names):
        own = [row for row in served if row["side"] == name]
        where = [loads.index(row["load"]) + (n - (len(names) - 1) / 2) * 0.2 for row in own]
        place.bar(where, [row["mean"] for row in own], 0.18, label=name)
        place.plot(where, [row["p95"] for row in own], "k_", markersize=9)
    place.set_xticks(range(len(loads)), [f"{load:g}x" for load in loads])
    place.set(xlabel="load, of diffusers' batched capacity", ylabel="seconds")
    place.set_title("Latency: mean (bar) and 95th percentile (dash)")
    place.set_yscale("log")
    legend_below(place)


def legend_below(place: Any) -> None:
    place.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)


PANELS = {"throughput": draw_throughput, "arrivals": draw_arrivals}
