"""Katz's settings: diffusers in serial against maskfx, with each of its parts switched off in turn.

    OMP_NUM_THREADS=1 python -m bench.adapters.settings --settings 0C/0L 1C/0L

A setting has C ControlNets and L LoRA files; every request has LoRAs of its own. The sides:

- `diffusers`: one request after the other: its ControlNets and LoRAs are loaded from disk, the
  LoRAs put into the weights, the picture made, the LoRAs taken out. With `load_lora_weights` where
  peft is installed, else the weights are merged by maskfx, which takes less than peft's layers.
- `diffusers hotswap`: the same, but peft's layers stay in the model, and `hotswap=True` writes each
  request's files into them.
- `maskfx`: edits of a mask of 11 %, steps extrapolated (`balanced`), requests in one batch with
  their LoRAs as low-rank terms (rows), ControlNets in processes of their own.
- `... rows off`: LoRAs are written into the weights, so requests run one after the other.
- `... process off`: ControlNets are computed in the denoiser's process.
- `... masks off`: all sites are computed. `... forecasts off`: all steps are computed.
- `... masks, forecasts off`: as Katz, whose figures have neither.
- `... process, masks, forecasts off`: the same in one process, of which a machine has one per core.

Latency is that of one request alone, throughput that of `--batch` requests at once, in pictures per
second and core: maskfx has a core for each of its processes, as far as the machine has them. Beside
it stand the pictures per processor second, over all processes, which other work on the machine
disturbs less. After
the first requests its ControlNets and LoRA files are in memory; `bench.adapters.loading` measures
requests that find none. Beside the sides stand Katz's equations 1 and 2 and Gustafson's bound, from
measured parts (bench/adapters/latency_model.py). Weights are random; pictures are not compared.
Adds the settings to adapters-settings-SCALE-peft.json in bench/results, without peft to
adapters-settings-SCALE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench import harness
from bench.adapters.latency_model import Parts, line, measured, timed
from bench.adapters.workflow import (
    SCALES,
    Scale,
    Setting,
    build_workflow,
    call_of,
    load_net,
    nets_of,
    read_lora,
    save_nets,
    write_loras,
)
from bench.engine.bed import ENCODINGS
from bench.report import columns
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.lora.patch import patched

KATZ = ("0C/0L", "0C/1L", "1C/0L", "1C/1L", "2C/2L", "3C/2L")
PEFT = find_spec("peft") is not None
SERIAL, HOTSWAP = "diffusers", "diffusers hotswap"
ASKED = {
    "times_faster_than_serial_at_3C/2L": 3.0,
    "throughput_per_core_at_2C/2L_without_masks_and_forecasts": 1.7,
}


@dataclass(frozen=True)
class Side:
    """Which parts of maskfx are on."""

    rows: bool = True
    process: bool = True
    masks: bool = True
    forecasts: bool = True

    def quality(self) -> maskfx.Quality:
        found = maskfx.Quality.of("balanced")
        found = found if self.forecasts else replace(found, every=1)
        return found if self.masks else replace(found, reuse="steps", refresh=1)


SIDES = {
    "maskfx": Side(),
    "rows off": Side(rows=False),
    "process off": Side(process=False),
    "masks off": Side(masks=False),
    "forecasts off": Side(forecasts=False),
    "masks, forecasts off": Side(masks=False, forecasts=False),
    "process, masks, forecasts off": Side(process=False, masks=False, forecasts=False),
}


def sides_of(setting: Setting, names: Sequence[str]) -> dict[str, Side]:
    """Return the sides that differ in this setting."""
    return {
        name: side
        for name, side in SIDES.items()
        if name in names and (side.rows or setting.loras) and (side.process or setting.nets)
    }


class Bed:
    """One setting: diffusers' pipeline, ours over a copy of its modules, and files of adapters."""

    def __init__(self, setting: Setting, asked: argparse.Namespace, folder: Path) -> None:
        self.setting, self.asked = setting, asked
        self.scale: Scale = SCALES[asked.scale]
        self.plain = build_workflow(setting.nets, self.scale)
        self.nets = save_nets(folder, nets_of(self.plain))
        count = setting.loras * asked.batch
        self.loras = write_loras(folder, self.plain.unet, count, self.scale.rank)
        own = build_workflow(setting.nets, self.scale)
        self.tiers = maskfx.Tiers(
            host_bytes=asked.template_gib << 30, encoding=ENCODINGS[asked.rows]
        )
        self.pipe = maskfx.compile(own, quality="balanced", tiers=self.tiers)
        self.swapping: Any = None  # a pipeline in which peft's layers stay

    def files(self, request: int) -> list[Path]:
        """The LoRA files of a request."""
        first = request * self.setting.loras
        return self.loras[first : first + self.setting.loras]

    def call(self, request: int, masked: bool) -> dict[str, Any]:
        return call_of(self.plain, self.scale, request, self.asked.steps, masked)

    def load_nets(self, pipe: Any) -> None:
        for net, path in zip(nets_of(pipe), self.nets, strict=True):
            net.load_state_dict(load_net(path).state_dict())

    def swapped(self, requests: int) -> None:
        """Make pictures as diffusers does with hotswap, one after the other."""
        if self.swapping is None:
            self.swapping = build_workflow(self.setting.nets, self.scale)
        pipe = self.swapping
        for request in range(requests):
            self.load_nets(pipe)
            for number, path in enumerate(self.files(request)):
                name = f"lora-{number}"
                known = name in pipe.get_list_adapters().get("unet", ())
                pipe.load_lora_weights(str(path), adapter_name=name, hotswap=known)
            pipe.set_adapters([f"lora-{number}" for number in range(self.setting.loras)])
            pipe(**self.call(request, masked=True))

    def serial(self, requests: int) -> None:
        """Make pictures as diffusers does, one after the other."""
        for request in range(requests):
            self.load_nets(self.plain)
            if PEFT:
                names = [path.stem for path in self.files(request)]
                for name, path in zip(names, self.files(request), strict=True):
                    self.plain.load_lora_weights(str(path), adapter_name=name)
                if names:
                    self.plain.set_adapters(names)
                self.plain(**self.call(request, masked=True))
                self.plain.unload_lora_weights()
                continue
            updates = [read_lora(self.plain, path) for path in self.files(request)]
            with patched(self.plain.unet, updates):
                self.plain(**self.call(request, masked=True))

    def ours(self, engine: maskfx.Engine, side: Side, requests: int) -> None:
        """Make pictures in the engine: at once, or one by one if LoRAs are in the weights."""

        def submit(request: int, **more: Any) -> maskfx.Ticket:
            given = self.call(request, side.masks)
            return engine.submit(self.pipe, **given, quality=side.quality(), **more)

        if side.rows or not self.setting.loras:
            loras = [[str(path) for path in self.files(one)] or None for one in range(requests)]
            tickets = [submit(one, adapters=own) for one, own in enumerate(loras)]
            for ticket in tickets:
                ticket.result()
            return
        for request in range(requests):
            updates = [read_lora(self.plain, path) for path in self.files(request)]
            with patched(self.pipe.unet, updates):
                submit(request).result()

    def cores(self, side: Side) -> int:
        beside = self.setting.nets if side.process else 0
        return min(os.cpu_count() or 1, 1 + beside)

    def misses(self) -> int:
        """Recorded steps that were asked for and weren't in memory."""
        return self.tiers.counters().misses

    def masked_step(self) -> float:
        """Seconds of the denoiser's step for an edit without LoRAs: the base* of equation 2."""
        denoiser, spent = pipeline_state_of(self.pipe).denoisers["unet"], list[float]()
        denoiser.__dict__["step"] = timed(denoiser.step, spent)
        self.pipe(**self.call(0, masked=True), quality=SIDES["maskfx"].quality())
        del denoiser.__dict__["step"]
        return harness.figure(spent)["median"]


