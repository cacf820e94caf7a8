"""Steps that share the cores with other work of the same process, with helpers and other programs.

Each way of sharing is switched off for one side of each round.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any
from unittest import mock

import torch

import maskfx
from bench.engine.arrivals import wait_all
from bench.engine.bed import Bench
from bench.harness import ratio
from maskfx.engine import engine as engines
from maskfx.engine.processes.helper_processes import HelperProcesses
from maskfx.runtime.execution import graph_runs
from maskfx.runtime.hardware import cpu_threads as giving


def cores(bench: Bench, rounds: int, batch: int) -> dict[str, Any]:
    found = {
        "requests": batch,
        "workers": torch.get_num_threads(),
        "given back, times faster": given_back(bench, rounds, batch),
        "shared, times faster": shared(bench, rounds, batch),
        "beside another program": beside_a_program(bench, rounds, batch),
    }
    print(found)
    return found


def given_back(bench: Bench, rounds: int, batch: int) -> dict[str, float]:
    """Seconds of the same requests' steps, beside a caller that has computed before."""
    group = bench.requests(batch, seed=60)
    with maskfx.Engine(maskfx.BatchPolicy(batch=batch, patience=5.0), running=batch) as engine:

        def steps(_: int) -> float:
            torch.ones(1 << 20).sin()  # the caller's own workers are there
            engine.steps.clear()
            wait_all(engine, bench, group)
            return sum(step.seconds for step in engine.steps)

        def kept(index: int) -> float:
            pausing = giving.pausing
            giving.pausing = list  # type: ignore[assignment]
            try:
                return steps(index)
            finally:
                giving.pausing = pausing

        steps(0)
        pairs = [(kept(i), steps(i)) for i in range(rounds)]
    return ratio([a for a, _ in pairs], [b for _, b in pairs])


def take_all() -> None:
    """The calling thread computes with its own number, whatever other threads do."""
    giving.compute_with(giving.share.whole)


def shared(bench: Bench, rounds: int, batch: int) -> dict[str, float]:
    """Seconds of the same requests' steps, beside a helper that decodes without end."""
    group = bench.requests(batch, seed=60)
    helpers, ended = HelperProcesses(1, threads=1), threading.Event()
    latent = torch.randn(1, 4, bench.pixels // 8, bench.pixels // 8)
    waiting = maskfx.BatchPolicy(batch=batch, patience=5.0)
    with maskfx.Engine(waiting, running=batch, outside=helpers) as engine:

        def decode() -> None:
            while not ended.is_set():
                helpers.run(bench.edits.vae, "decode", (latent,), {})

        def steps(_: int) -> float:
            engine.steps.clear()
            wait_all(engine, bench, group)
            return sum(step.seconds for step in engine.steps)

        def unshared(index: int) -> float:
            for room in (engines, graph_runs):
                room.settle = take_all  # type: ignore[attr-defined]
            try:
                return steps(index)
            finally:
                for room in (engines, graph_runs):
                    room.settle = giving.settle  # type: ignore[attr-defined]

        steps(0)
        decoding = threading.Thread(target=decode)
        decoding.start()
        pairs = [(unshared(i), steps(i)) for i in range(rounds)]
        ended.set()
        decoding.join()
    return ratio([a for a, _ in pairs], [b for _, b in pairs])


def beside_a_program(bench: Bench, rounds: int, batch: int) -> dict[str, Any]:
    """Seconds of the same requests' steps, beside a program that keeps one core busy."""
    group = bench.requests(batch, seed=60)
    waiting = maskfx.BatchPolicy(batch=batch, patience=5.0)
    with maskfx.Engine(waiting, running=batch) as engine:

        def steps() -> float:
            engine.steps.clear()
            wait_all(engine, bench, group)
            return sum(step.seconds for step in engine.steps)

        steps()
        alone, shared_, unshared = [], [], []
        for _ in range(rounds):
            alone.append(steps())
            program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                shared_.append(steps())
                with mock.patch.object(giving.busy, "by_others", return_value=0):
                    unshared.append(steps())
            finally:
                program.kill()
                program.wait()
    return {
        "core left to it, times faster": ratio(unshared, shared_),
        "core left to it, times as long as alone": ratio(shared_, alone),
        "every core used, times as long as alone": ratio(unshared, alone),
    }
