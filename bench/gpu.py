"""Everything that a GPU decides, in one command: `python -m bench.gpu`.

Checks the oracle in fp32, bf16 and fp16, and two ranks on one device (with two GPUs also over
NCCL), checks and measures the operators that have kernels, and then measures denoisers of real
depth and width with random weights: edits against the module as diffusers runs it, as one CUDA
graph, and as one with compiled blocks, the host's share of a step, loads from host memory, a
ControlNet in a process of its own, FLOPs against the device's own peak, and memory.

Each part is written to the result when it ends, and parts that are there for the same commit and
device are skipped, so a run can be cut into pieces: `--seconds 420` begins no part after that time.
`--device cpu --small` runs all of it with small stand-ins, to test the command itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import maskfx
from bench import harness, kernels, masks, shapes
from bench.gpu_nets import nets
from bench.harness import Figure, alternate, count_flops, figure, ratio
from bench.ranks import on_devices
from bench.shapes import Inputs, Shape
from maskfx import EditStep, Loader, StepCache
from maskfx.runtime.backends.cuda_graphs import CudaRecorder
from maskfx.runtime.cache.movers import DeviceMover, HostMover
from maskfx.runtime.cache.step_cache import with_tensors

OUT = Path(__file__).resolve().parent / "results" / "gpu.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 1.0)
BATCHES = (1, 4, 8)
ASKED: dict[str, dict[float, float]] = {
    "sd21": {0.05: 8, 0.2: 4},
    "sdxl": {0.05: 8, 0.2: 3.5},
    "flux": {0.05: 5, 0.2: 3},
}
EXACT, ROUNDED = 1e-4, 2.0  # fp32: relative error; else: times the module's own rounding
TOP = 12  # kernels listed by time
ROW = 10  # steps that follow each other without a wait


class Bench:
    """One denoiser on a device: the module, what is compiled from it, and recordings."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.module = build(shape, device, dtype)

    def inputs(self, seed: int) -> Inputs:
        found: Inputs = pytree.tree_map_only(Tensor, self._moved, self.shape.inputs(seed))
        return found

    def _moved(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def together(self, count: int) -> Inputs:
        """One call with this many samples; what has no batch stays as it is."""
        one = self.inputs(0)
        shared = ("img_ids", "txt_ids")

        def repeated(value: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda v: v.expand(count, *v.shape[1:]), value)

        return {k: v if k in shared else repeated(v) for k, v in one.items()}

    @cached_property
    def eager(self) -> maskfx.CompiledDenoiser:
        found: maskfx.CompiledDenoiser = maskfx.compile(self.module, cuda_graphs=False)
        return found

    @cached_property
    def compiled(self) -> maskfx.CompiledDenoiser:
        found: maskfx.CompiledDenoiser = maskfx.compile(self.module, inductor=True)
        return found

    @cached_property
    def recorded(self) -> StepCache:
        return self.eager.record(**self.inputs(0))[1]

    def edits(self, share: float, count: int, cache: StepCache | None = None) -> list[EditStep]:
        size = self.shape.size
        return [
            EditStep(
                self.inputs(seed),
                self.shape.as_mask(masks.make("square", size.height, size.width, share, seed)),
                cache or self.recorded,
                any_step=True,
            )
            for seed in range(count)
        ]


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A denoiser with random weights, made on the device and in its type."""
    import diffusers

    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module: nn.Module = getattr(diffusers, shape.class_name)(**shape.config)
    finally:
        torch.set_default_dtype(before)
    module = module.to(device, dtype).eval().requires_grad_(False)
    for parameter in module.parameters():
        if not bool(parameter.any()):
            parameter.normal_(std=0.02)
    return module


def synchronized(run: Callable[[], Any], device: torch.device) -> Callable[[int], None]:
    def call(_: int) -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return call


@contextmanager
def freed() -> Iterator[None]:
    """Give memory back at the end of a part."""
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# The parts.


def oracle(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Edits of several masks and sizes in one batch, each with a recording of its own inputs.

    In a narrower type both the edit and the module are compared with the module in fp32.
    """
    torch.backends.cudnn.allow_tf32 = False  # of the module; fp32 is exact here
    bench = Bench(shape, device, dtype)
    given = [bench.inputs(seed) for seed in range(3)]
    caches = [bench.eager.record(**inputs)[1] for inputs in given]
    size = shape.size
    grids = [masks.make("strokes", size.height, size.width, r, 7) for r in (0.05, 0.2, 0.5)]
    steps = [
        EditStep(inputs, shape.as_mask(grid), with_tensors(cache, torch.clone))
        for inputs, grid, cache in zip(given, grids, caches, strict=True)
    ]
    for step in steps:
        for value in step.cache.output:
            if isinstance(value, Tensor):
                value.zero_()  # what the edit doesn't compute isn't compared
    with torch.no_grad():
        dense = [bench.module(**inputs)[0] for inputs in given]
        wide = bench.module.float()
        wanted = [wide(**pytree.tree_map_only(Tensor, widened, i))[0] for i in given]
        bench.module.to(dtype)
        found = [output[0] for output in bench.eager.edit(steps)]
    edit, own = 0.0, 0.0
    for seen, plain, exact, grid in zip(found, dense, wanted, grids, strict=True):
        a, b, c = (shape.masked(v.float(), grid.to(device)) for v in (seen, plain, exact))
        edit = max(edit, float((a - c).norm() / c.norm()))
        own = max(own, float((b - c).norm() / c.norm()))
    limit = EXACT if dtype == torch.float32 else ROUNDED * own
    return {"error": edit, "modules_own_error": own, "limit": limit, "correct": edit < limit}


def widened(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def speed(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    count: int,
    rounds: int,
    inductor: bool = False,
) -> dict[str, Any]:
    """Edits of each mask ratio in a batch, against the module on as many samples."""
    bench = Bench(shape, device, dtype)
    replayed = maskfx.compile(bench.module)
    measured: dict[str, Any] = {}
    asked = ASKED.get(shape.name, {})
    sides, failed_sides = dense_sides(bench, count)
    for share in RATIOS:
        steps = bench.edits(share, count)
        runs: dict[str, Callable[[], Any]] = {
            **sides,
            "edit": partial(bench.eager.edit, steps),
            "edit, CUDA graph": partial(replayed.edit, steps),
        }
        if inductor:
            runs["edit, Inductor"] = partial(bench.compiled.edit, steps)
        working, failed = {}, dict(failed_sides)
        with torch.no_grad():
            for name, run in runs.items():
                try:
                    for _ in range(3):  # kernels are tuned, and the second run is captured
                        synchronized(run, device)(0)
                    working[name] = synchronized(run, device)
                except Exception as error:  # noted; the other sides go on
                    failed[name] = harness.describe(error)
            seconds = alternate(working, rounds)
        measured[f"{share:g}"] = compared(seconds, failed, asked.get(share))
    return {"samples": count, "masks": measured}


def dense_sides(bench: Bench, count: int) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return the module as it is, as one CUDA graph, and as one with compiled blocks."""
    given = bench.together(count)
    other = build(bench.shape, bench.device, bench.dtype)  # compiled blocks stay compiled
    sides: dict[str, Callable[[], Any]] = {"dense": partial(bench.module, **given)}
    failed: dict[str, str] = {}
    with torch.no_grad():
        for name, module in (
            ("dense, CUDA graph", bench.module),
            ("dense, compiled blocks, CUDA graph", other),
        ):
            try:
                if module is other:
                    compile_blocks: Any = other.compile_repeated_blocks
                    compile_blocks(dynamic=False)
                sides[name] = graphed(partial(module, **given), bench.device)
            except Exception as error:  # noted; the other sides go on
                failed[name] = harness.describe(error)
    return sides, failed


def graphed(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A call captured as one CUDA graph; on a CPU the call itself."""
    if device.type != "cuda":
        return run
    results, replay = CudaRecorder(device).capture(lambda: list(run()))

    def again() -> Any:
        replay()
        return results

    return again


def compared(
    seconds: dict[str, list[float]], failed: dict[str, str], asked: float | None
) -> dict[str, Any]:
    """The best side of each kind, round by round."""

    def best(kind: str) -> str | None:
        names = [name for name in seconds if name.startswith(kind)]
        return min(names, key=lambda n: figure(seconds[n])["median"], default=None)

    dense, ours = best("dense"), best("edit")
    faster: Figure | None = ratio(seconds[dense], seconds[ours]) if dense and ours else None
    return {
        "seconds": {name: figure(samples) for name, samples in seconds.items()},
        "best_dense": dense,
        "best_edit": ours,
        "times": faster,
        "asked": asked,
        "met": None if asked is None or faster is None else faster["median"] >= asked,
        "failed": failed,
    }


def trace(shape: Shape, device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """The host's share of an edit, kernels by time, and FLOPs against the peak of a product.

    Edits run operator by operator and replayed; of each also the seconds until the host is free
    again, and those of a step among `ROW` that follow each other without a wait, as in a pipeline.
    """
    bench = Bench(shape, device, dtype)
    replayed = maskfx.compile(bench.module)
    peak = peak_flops(device, dtype)
    out: dict[str, Any] = {"peak_tflops": peak / 1e12, "masks": {}}
    for share in (0.05, 0.2):
        steps = bench.edits(share, 1)
        flops = count_flops(partial(bench.eager.edit, steps))["total"]
        for name, denoiser in (("", replayed), (", operator by operator", bench.eager)):
            found = traced(partial(denoiser.edit, steps), device, rounds)
            found |= {"flops": flops, "of_peak": flops / found["wall_seconds"] / peak}
            out["masks"][f"{share:g}{name}"] = found
    return out


def traced(edit: Callable[[], Any], device: torch.device, rounds: int) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    run = synchronized(edit, device)
    for _ in range(3):
        run(0)
    seconds = alternate({"alone": run, "in a row": partial(in_a_row, run, edit)}, rounds)
    wall = figure(seconds["alone"])["median"]
    row = figure(seconds["in a row"])["median"] / ROW
    began = time.perf_counter()
    edit()
    host = time.perf_counter() - began
    run(0)
    with profile(activities=activities) as seen:
        run(0)
    kernels = {event.key: kernel_seconds(event, device) for event in seen.key_averages()}
    busy = sum(kernels.values())
    first = sorted(kernels.items(), key=lambda item: -item[1])[:TOP]
    return {
        "wall_seconds": wall,
        "host_seconds": host,
        "in_a_row_seconds": row,
        "kernel_seconds": busy,
        "beyond_kernels": max(0.0, 1 - busy / wall),
        "beyond_kernels_in_a_row": max(0.0, 1 - busy / row),
        "kernels": {name[:80]: seconds / busy for name, seconds in first if busy},
    }


def in_a_row(run: Callable[[int], None], edit: Callable[[], Any], number: int) -> None:
    for _ in range(ROW - 1):
        edit()
    run(number)


def kernel_seconds(event: Any, device: torch.device) -> float:
    micro = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
    return float(micro) / 1e6


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large matrix product on this device."""
    side = 8192 if device.type == "cuda" else 512
    a = torch.randn(side, side, device=device).to(dtype)
    run = synchronized(lambda: a @ a, device)
    run(0)
    return 2 * side**3 / figure(alternate({"": run}, 5)[""])["min"]


def operators(device: torch.device, dtype: torch.dtype, rounds: int, small: bool) -> dict[str, Any]:
    """Each operator that has a kernel: its error, and its share of the device's peaks."""
    return kernels.measure(device, dtype, rounds, small, peak_flops(device, dtype))


def loads(shape: Shape, device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Recorded rows in host memory: loaded while the graph computes, in turns, and at hand."""
    bench = Bench(shape, device, dtype)
    mover = DeviceMover(device) if device.type == "cuda" else HostMover()
    host = mover.to_host(bench.recorded)
    out: dict[str, Any] = {"recording_bytes": host.nbytes(), "masks": {}}
    loaders = {"overlapped": Loader(), "in turns": Loader(overlap=False)}
    denoisers = {name: maskfx.compile(bench.module, loader=own) for name, own in loaders.items()}
    planned = maskfx.compile(bench.module, loader=Loader(), plans=True)
    own = mover.to_host(planned.record(**bench.inputs(0))[1])  # its graph reads other rows
    for share in (0.05, 0.2, 0.5):
        runs = {"at hand": synchronized(partial(bench.eager.edit, bench.edits(share, 1)), device)}
        for name, denoiser in {**denoisers, "planned graph": planned}.items():
            held = own if denoiser is planned else host
            run = partial(denoiser.edit, bench.edits(share, 1, held))
            runs[name] = synchronized(run, device)
        for warm_up in runs.values():
            warm_up(0)
        before = loaders["in turns"].loaded_bytes
        runs["in turns"](0)
        seconds = alternate(runs, rounds)
        out["masks"][f"{share:g}"] = {
            "seconds": {name: figure(samples) for name, samples in seconds.items()},
            "loaded_bytes": loaders["in turns"].loaded_bytes - before,
            "overlapped_over_at_hand": ratio(seconds["overlapped"], seconds["at hand"]),
            "in_turns_over_overlapped": ratio(seconds["in turns"], seconds["overlapped"]),
        }
    return out


def memory(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes of weights, of a recording, and the peak of a dense call and of an edit."""
    bench = Bench(shape, device, dtype)
    weights = sum(p.nbytes for p in bench.module.parameters())
    steps = bench.edits(0.2, 1)
    bench.eager.edit(steps)

    def peak(run: Callable[[], Any]) -> int:
        if device.type != "cuda":
            return harness.peak_growth(run)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    with torch.no_grad():
        dense = peak(lambda: bench.module(**bench.inputs(0)))
        edit = peak(lambda: bench.eager.edit(steps))
    recording = bench.recorded.nbytes()
    return {"weights": weights, "recording": recording, "dense_peak": dense, "edit_peak": edit}


# The command.


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield all parts by name: first whether it is right, then how fast it is."""
    device = torch.device(options.device)
    for name in shapes.SHAPES:
        for label, dtype in DTYPES.items():
            yield (
                f"oracle {name} {label}",
                partial(oracle, shapes.choose(name, True), device, dtype),
            )
    for backend in on_devices.links(device):
        shape = shapes.choose("a", True)
        given = shape, build, device, backend, options.rounds
        yield f"ranks {backend}", partial(on_devices.check, *given)
    own = torch.float32 if options.small else torch.bfloat16
    yield "nets", partial(nets, device, options.rounds, options.small)
    yield "kernels", partial(operators, device, own, options.rounds, options.small)
    if options.small:
        large, dtype = [shapes.choose(name, True) for name in ("a", "c")], torch.float32
    else:
        large, dtype = [shapes.SHORT_FLUX, *shapes.FULL_DEPTH], torch.bfloat16
    for shape in large:
        for count in BATCHES:
            yield (
                f"speed {shape.name} {count}",
                partial(speed, shape, device, dtype, count, options.rounds, options.inductor),
            )
        yield f"trace {shape.name}", partial(trace, shape, device, dtype, options.rounds)
        yield f"loads {shape.name}", partial(loads, shape, device, dtype, options.rounds)
        yield f"memory {shape.name}", partial(memory, shape, device, dtype)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def read_result(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """The parts that are there already, if commit, device and sizes are the same."""
    head = harness.header("bench.gpu", arguments)
    head["device"] = device_name(torch.device(options.device))
    head["small"] = options.small
    if options.out.exists() and not options.again:
        known: dict[str, Any] = json.loads(options.out.read_text())
        if all(known.get(key) == head[key] for key in ("commit", "device", "small")):
            return {**head, "parts": known["parts"]}
    return {**head, "parts": {}}


def verdict(found: dict[str, Any]) -> str:
    return "correct" if found["correct"] else "WRONG"


def line(name: str, found: dict[str, Any]) -> str:
    """What a part found, in one line; one more for each operator."""
    if "failed" in found:
        return f"{name}: failed: {found['failed']}"
    if "correct" in found:
        lines = [f"{name}: error {found['error']:.1e}, {verdict(found)}"]
        if "in_line_over_process" in found:
            times = found["in_line_over_process"]["median"]
            lines.append(f"  in a process of its own {times:.2f}x as fast as in line")
        for case, row in found.get("cases", {}).items():
            lines.append(
                f"  {case}: {row['times']:.2f}x the plain operator, {row['of_roofline']:.0%} of "
                f"what {row['bound']} allow, error {row['error']:.1e}, {verdict(row)}"
            )
        return "\n".join(lines)
    shown = []
    for share, row in found.get("masks", {}).items():
        for key in ("times", "overlapped_over_at_hand"):
            if row.get(key):
                shown.append(f"m {share}: {row[key]['median']:.2f}x")
        if "beyond_kernels" in row:
            alone, among = row["beyond_kernels"], row["beyond_kernels_in_a_row"]
            shown.append(f"m {share}: {alone:.0%} beyond kernels, {among:.0%} in a row")
    sizes = [f"{key} {value / 2**20:.0f} MiB" for key, value in found.items() if "peak" in key]
    return f"{name}: {', '.join(shown or sizes)}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small stand-ins in fp32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", nargs="*", default=[], help="parts whose names contain these")
    parser.add_argument("--inductor", action="store_true", help="measure Inductor's edits too")
    parser.add_argument("--again", action="store_true", help="measure parts that are there again")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device: --device cpu --small runs small stand-ins here", file=sys.stderr)
        return 2
    result, end = read_result(options, arguments), time.monotonic() + options.seconds
    left = 0
    for name, run in parts(options):
        if name in result["parts"] or options.only and not any(o in name for o in options.only):
            continue
        if time.monotonic() > end:
            left += 1
            continue
        with freed():
            try:
                result["parts"][name] = run()
            except Exception as error:  # noted; the other parts go on
                result["parts"][name] = {"failed": harness.describe(error)}
        print(line(name, result["parts"][name]), flush=True)
        harness.write_json(options.out, result)
    if left:
        print(f"{left} parts are left: run the command again")
    return int(any(not part.get("correct", True) for part in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
