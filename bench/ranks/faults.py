"""Faults from outside while a server's ranks compute: no request is lost or answered twice.

    python -m bench.ranks.faults
    unshare -m sh -c 'mount -t tmpfs -o size=4m tmpfs /dev/shm; python -m bench.ranks.faults'

Starts `maskfx serve` with two ranks and a small Stable Diffusion, and sends requests, four at a
time, each with a seed of its own. Every few seconds a rank is ended (SIGKILL) or stopped (SIGSTOP),
or the worker process itself is ended, in turn. Each request must be answered once, with the picture
that the same seed had before the faults. After a fault of a rank, the time until the next step
ends is noted; asked for are two seconds. With `unshare`, the second line, shared memory is full for
the server alone: then no rank can start, and the worker computes. Writes ranks-faults.json
(ranks-faults-full.json where shared memory is that small) to bench/results.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
from PIL import Image

from bench.harness import ROOT, header, write_json
from tests.factories.served import build
from tests.serve.launched import Served, served

STEPS, AT_ONCE, SMALL = 6, 4, 64 << 20
KILL, STOP, RESTART = "kill a rank", "stop a rank", "kill the worker"
MODULE = "maskfx.distributed.rank_process"
TURNS = KILL, STOP, KILL, RESTART, STOP, KILL, STOP


def ranks_of(server: Served) -> list[psutil.Process]:
    return [p for p in server.children() if "rank_process" in " ".join(p.cmdline())]


def left_behind() -> list[int]:
    """Return the ranks whose parent is gone."""
    found = psutil.process_iter(["pid", "ppid", "cmdline"])
    return [
        one.info["pid"]
        for one in found
        if one.info["ppid"] == 1
        and "maskfx.distributed.rank_process" in (one.info["cmdline"] or [])
    ]


def strike(server: Served, kind: str) -> bool:
    """Do what the fault is; return False if there is no process to do it to."""
    own = server.workers() if kind == RESTART else ranks_of(server)
    if not own:
        return False
    own[-1].send_signal(signal.SIGSTOP if kind == STOP else signal.SIGKILL)
    return True


async def steps_made(client: httpx.AsyncClient) -> int:
    text = (await client.get("/metrics")).text
    return sum(int(n) for n in re.findall(r'maskfx_steps_total\{degree="\d"\} (\d+)', text))


async def picture(client: httpx.AsyncClient, seed: int, side: int) -> tuple[int, Any]:
    body = {"prompt": "a cat", "num_inference_steps": STEPS, "seed": seed, "size": f"{side}x{side}"}
    answer = await client.post("/v1/images/generations", json=body)
    if answer.status_code != 200:
        return answer.status_code, answer.text
    (found,) = answer.json()["data"]
    image = Image.open(io.BytesIO(base64.b64decode(found["b64_json"])))
    return 200, np.asarray(image, np.int16)


async def faults(server: Served, each: float, found: list[dict[str, Any]]) -> None:
    """Strike in turn until cancelled; note how long no step ended."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for kind in TURNS:
            await asyncio.sleep(each)
            while not strike(server, kind):
                await asyncio.sleep(each)
            before, began = await steps_made(client), time.monotonic()
            found.append({"kind": kind, "seconds": None})
            while await steps_made(client) <= before:
                await asyncio.sleep(0.02)
            found[-1]["seconds"] = time.monotonic() - began
            print(found[-1], flush=True)


async def measure(server: Served, requests: int, each: float, side: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        seeds = range(requests // 5)
        wanted = [(await picture(client, seed, side))[1] for seed in seeds]
        struck: list[dict[str, Any]] = []
        striking = asyncio.create_task(faults(server, each, struck))
        order = [number % len(wanted) for number in range(requests)]
        answers = await asyncio.gather(*(picture(client, seed, side) for seed in order))
        striking.cancel()
        text = (await client.get("/metrics")).text
    apart = [
        float(np.abs(image - wanted[seed]).max()) if status == 200 else None
        for seed, (status, image) in zip(order, answers, strict=True)
    ]
    lost = [(status, body) for status, body in answers if status != 200]
    ranks = [one["seconds"] for one in struck if one["kind"] != RESTART and one["seconds"]]
    return {
        "requests": requests,
        "answered": len(answers) - len(lost),
        "not answered": lost,
        "largest difference of a pixel, of 255": max(
            (n for n in apart if n is not None), default=None
        ),
        "faults": struck,
        "longest without a step, rank faults, seconds": max(ranks, default=None),
        "processes left behind": len(left_behind()),
        "metrics": sorted(
            line
            for line in text.splitlines()
            if re.match(
                r"maskfx_(ranks|rank_failures_total|requests_total|rounds_total|worker)", line
            )
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.faults", description=__doc__)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--each", type=float, default=4.0, help="seconds from fault to fault")
    parser.add_argument("--side", type=int, default=64, help="of the pictures")
    parser.add_argument("--log", type=Path, help="a file for what the server logs")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    full = shutil.disk_usage("/dev/shm").total < SMALL
    result = header("bench.ranks.faults", given)
    with tempfile.TemporaryDirectory() as folder:
        build("StableDiffusionPipeline").save_pretrained(folder)
        with served(300, model=folder, ranks=2, max_num_seqs=AT_ONCE) as server:
            result |= asyncio.run(measure(server, options.requests, options.each, options.side))
            logged = "".join(server.lines)
            result["steps that ran again, in the log"] = logged.count("runs again")
            Path(options.out, "faults.log").write_text(logged) if options.out.is_relative_to(
                "/tmp"
            ) else None
    write_json(options.out / f"ranks-faults{'-full' * full}.json", result)
    print(*(f"{name}: {value}" for name, value in result.items()), sep="\n")
    return 0 if not result["not answered"] else 1


if __name__ == "__main__":
    sys.exit(main())
