"""Speed of masked edits against the dense denoiser, in fp32 on the CPU.

    python -m bench.denoisers --shape a            one denoiser, all sides
    python -m bench.denoisers --quick              a small one in seconds

All sides run in this process, in alternating order; figures are medians of rounds with their
extremes, ratios are taken round by round. The limit of a mask is counted: FLOPs of a dense step
over FLOPs of an edit. Writes denoisers-<shape>.json and .png to bench/results.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from bench import harness, masks, report, shapes
from bench.denoisers import memory
from bench.denoisers.sides import Contest, blank, prepare, read_sides, relative_error
from bench.harness import alternate, count_flops, figure, flipped, ratio, timed
from bench.shapes import Inputs, Shape, Size
from maskfx import CompiledDenoiser, EditStep
from maskfx.ir.geometry.grids import full_window
from maskfx.ir.programs.sources import Given, Halo, Loaded, Pairs, Rest, RestStats, RestSum
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask

RATIOS = (0.05, 0.11, 0.2, 0.35, 0.5, 1.0)
TOLERANCE = 1e-4
EXTRAS = ("ragged", "tables", "memory", "fixed", "depth")
RAGGED = (  # latents, text tokens and mask ratios of four requests in one batch
    (Size(64, 64, 77), 0.05),
    (Size(48, 64, 77), 0.11),
    (Size(64, 32, 154), 0.2),
    (Size(48, 48, 77), 0.3),
)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# Masks: every side, every ratio.


def measure_mask(
    contest: Contest, kind: str, asked: float, grid: Tensor, rounds: int
) -> dict[str, Any]:
    """One mask: correctness and FLOPs first, then all sides in turn."""
    wanted = [contest.expected(step) for step in contest.steps]
    errors: dict[str, float] = {}
    runs: dict[str, Callable[[int], Any]] = {
        side: partial(contest.run_dense, side) for side in contest.dense
    }
    for side in contest.ours:
        try:
            errors[side] = edit_error(contest, side, grid, wanted)
        except Exception as error:  # noted; the other sides go on
            contest.failures[f"{side}, {kind} {asked:g}"] = harness.describe(error)
            continue
        runs[side] = partial(run_edit, contest, side, contest.edit_steps(side, grid))
        for index in range(len(contest.steps)):
            runs[side](index)
    flops = edit_flops(contest, grid, next(iter(errors))) if errors else {"total": 0, "request": 0}
    dense_flops = count_flops(lambda: contest.expected(contest.steps[0]))["total"]
    limit = dense_flops / flops["total"] if flops["total"] else 1.0
    seconds = alternate(runs, rounds)
    best = min(contest.dense, key=lambda s: figure(seconds[s])["median"], default=None)
    ours = {side: rate(seconds, side, best, limit, asked, error) for side, error in errors.items()}
    return {
        "kind": kind,
        "asked_ratio": asked,
        "ratio": float(grid.float().mean()),
        "sites": int(grid.sum()),
        "flops": flops,
        "limit": limit,
        "best_dense": best,
        "seconds": {side: figure(samples) for side, samples in seconds.items()},
        "ours": ours,
    }


def run_edit(contest: Contest, side: str, steps: Sequence[EditStep], index: int) -> Tensor:
    return contest.edit(side, steps[index % len(steps)])


def rate(
    seconds: dict[str, list[float]],
    side: str,
    best: str | None,
    limit: float,
    asked: float,
    error: float,
) -> dict[str, Any]:
    """What one side of ours reached on one mask."""
    to_best = ratio(seconds[best], seconds[side]) if best else None
    of_limit = harness.scaled(to_best, 1 / limit) if to_best else None
    share = report.target(asked)
    return {
        "to_best": to_best,
        "to_dense": ratio(seconds["dense"], seconds[side]) if "dense" in seconds else None,
        "of_limit": of_limit,
        "asked": share,
        "met": of_limit["median"] >= share if of_limit else None,
        "error": error,
        "correct": error < TOLERANCE,
    }


def edit_error(contest: Contest, side: str, grid: Tensor, wanted: Sequence[Tensor]) -> float:
    """The worst relative error over the steps at masked sites, with the recorded output blanked."""
    worst = 0.0
    for step, dense in zip(contest.edit_steps(side, grid), wanted, strict=True):
        seen = contest.edit(side, EditStep(step.inputs, step.mask, blank(step.cache)))
        masked = contest.shape.masked
        worst = max(worst, relative_error(masked(seen, grid), masked(dense, grid)))
    return worst


def edit_flops(contest: Contest, grid: Tensor, side: str) -> dict[str, int]:
    """FLOPs of one edit by operator; `request` is what runs once per request and isn't in it."""
    step = contest.edit_steps(side, grid)[0]
    denoiser = contest.counting_denoiser()
    fresh = pytree.tree_map_only(Tensor, lambda v: v.clone(), step.inputs)
    first = [EditStep(fresh, step.mask, step.cache)]
    cold = count_flops(lambda: denoiser.edit(first))  # new tensors: the request graph runs again
    warm = count_flops(lambda: denoiser.edit(first))
    return {**warm, "request": cold["total"] - warm["total"]}


