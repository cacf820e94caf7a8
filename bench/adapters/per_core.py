"""What bounds pictures per processor second without masks and forecasts: products of both sides.

    OMP_NUM_THREADS=1 python -m bench.adapters.per_core --scale shipped

Requests have C ControlNets and L LoRA files (`--setting`, 2C/2L), all sites and all steps are
computed, so both sides compute the same products. Counted and measured, in processor seconds,
which other work on the machine disturbs less than wall time:

- FLOPs of a step of the UNet and of each net, and of encoding and decoding;
- the share of the processor's time that products, convolutions and attention take in a step;
- `diffusers`: its calls in serial, with loading, patching and un-patching;
- `bare`: the modules' calls alone, one request at a time;
- `maskfx`: the requests of `--batch` at once, with ControlNets in processes of their own: of the
  main process, and of the nets' processes.

The bound is diffusers' processor seconds over those of the bare modules: what free loading and a
free runtime would give. Katz's equations 1 and 2 and Gustafson's bound are printed beside it, from
parts that are timed in a run of diffusers (bench/adapters/latency_model.py). Writes
adapters-per-core-SCALE.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import maskfx
from bench import harness
from bench.adapters.latency_model import line, measured
from bench.adapters.settings import Bed, Side
from bench.adapters.workflow import SCALES, Setting, nets_of
from bench.report import columns

PRODUCTS = ("conv", "mm", "linear", "attention", "matmul")
ASKED = 1.7


def products_share(pipe: Any, call: dict[str, Any]) -> float:
    """The share of a call's processor time in operators that count FLOPs."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        pipe(**call)
    rows = [one for one in seen.key_averages() if one.key.startswith("aten::")]
    total = sum(one.self_cpu_time_total for one in rows)
    products = [one for one in rows if any(part in one.key for part in PRODUCTS)]
    return float(sum(one.self_cpu_time_total for one in products) / total)


def flops_of(bed: Bed) -> dict[str, float]:
    """FLOPs of one picture by part."""
    pipe, counts = bed.plain, dict[str, float]()
    parts = {"unet": (pipe.unet, "forward"), "encode": (pipe.vae, "encode")}
    parts["decode"] = (pipe.vae, "decode")
    parts |= {f"net {i}": (net, "forward") for i, net in enumerate(nets_of(pipe))}
    for name, (part, method) in parts.items():
        original = getattr(part, method)

        def counted(*args: Any, name: str = name, original: Any = original, **more: Any) -> Any:
            found: list[Any] = []
            flops = harness.count_flops(lambda: found.append(original(*args, **more)))
            counts[name] = counts.get(name, 0) + flops["total"]
            return found[0]

        part.__dict__[method] = counted
    pipe(**bed.call(0, masked=False))
    for part, method in parts.values():
        del part.__dict__[method]
    return counts


def own_seconds() -> float:
    return time.process_time()


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    bed = Bed(asked.setting, asked, folder)
    side = Side(masks=False, forecasts=False)
    spent: dict[str, list[float]] = {}

    def note(name: str, run: Any, requests: int) -> None:
        all_, own = harness.busy_seconds(), own_seconds()
        run()
        own, all_ = own_seconds() - own, harness.busy_seconds() - all_
        spent.setdefault(name, []).append(all_ / requests)
        spent.setdefault(f"{name}, main process", []).append(own / requests)

    def bare() -> None:
        bed.plain(**bed.call(0, masked=True))

    with maskfx.Engine(own_process=["controlnet"]) as engine:
        bare()
        bed.serial(1)
        bed.ours(engine, side, asked.batch)  # captures and starts processes
        for _ in range(asked.rounds):
            note("diffusers", lambda: bed.serial(1), 1)
            note("bare", bare, 1)
            note("maskfx", lambda: bed.ours(engine, side, asked.batch), asked.batch)
    flops = flops_of(bed)
    share = products_share(bed.plain, bed.call(0, masked=True))
    katz = measured(bed.plain, partial(bed.call, 0, True), bed.nets, bed.files(0))
    return {
        **katz.report(),
        "asked": ASKED,
        "flops_of_a_picture": flops,
        "share_of_time_in_products": share,
        "processor_seconds_of_a_picture": {n: harness.figure(own) for n, own in spent.items()},
        "maskfx_over_diffusers": harness.ratio(spent["diffusers"], spent["maskfx"]),
        "bound": harness.ratio(spent["diffusers"], spent["bare"]),
    }


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default="shipped")
    parser.add_argument("--setting", type=Setting.of, default=Setting.of("2C/2L"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    asked.rows, asked.template_gib = "32bit", 1
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        found = measure(asked, Path(folder))
    sizes = {"scale": asked.scale, "setting": str(asked.setting), "steps": asked.steps}
    header = harness.header("bench.adapters.per_core", given)
    result = {**header, **sizes, "batch": asked.batch, **found}
    harness.write_json(asked.out / f"adapters-per-core-{asked.scale}.json", result)
    total = sum(found["flops_of_a_picture"].values())
    rows = [["part", "GFLOP a picture", "share"]]
    for name, count in found["flops_of_a_picture"].items():
        rows.append([name, f"{count / 1e9:.1f}", f"{count / total:.2f}"])
    print(columns(rows))
    rows = [["side", "processor seconds a picture"]]
    for name, own in found["processor_seconds_of_a_picture"].items():
        rows.append([name, f"{own['median']:.3f}"])
    print(columns(rows))
    print(line(found))
    print(
        f"products take {found['share_of_time_in_products']:.2f} of diffusers' time; per processor "
        f"second {found['maskfx_over_diffusers']['median']:.2f} times diffusers' pictures; bound "
        f"{found['bound']['median']:.2f}, asked {ASKED}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
