"""Timing of several sides against each other, counted FLOPs, and what a result must say of itself.

Knows nothing of denoisers or masks.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from maskfx.runtime.hardware.cpu_threads import sharing_cores

ROOT = Path(__file__).resolve().parent.parent

Figure = dict[str, float]


def figure(samples: Sequence[float]) -> Figure:
    """Median and extremes of some samples."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def flipped(one: Figure) -> Figure:
    """1 over a figure: times slower for times faster."""
    return {"median": 1 / one["median"], "min": 1 / one["max"], "max": 1 / one["min"]}


def scaled(one: Figure, factor: float) -> Figure:
    return {key: value * factor for key, value in one.items()}


def alternate(
    sides: Mapping[str, Callable[[int], Any]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each side in each round. Every round runs all sides, in a changing order."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    for index in range(rounds):
        shift = (index // 2) % len(names)
        order = names[shift:] + names[:shift]
        for name in order if index % 2 == 0 else reversed(order):
            run = sides[name]
            with sharing_cores():  # maskfx's steps do so by themselves
                start = clock()
                run(index)
                times[name].append(clock() - start)
    return times


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Figure:
    """How many times faster, round by round: what disturbs a round disturbs both sides."""
    return figure([a / b for a, b in zip(slow, fast, strict=True)])


def timed(run: Callable[[], Any], rounds: int) -> Figure:
    """Seconds of one call, after one that isn't counted."""
    run()
    return figure(alternate({"": lambda _: run()}, rounds)[""])


# FLOPs


def cpu_attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *rest: Any, **named: Any
) -> int:
    """Two products, two FLOPs a multiply-add: FlopCounterMode lacks the CPU's attention."""
    batch, heads, queries, depth = query
    return 2 * batch * heads * queries * key[2] * (depth + value[3])


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def count_flops(run: Callable[[], Any]) -> dict[str, int]:
    """FLOPs of products by operator, and their total. `maskfx::` operators bring formulas."""
    formulas = {CPU_ATTENTION: cpu_attention_flops}
    with FlopCounterMode(display=False, custom_mapping=formulas) as mode:
        run()
    counts = {str(op): int(n) for op, n in mode.get_flop_counts().get("Global", {}).items()}
    return {**counts, "total": int(mode.get_total_flops())}


# Memory


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_growth(run: Callable[[], Any]) -> int:
    """Bytes by which the process grew at most while something ran."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    run()
    return max(0, resident("VmHWM") - before)


def busy_seconds() -> float:
    """Processor seconds of this process and of the processes that it started, which run still."""
    found: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        ticks = sum(map(int, fields[11:13]))
        found[int(path.parent.name)] = int(fields[1]), ticks / os.sysconf("SC_CLK_TCK")
    own, before = {os.getpid()}, 0
    while len(own) > before:
        before = len(own)
        own |= {pid for pid, (parent, _) in found.items() if parent in own}
    return sum(found[pid][1] for pid in own if pid in found)


# What a result records of itself


def commit() -> str:
    """The commit that runs, marked if files differ from it."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    head = git("rev-parse", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--", ".", ":!bench/results")  # results don't count
    return f"{head} + changes" if changed else head


def hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(memory / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("torch", "diffusers", "numpy", "maskfx"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from the source tree"
    return found


def describe(error: BaseException) -> str:
    """An error in one line, without the paths of this machine."""
    text = " ".join(str(error).split())
    for path in (str(ROOT), sys.prefix, str(Path.home())):
        text = text.replace(path, ".")
    return f"{type(error).__name__}: {text}"[:500]


def header(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Command, commit, hardware and versions."""
    return {
        "command": " ".join(["python", "-m", module, *arguments]),
        "commit": commit(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "hardware": hardware(),
        "versions": versions(),
    }


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result to a file; in a folder, whose script wants a file's name, to `result.json`."""
    if path.is_dir():
        path = path / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