def plan_masks(
    size: Size, kinds: Sequence[str], ratios: Sequence[float], seed: int
) -> list[tuple[str, float, Tensor]]:
    """The masks to measure; at ratio 1 all kinds are one."""
    plan = []
    for asked, kind in itertools.product(ratios, kinds):
        if asked < 1.0:
            plan.append((kind, asked, masks.make(kind, size.height, size.width, asked, seed)))
    if any(asked >= 1.0 for asked in ratios):
        plan.append(("full", 1.0, masks.make("full", size.height, size.width, 1.0)))
    return plan


# Extras.


def measure_ragged(contest: Contest, small: bool, compiled: bool, rounds: int) -> dict[str, Any]:
    """Four requests of different sizes, texts and timesteps as one batch, and one after another."""
    steps, grids = [], []
    for index, (size, share) in enumerate(RAGGED):
        size = Size(size.height // 4, size.width // 4, size.text // 7) if small else size
        steps.append(contest.shape.inputs(10 + index, size))
        kind = masks.KINDS[index % len(masks.KINDS)]
        grids.append(masks.make(kind, size.height, size.width, share, index))
    wanted = [contest.expected(inputs) for inputs in steps]
    runs: dict[str, Callable[[int], Any]] = {}
    for side, run in contest.dense.items():
        if compiled or side in ("dense", "dense-channels-last"):
            runs[side] = partial(run_each, run, steps)
            runs[side](0)
    errors = {}
    for side, denoiser in contest.ours.items():
        try:
            caches = [denoiser.record(**inputs)[1] for inputs in steps]
            blanked = make_edits(contest.shape, steps, grids, [blank(c) for c in caches])
            seen = [output[0] for output in denoiser.edit(blanked)]
        except Exception as failure:  # noted; the other sides go on
            contest.failures[f"{side}, ragged"] = harness.describe(failure)
            continue
        errors[side] = max(
            relative_error(contest.shape.masked(s, g), contest.shape.masked(w, g))
            for s, w, g in zip(seen, wanted, grids, strict=True)
        )
        edits = make_edits(contest.shape, steps, grids, caches)
        runs[side] = partial(run_batch, denoiser, edits)
        runs[f"{side} one by one"] = partial(run_each, one_edit(denoiser), edits)
        runs[side](0)
        runs[f"{side} one by one"](0)
    seconds = alternate(runs, rounds)
    best = min((s for s in runs if s in contest.dense), key=lambda s: figure(seconds[s])["median"])
    out: dict[str, Any] = {
        "requests": [
            {"mask": f"{m:g}", "latent": f"{i['sample'].shape[2]}x{i['sample'].shape[3]}",
             "text": i["encoder_hidden_states"].shape[1], "timestep": int(i["timestep"])}
            for (_, m), i in zip(RAGGED, steps, strict=True)
        ],
        "asked": ">= 5 times the dense calls one by one",
        "best_dense": best,
        "seconds": {side: figure(samples) for side, samples in seconds.items()},
    }  # fmt: skip
    for side, error in errors.items():
        fast = ratio(seconds[best], seconds[side])
        out[side] = {
            "to_best": fast,
            "to_ours_one_by_one": ratio(seconds[f"{side} one by one"], seconds[side]),
            "met": fast["median"] >= 5,
            "error": error,
            "correct": error < TOLERANCE,
        }
        if "dense" in seconds:
            out[side]["to_dense"] = ratio(seconds["dense"], seconds[side])
    return out


def run_each(run: Callable[[Any], Any], members: Sequence[Any], _: int) -> list[Any]:
    return [run(member) for member in members]


def run_batch(denoiser: CompiledDenoiser, edits: Sequence[EditStep], _: int) -> list[Any]:
    return denoiser.edit(edits)


def one_edit(denoiser: CompiledDenoiser) -> Callable[[EditStep], list[Any]]:
    return lambda step: denoiser.edit([step])


def make_edits(
    shape: Shape, steps: Sequence[Inputs], grids: Sequence[Tensor], caches: Sequence[Any]
) -> list[EditStep]:
    members = zip(steps, grids, caches, strict=True)
    return [EditStep(inputs, shape.as_mask(grid), cache) for inputs, grid, cache in members]


def measure_tables(contest: Contest, rounds: int) -> dict[str, Any]:
    """What a new mask costs before its first step: sites, owners, spans and index tables."""
    denoiser = next(iter(contest.ours.values()))
    interface = next(iter(denoiser.programs.values())).interface
    sizes = next(iter(contest.caches.values()))[0].sizes
    size = contest.shape.size
    out: dict[str, Any] = {"asked": "< 1 ms", "sites": size.height * size.width}
    for kind, share in itertools.product(masks.KINDS, (0.05, 0.2, 0.5)):
        mask = contest.shape.as_mask(masks.make(kind, size.height, size.width, share))

        def build(mask: Tensor = mask) -> None:
            sites = ActiveSites(interface.pyramid, sizes, Mask(mask))
            build_tables(Frame(interface, Layout((sites,), (1,))), sites)

        def build_cold(build: Callable[[], None] = build) -> None:
            full_window.cache_clear()  # the tables of a whole grid, which masks of one size share
            build()

        new_mask, new_size = timed(build, rounds), timed(build_cold, rounds)
        out[f"{kind} {share:g}"] = {
            "new_mask_seconds": new_mask,
            "new_size_seconds": new_size,
            "met": new_size["median"] < 1e-3,
        }
    return out


def build_tables(frame: Frame, sites: ActiveSites) -> None:
    """Every table and index of a frame; rows of arguments and caches aren't picked."""
    for name, source in frame.interface.inputs.items():
        match source:
            case Given():
                pass
            case Halo() | Rest() | Loaded():
                frame.layout.picks(source)
            case RestStats(_, segments) | RestSum(_, segments):
                sites.active(segments[0])
            case Pairs(_, queries, keys):
                frame.layout.order(queries, with_rest=False)
                frame.layout.order(keys, with_rest=True)
            case _:
                frame._input(name, source, ())


def measure_fixed(sides: Sequence[str], rounds: int) -> dict[str, Any]:
    """One active site of a tiny denoiser: what an edit costs however little there is to compute."""
    contest = prepare(shapes.TINY_UNET, sides, say)
    grid = torch.zeros(8, 8, dtype=torch.bool)
    grid[3, 4] = True
    mask = measure_mask(contest, "one site", 1 / 64, grid, rounds)
    out: dict[str, Any] = {
        "asked": "an edit of one site takes at most as long as the dense call",
        "seconds": mask["seconds"],
        "failures": contest.failures,
    }
    for side, own in mask["ours"].items():
        slower = flipped(own["to_dense"]) if own["to_dense"] else None
        out[side] = {
            "edit_over_dense": slower,
            "met": slower["median"] <= 1 if slower else None,
            "error": own["error"],
        }
    return out


def measure_depth() -> dict[str, Any]:
    """Capture and passes of denoisers at their real depth; weights on the meta device."""
    out: dict[str, Any] = {"asked": "< 60 s each"}
    for shape in shapes.FULL_DEPTH:
        say(f"capturing {shape.title}")
        with torch.device("meta"):
            module = shape.build()
        inputs = pytree.tree_map_only(Tensor, lambda v: v.to("meta"), shape.inputs(0))
        try:
            start, cpu = time.perf_counter(), time.process_time()
            denoiser = maskfx.compile(module, example_inputs=inputs)
            total, cpu = time.perf_counter() - start, time.process_time() - cpu
        except Exception as error:  # noted; the other denoiser goes on
            out[shape.name] = {"failed": harness.describe(error)}
            continue
        compilation = denoiser.compilations[0]
        records: list[dict[str, Any]] = [
            {"pass": r.name, "rewrites": r.rewrites, "ms": round(r.ms, 1), "nodes": r.nodes}
            for r in compilation.records
        ]
        out[shape.name] = {
            "title": shape.title,
            "capture_seconds": total - compilation.seconds,
            "passes_seconds": compilation.seconds,
            "last_round_of_passes_seconds": sum(r["ms"] for r in records) / 1e3,
            "total_seconds": total,
            "total_cpu_seconds": cpu,  # far below the total if other processes held the cores
            "met": total < 60,
            "narrowed": compilation.program is not None,
            "left_dense": compilation.reasons,
            "passes": records,
        }
    return out


# A whole shape.


def run_shape(name: str, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Everything about one denoiser."""
    shape = sized(shapes.choose(name, options.quick), options.latent)
    result = start_result(name, shape.title, options, arguments)
    contest = prepare(shape, options.sides, say)
    if not contest.dense or not contest.ours:
        say("no dense side or none of ours works: times only, no ratios")
    result["masks"] = []
    for kind, asked, grid in plan_masks(shape.size, options.masks, options.ratios, options.seed):
        say(f"{name}: {kind} {asked:g}")
        result["masks"].append(measure_mask(contest, kind, asked, grid, options.rounds))
    result["flops"] = {
        "dense": count_flops(lambda: contest.expected(contest.steps[0])),
        "request": result["masks"][0]["flops"]["request"] if result["masks"] else 0,
    }
    extras: dict[str, Any] = {}
    for mask in result["masks"]:
        if mask["kind"] == "full":
            extras["all sites"] = full_cost(mask)
    work: dict[str, Callable[[], dict[str, Any]]] = {}
    if contest.ours:
        if name == "a":
            work["ragged"] = lambda: measure_ragged(
                contest, options.quick, options.ragged_compiled, options.rounds
            )
        work["tables"] = lambda: measure_tables(contest, max(20, options.rounds))
    work["memory"] = lambda: memory.measure(name, options.quick, "square", 0.2, options.threads)
    run_extras(work, options.extras, extras, contest.failures)
    result["extras"], result["failures"] = extras, contest.failures
    return result


def sized(shape: shapes.Shape, latent: str | None) -> shapes.Shape:
    """The shape with another latent, or packed tokens, of as many rows and columns."""
    if latent is None:
        return shape
    height, width = map(int, latent.split("x"))
    size = replace(shape.size, height=height, width=width)
    return replace(shape, title=f"{shape.title}; here {latent}", size=size)


def full_cost(mask: dict[str, Any]) -> dict[str, Any]:
    """All sites active: how much longer than dense it takes."""
    out: dict[str, Any] = {"asked": "at most 1.15 times the best dense side"}
    for side, own in mask["ours"].items():
        best = own["to_best"]
        if best is None:
            continue
        over = flipped(best)
        out[side] = {"over_best_dense": over, "met": over["median"] <= 1.15}
    return out


def run_general(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """What doesn't belong to one shape."""
    result = start_result("general", "fixed cost and full depth", options, arguments)
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "fixed": lambda: measure_fixed(options.sides, 5 * options.rounds),
        "depth": measure_depth,
    }
    result["extras"], result["failures"] = {}, {}
    run_extras(work, options.extras, result["extras"], result["failures"])
    return result


def run_extras(
    work: dict[str, Callable[[], dict[str, Any]]],
    wanted: Sequence[str],
    done: dict[str, Any],
    failures: dict[str, str],
) -> None:
    for extra, measure in work.items():
        if extra not in wanted:
            continue
        say(extra)
        try:
            done[extra] = measure()
        except Exception as error:  # noted; the rest goes on
            failures[extra] = harness.describe(error)


def start_result(
    name: str, title: str, options: argparse.Namespace, arguments: Sequence[str]
) -> dict[str, Any]:
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(options).items()}
    settings["out"] = Path(options.out).name
    return {
        **harness.header("bench.denoisers", arguments),
        "settings": settings,
        "shape": name,
        "title": title,
    }


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; --quick changes defaults only, so that others still count."""
    names = [*shapes.SHAPES, "general"]
    parser = argparse.ArgumentParser(
        prog="bench.denoisers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--shape", help=f"one or more of {', '.join(names)}, or all (default)")
    add("--sides", help="names separated by commas: dense, dense-channels-last, dense-compile,\n"
        "dense-compile-channels-last, dense-freezing, ours-eager, ours-inductor, ours-prepack;\n"
        "groups all-dense, ours, all (default); --sides=-ours-prepack takes one away")  # fmt: skip
    add("--latent", help="sites of the latent, as 48x56 (default: that of the shape)")
    add("--ratios", help="mask ratios separated by commas (default .05,.11,.2,.35,.5,1)")
    add("--masks", default=",".join(masks.KINDS), help="mask kinds: square,strokes")
    add("--rounds", type=int, help="rounds per mask (default 9)")
    add("--threads", type=int, default=2, help="threads of every side (default 2)")
    add("--seed", type=int, default=0, help="seed of the strokes")
    add("--extras", help=f"what else to measure: some of {','.join(EXTRAS)}, or none (default all)")
    add("--ragged-compiled", action="store_true", help="compile the dense sides for every size of\n"
        "the ragged batch; without it they run eagerly there")  # fmt: skip
    add("--quick", action="store_true", help="small shape a, ratio .11, 3 rounds, eager sides")
    add("--out", default=str(harness.ROOT / "bench" / "results"), help="folder of results")
    options = parser.parse_args(arguments)
    quick = options.quick
    shape = options.shape or ("a,general" if quick else "all")
    options.shape = tuple(names) if shape == "all" else tuple(shape.split(","))
    unknown = [s for s in options.shape if s not in names]
    if unknown:
        parser.error(f"--shape {unknown[0]}: choose from {', '.join(names)}, all")
    try:
        options.sides = read_sides(
            options.sides or ("dense,dense-channels-last,ours-eager" if quick else "all")
        )
        given = options.ratios.split(",") if options.ratios else ((0.11,) if quick else RATIOS)
        options.ratios = tuple(float(r) for r in given)
    except ValueError as error:
        parser.error(str(error))
    options.masks = tuple(options.masks.split(","))
    options.rounds = options.rounds or (3 if quick else 9)
    extras = options.extras or ("ragged,tables,memory,fixed" if quick else ",".join(EXTRAS))
    options.extras = () if extras == "none" else tuple(extras.split(","))
    for given_extra in options.extras:
        if given_extra not in EXTRAS:
            parser.error(f"--extras {given_extra}: choose from {', '.join(EXTRAS)}, none")
    for kind in options.masks:
        if kind not in masks.KINDS:
            parser.error(f"--masks {kind}: choose from {', '.join(masks.KINDS)}")
    return options


def main(arguments: Sequence[str]) -> int:
    options = read_options(arguments)
    torch.set_num_threads(options.threads)
    wrong = False
    for name in options.shape:
        result = (
            run_general(options, arguments)
            if name == "general"
            else run_shape(name, options, arguments)
        )
        out = Path(options.out)
        file = f"denoisers-{name}" + (f"-{options.latent}" if options.latent else "")
        harness.write_json(out / f"{file}.json", result)
        if result.get("masks") and not options.latent:
            report.plot(result, out / f"{file}.png")
        print("\n".join(report.lines_of(result)), flush=True)
        wrong |= any(not o["correct"] for m in result.get("masks", ()) for o in m["ours"].values())
    return 1 if wrong else 0
