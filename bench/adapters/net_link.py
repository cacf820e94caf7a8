"""Bytes between the engine and a ControlNet's process, per denoising step of an edit.

    python -m bench.adapters.net_link

A pipeline with the shape of Stable Diffusion, at a fraction of its width, edits a tenth of a
picture. `sent` and `received` are what crosses now: each tensor once, and the computed rows of
results. `whole_sent` and `whole_received` are the same steps with all their inputs and full
results, recordings by number. Both are counted in the same run, for a first edit after the process
has recorded the template, and for a second one. Writes adapters-net-link.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import maskfx
from bench.foundations import STEPS, control_pipeline
from bench.harness import ROOT, header, write_json
from maskfx.engine.processes.step_process import StepProcess
from maskfx.runtime.steps import EditStep
from maskfx.runtime.transport.tensor_transport import pack


def nbytes(value: object) -> int:
    return sum(memoryview(part).nbytes for part in pack(value))


class Whole:
    """Counts what steps would take with all inputs and full results."""

    def __init__(self) -> None:
        self.sent = self.received = self.recordings = 0
        self._seen: set[int] = set()
        self._held: list[Any] = []  # ids of other objects may be equal later

    def run(self, original: Any) -> Any:
        def run(process: StepProcess, denoiser: Any, steps: Sequence[Any], *rest: Any) -> Any:
            results = original(process, denoiser, steps, *rest)
            for step in steps:
                if isinstance(step, EditStep):
                    if id(step.cache) not in self._seen:
                        self._seen.add(id(step.cache))
                        self._held.append(step.cache)
                        self.recordings += nbytes(step.cache)
                    step = replace(step, cache=None)  # type: ignore[arg-type]
                self.sent += nbytes(step)
            self.received += nbytes(results)
            return results

        return run

    def taken(self) -> dict[str, float]:
        found = {
            "whole_sent": self.sent / STEPS,
            "whole_received": self.received / STEPS,
            "recordings": self.recordings / STEPS,
        }
        self.sent = self.received = self.recordings = 0
        return found


def measured(width: int) -> dict[str, Any]:
    """Return the bytes per denoising step of a recording and two edits."""
    pipe, call = control_pipeline(1, width)
    found: dict[str, Any] = {}
    whole = Whole()
    counted = mock.patch.object(StepProcess, "run", whole.run(StepProcess.run))
    with counted, maskfx.Engine(own_process=["controlnet"]) as engine:
        before = engine.services.counts()
        for name in ("first", "second"):
            # the first one records the template before it edits
            engine.submit(pipe, **call(1 if name == "first" else 2)).result()
            now = engine.services.counts()
            found[name] = {
                "sent": (now.sent - before.sent) / STEPS,
                "received": (now.received - before.received) / STEPS,
                **whole.taken(),
            }
            before = now
        found["computed_here"] = now.computed_here
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters.net_link")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", default="adapters-net-link.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = {
        **header("bench.adapters.net_link", arguments),
        "width": options.width,
        "steps": STEPS,
        **measured(options.width),
    }
    write_json(ROOT / "bench" / "results" / options.out, result)
    for name in ("first", "second"):
        print(name, {key: f"{value / 2**20:.2f} MiB" for key, value in result[name].items()})


if __name__ == "__main__":
    main(sys.argv[1:])