def counted(run: Callable[[int], None], busy: list[float]) -> Callable[[int], None]:
    """Return a function that also notes the processor seconds of all processes."""

    def timed_run(requests: int) -> None:
        began = harness.busy_seconds()
        run(requests)
        busy.append(harness.busy_seconds() - began)

    return timed_run


def measure(setting: Setting, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    bed, rows = Bed(setting, asked, folder), {}
    bed.serial(1)
    parts = measured(bed.plain, partial(bed.call, 0, True), bed.nets, bed.files(0))
    with ExitStack() as stack:
        engines = {
            process: stack.enter_context(
                maskfx.Engine(own_process=["controlnet"] if process else [])
            )
            for process in (True, False)
        }
        runs: dict[str, tuple[Callable[[int], None], int]] = {}
        if SERIAL in asked.sides:
            runs[SERIAL] = bed.serial, 1
        if HOTSWAP in asked.sides and PEFT and setting.loras:
            runs[HOTSWAP] = bed.swapped, 1
        for name, side in sides_of(setting, asked.sides).items():
            runs[name] = partial(bed.ours, engines[side.process], side), bed.cores(side)
        for run, _ in runs.values():  # captures, recordings, processes
            run(asked.batch)
        busy: dict[str, list[float]] = {name: [] for name in runs}
        runs = {name: (counted(run, busy[name]), cores) for name, (run, cores) in runs.items()}
        before = bed.misses()
        alone = harness.alternate(bound(runs, 1), asked.rounds)
        for own in busy.values():
            own.clear()
        crowd = harness.alternate(bound(runs, asked.batch), asked.rounds)
        again = bed.misses() - before
        step = bed.masked_step()
    for name, (_, cores) in runs.items():
        rates = [asked.batch / seconds / cores for seconds in crowd[name]]
        rows[name] = {
            "latency": harness.figure(alone[name]),
            "pictures_per_second_and_core": harness.figure(rates),
            "cores": cores,
            "pictures_per_processor_second": harness.figure(
                [asked.batch / seconds for seconds in busy[name]]
            ),
        }
        if SERIAL in runs:
            rows[name]["times_faster"] = harness.ratio(alone[SERIAL], alone[name])
            serial = [asked.batch / seconds for seconds in crowd[SERIAL]]
            rows[name]["times_throughput_per_core"] = harness.ratio(rates, serial)
            rows[name]["times_per_processor_second"] = harness.ratio(busy[SERIAL], busy[name])
    return {"sides": rows, "templates_missed": again, **model_of(parts, step, asked.steps)}


def bound(runs: dict[str, tuple[Callable[[int], None], int]], requests: int) -> dict[str, Any]:
    """Return the sides as functions of a round, for this number of requests."""
    return {name: (lambda _, run=run: run(requests)) for name, (run, _) in runs.items()}


def model_of(parts: Parts, masked_step: float, steps: int) -> dict[str, Any]:
    """Return the equations' figures, and equation 2 for edits whose steps are extrapolated."""
    selection = SIDES["maskfx"].quality().selection
    computed = sum(selection.computes(step, steps) for step in range(steps))
    return {
        **parts.report(),
        "masked_step": masked_step,
        "computed_steps": computed,
        "equation_2_masked": parts.free_adapters(masked_step, computed),
    }


def show(setting: Setting, found: dict[str, Any]) -> None:
    rows = [["side", "latency s", "times faster", "pictures/s/core", "times serial's", "cores"]]
    rows[0].append("times serial's per processor second")
    for name, own in found["sides"].items():
        faster, more = own.get("times_faster"), own.get("times_throughput_per_core")
        rows.append(
            [
                name,
                f"{own['latency']['median']:.3f}",
                "-" if faster is None else f"{faster['median']:.2f}",
                f"{own['pictures_per_second_and_core']['median']:.3f}",
                "-" if more is None else f"{more['median']:.2f}",
                str(own["cores"]),
                "-" if more is None else f"{own['times_per_processor_second']['median']:.2f}",
            ]
        )
    print(f"{setting}\n{columns(rows)}")
    if found["templates_missed"]:
        print(f"{found['templates_missed']} recorded steps were missing: templates don't fit")
    masked = found["equation_2_masked"]
    print(f"{line(found)}; equation 2 for edits with extrapolated steps: {masked:.3f} s\n")


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings", nargs="+", type=Setting.of, default=list(map(Setting.of, KATZ))
    )
    sides = (SERIAL, HOTSWAP, *SIDES)
    parser.add_argument("--sides", nargs="+", choices=sides, default=list(sides))
    parser.add_argument("--scale", choices=SCALES, default="tiny")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="requests at once, for throughput")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", choices=ENCODINGS, default="32bit", help="of templates")
    parser.add_argument("--template-gib", type=int, default=8, help="memory of all templates")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    path = asked.out / f"adapters-settings-{asked.scale}{'-peft' if PEFT else ''}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= {"asked": ASKED, "lora_by": "peft" if PEFT else "maskfx's merging"}
    print(f"LoRAs of the serial side are merged by {result['lora_by']}\n")
    for setting in asked.settings:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            found = measure(setting, asked, Path(folder))
        show(setting, found)
        about = harness.header("bench.adapters.settings", given)
        sizes = {
            "scale": asked.scale,
            "steps": asked.steps,
            "batch": asked.batch,
            "templates": {"rows": asked.rows, "gib": asked.template_gib},
        }
        result.setdefault("settings", {})[str(setting)] = {**about, **sizes, **found}
        harness.write_json(path, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
