"""A dense step of Flux on two processes: our ranks, and context parallelism of diffusers.

    OMP_NUM_THREADS=1 python -m bench.ranks.beside_diffusers
    OMP_NUM_THREADS=1 python -m bench.ranks.beside_diffusers --side 32 --rounds 3

Diffusers divides the tokens of a transformer, text and picture, over the processes of a group, and
the heads of its attentions in an all-to-all exchange (Ulysses). `enable_parallelism` refuses CPUs
and a second call, so its hooks are applied by hand, over a gloo world of two processes of one
thread. Its ring attention needs an attention that returns its log-sum-exps, which diffusers has on
GPUs alone. Sides, in turn: the module in one process, our ranks with gathered keys and with divided
heads, over rings and over gloo, and diffusers. The text is divided on all sides. Results of all
sides are compared with the module's; so is one for a latent that is 1e-4 larger, to show that the
comparison sees a difference. Our ranks have an error of exactly 0 where the module's operators
compute each row alone: a rank's rows, and the order of the keys that they attend to, are those of
one process. Writes ranks-beside-diffusers.json to bench/results. With
fewer idle cores than processes, the ratios mean little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maskfx
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.ranks.shapes import shape_of
from bench.report import columns
from bench.shapes import Shape
from maskfx import DenseStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_group import RankGroup
from maskfx.distributed.ranks import Ranks
from maskfx.ir.programs.head_sources import AttentionWay

DEGREE = 2
EVEN = Partition(((1.0,) * DEGREE,), (True,))
CONTROL = "module, another latent"
ALONE, DIFFUSERS = "module, one process", "diffusers, Ulysses over gloo"
OURS: dict[str, tuple[str, AttentionWay]] = {
    "ranks, gathered keys": ("rings", "gathered"),
    "ranks, divided heads": ("rings", "heads"),
    "ranks over gloo, gathered keys": ("gloo", "gathered"),
    "ranks over gloo, divided heads": ("gloo", "heads"),
}


def context_parallel(shape: Shape, rank: int, store: str, calls: Connection) -> None:
    """Be one process of diffusers' context parallelism: answer each message with a step."""
    import torch.distributed as dist
    from diffusers import ContextParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=DEGREE)
    own = ContextParallelConfig(ulysses_degree=DEGREE)
    config = ParallelConfig(context_parallel_config=own)
    mesh = init_device_mesh("cpu", own.mesh_shape, mesh_dim_names=own.mesh_dim_names)
    config.setup(rank, DEGREE, torch.device("cpu"), mesh=mesh)
    module: Any = shape.build()
    for part in module.modules():
        processor = getattr(part, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = config
    apply_context_parallel(module, own, module._cp_plan)
    calls.send("ready")
    while (inputs := calls.recv()) is not None:
        with torch.no_grad():
            calls.send(module(**inputs)[0])
    dist.destroy_process_group()


class ContextParallel:
    """Two such processes."""

    def __init__(self, shape: Shape, folder: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.ends, self.processes = [], []
        for rank in range(DEGREE):
            end, other = spawn.Pipe()
            given = shape, rank, f"{folder}/store", other
            process = spawn.Process(target=context_parallel, args=given, daemon=True)
            process.start()
            self.ends.append(end)
            self.processes.append(process)
        assert [end.recv() for end in self.ends] == ["ready"] * DEGREE

    def step(self, inputs: dict[str, Any]) -> Tensor:
        for end in self.ends:
            end.send(inputs)
        found: list[Tensor] = [end.recv() for end in self.ends]
        return found[0]

    def stop(self) -> None:
        for end, process in zip(self.ends, self.processes, strict=True):
            end.send(None)
            process.join(20)


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    denoiser = maskfx.compile(shape.build())
    inputs = shape.inputs(40)
    groups = {
        backend: RankGroup(denoiser, Ranks(DEGREE, backend=backend))
        for backend in ("rings", "gloo")
    }
    results: dict[str, Tensor] = {}
    sent: dict[str, list[int]] = {}
    other = denoiser.plain(**{**inputs, "hidden_states": 1.0001 * inputs["hidden_states"]})[0]

    def ours(name: str) -> None:
        backend, way = OURS[name]
        split = groups[backend].on(DEGREE, EVEN, way)
        results[name] = denoiser.step([DenseStep(inputs)], split)[0][0]
        sent[name] = [part.sent for part in groups[backend].last if part is not None]

    with tempfile.TemporaryDirectory() as folder:
        theirs = ContextParallel(shape, folder)

        def alone(_: int) -> None:
            results[ALONE] = denoiser.plain(**inputs)[0]

        def diffusers(_: int) -> None:
            results[DIFFUSERS] = theirs.step(inputs)

        sides: dict[str, Callable[[int], None]] = {
            ALONE: alone,
            **{name: lambda _, name=name: ours(name) for name in OURS},
            DIFFUSERS: diffusers,
        }
        try:
            times = {n: took[1:] for n, took in alternate(sides, rounds + 1).items()}
            assert not any(group.computed_here + group.failures for group in groups.values())
        finally:
            theirs.stop()
            for group in groups.values():
                group.stop()
    whole = results[ALONE]
    rows = {
        name: {
            "seconds": figure(times[name]),
            "times faster than one process": ratio(times[ALONE], times[name]),
            "error": error(results[name], whole),
            "sent": sent.get(name, []),
        }
        for name in sides
    }
    return {CONTROL: {"error": error(other, whole)}, **rows}


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def table(rows: dict[str, Any]) -> str:
    lines = [["side", "ms", "times faster", "error", "KiB sent"]]
    for name, row in rows.items():
        if name == CONTROL:
            lines.append([name, "", "", f"{row['error']:.0e}", ""])
            continue
        ms = f"{1000 * row['seconds']['median']:.0f}"
        faster = f"{row['times faster than one process']['median']:.2f}"
        sent = f"{sum(row['sent']) / 1024:.0f}" if row["sent"] else ""
        lines.append([name, ms, faster, f"{row['error']:.0e}", sent])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    name = "bench.ranks.beside_diffusers"
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--side", type=int, default=64, help="of the latent")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = header(name, given)
    shape = shape_of("flux", options.side)
    result["shape"] = shape.title
    result["sides"] = measure(shape, options.rounds)
    print(shape.title, table(result["sides"]), sep="\n")
    write_json(options.out / "ranks-beside-diffusers.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
