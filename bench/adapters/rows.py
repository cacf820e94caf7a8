"""Requests with different adapters in one batch: against one after another, and without adapters.

    OMP_NUM_THREADS=1 python -m bench.adapters.rows --threads 1

Eight edits of one mask, each with an adapter of its own, of ranks 4 to 128, on all linear layers
and convolutions. They run as one batch; one after another, each as a batch of its own; one after
another by the module, whose layers have the terms beside them, as PEFT has them; and as the same
batch without adapters. Before timing, each member is compared with the module with merged weights.
Beside the seconds stand those of this process on its core, which other processes disturb less.
Writes bench/results/adapters-rows.json.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import maskfx
from bench import harness, masks, shapes
from bench.report import columns, milliseconds, times
from bench.reuse import enlarge
from maskfx.runtime.lora.adapter import LowRank, WeightedLayers

RANKS = (4, 8, 16, 32, 64, 128, 16, 32)
RATIO = 0.1
BATCH, ALONE, MODULE, PLAIN = "one batch", "one after another", "module", "without adapters"


def adapter_of(module: nn.Module, rank: int, seed: int) -> WeightedLayers:
    """Random updates of all linear layers and convolutions, a tenth as long as the weights."""
    draw = torch.Generator().manual_seed(seed)
    layers = {}
    for path, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            weight = layer.weight
            down = torch.randn(rank, *weight.shape[1:], generator=draw)
            up = torch.randn(weight.shape[0], rank, generator=draw)
            length = float(weight.detach().norm()) / (float(up.norm()) * float(down.norm()))
            layers[path] = LowRank(down, up, 0.1 * rank**0.5 * length)
    return WeightedLayers(layers, 1.0, f"{rank}.{seed}")


def merged(module: nn.Module, own: WeightedLayers) -> nn.Module:
    copied = copy.deepcopy(module)
    for path, layer in own.layers.items():
        weight: Any = copied.get_submodule(path).weight
        weight.data += layer.scale * (layer.up @ layer.down.flatten(1)).view(weight.shape)
    return copied


class Bed:
    """One denoiser, and edits of it with and without adapters."""

    def __init__(self, shape: shapes.Shape, ranks: Sequence[int]) -> None:
        self.shape, self.module = shape, enlarge(shape.build())
        self.denoiser = maskfx.compile(self.module)
        self.adapters = [adapter_of(self.module, rank, i) for i, rank in enumerate(ranks)]
        self.inputs = [shape.inputs(i) for i in range(len(ranks))]
        grid = masks.make("square", shape.size.height, shape.size.width, RATIO)
        self.mask = shape.as_mask(grid)
        self.kept = [self.denoiser.record(**one)[1] for one in self.inputs]
        pairs = list(zip(self.inputs, self.adapters, strict=True))
        recorded = self.denoiser.step([maskfx.RecordStep(i, [own]) for i, own in pairs])
        self.adapted = [
            maskfx.EditStep(i, self.mask, cache, adapters=[own])
            for (i, own), (_, cache) in zip(pairs, recorded, strict=True)
        ]
        self.plain = [
            maskfx.EditStep(i, self.mask, cache)
            for i, cache in zip(self.inputs, self.kept, strict=True)
        ]
        self.dense = [maskfx.DenseStep(i, [own]) for i, own in pairs]

    def sides(self) -> dict[str, Callable[[int], Any]]:
        return {
            BATCH: lambda _: self.denoiser.step(self.adapted),
            ALONE: lambda _: [self.denoiser.step([one]) for one in self.adapted],
            MODULE: lambda _: [self.denoiser.plain_step(one) for one in self.dense],
            PLAIN: lambda _: self.denoiser.step(self.plain),
        }

    def error(self) -> float:
        """The largest relative error of a member against the module with merged weights."""
        found = self.denoiser.step(self.adapted)
        wanted = [
            merged(self.module, own)(**one)
            for one, own in zip(self.inputs, self.adapters, strict=True)
        ]
        return max(map(relative_error, found, wanted))


def clocked(run: Callable[[int], Any], seconds: list[float]) -> Callable[[int], Any]:
    """Return a function that also notes the seconds that this process computes."""

    def timed(round_: int) -> Any:
        began = time.process_time()
        result = run(round_)
        seconds.append(time.process_time() - began)
        return result

    return timed


def relative_error(found: Any, wanted: Any) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if isinstance(a, Tensor))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="c")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shallow", action="store_true", help="3 of a Flux' blocks, whole width")
    parser.add_argument("--small", action="store_true", help="a small stand-in for the shape")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = shapes.choose(options.shape, options.small)
    if options.shallow:
        config = {**shape.config, "num_layers": 1, "num_single_layers": 2}
        shape = replace(shape, config=config, title=f"{shape.title}; 1 + 2 blocks of them")
    with torch.no_grad():
        bed = Bed(shape, RANKS)
        error = bed.error()
        made = bed.denoiser._executor.twins.made
        busy: dict[str, list[float]] = {}
        sides = {name: clocked(run, busy.setdefault(name, [])) for name, run in bed.sides().items()}
        for run in sides.values():  # warm
            run(0)
        for own in busy.values():
            own.clear()
        seconds = harness.alternate(sides, options.rounds)
        processor = {name: harness.figure(own) for name, own in busy.items()}
        pairs = ((MODULE, BATCH), (BATCH, PLAIN))
        ratios = [harness.ratio(busy[one], busy[other]) for one, other in pairs]
        counts = {
            name: harness.count_flops(partial(run, 0))["total"] for name, run in sides.items()
        }
    result = {
        **harness.header("bench.adapters.rows", arguments),
        "shape": shape.name,
        "title": shape.title,
        "masked": float(bed.mask.float().mean()),
        "ranks": RANKS,
        "adapter_megabytes": [
            sum(layer.nbytes for layer in own.layers.values()) / 1e6 for own in bed.adapters
        ],
        "rounds": options.rounds,
        "error_against_merged_weights": error,
        "twins": made,
        "twins_after_timing": bed.denoiser._executor.twins.made,
        "seconds": {name: harness.figure(own) for name, own in seconds.items()},
        "processor_seconds": processor,
        "flops": counts,
        "times_faster_than_one_after_another": harness.ratio(seconds[ALONE], seconds[BATCH]),
        "times_faster_than_module": harness.ratio(seconds[MODULE], seconds[BATCH]),
        "times_slower_than_without": harness.ratio(seconds[BATCH], seconds[PLAIN]),
        "processor_times_faster_than_module": ratios[0],
        "processor_times_slower_than_without": ratios[1],
    }
    name = f"adapters-rows{'-small' if options.small else ''}.json"
    harness.write_json(options.out / name, result)
    rows = [["side", "ms", "times one batch", "processor ms", "GFLOPs"]]
    rows += [
        [
            side,
            milliseconds(harness.figure(own)),
            times(harness.ratio(own, seconds[BATCH])),
            milliseconds(processor[side]),
            f"{counts[side] / 1e9:.1f}",
        ]
        for side, own in seconds.items()
    ]
    print(columns(rows))
    print(f"largest error against merged weights: {error:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
