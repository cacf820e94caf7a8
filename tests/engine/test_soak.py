"""Two thousand requests with adapters and a ControlNet in its own process, under faults."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

import maskfx
from maskfx.errors import AdapterError, InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.lora.registry import Adapters
from tests.engine.test_services import FLUX, arguments, compiled, made
from tests.factories.lora_files import save_lora
from tests.factories.pipelines import PIPES, distance

REQUESTS, AT_ONCE, EVERY = 2000, 8, 250
GOOD = tuple(f"good{n}" for n in range(6))
BAD = ("cut", "vanishes", "fails", "ends", "hangs")
KINDS: tuple[tuple[str, ...], ...] = ((), *((name,) for name in GOOD), GOOD[:2], GOOD[2:4])


def measured() -> tuple[int, int, int]:
    """Open files, child processes, and files of shared memory."""
    gc.collect()
    this = psutil.Process()
    return this.num_fds(), len(this.children(recursive=True)), len(os.listdir("/dev/shm"))


def drawn(draw: random.Random) -> tuple[str, ...]:
    """The adapters of a request: usually whole ones, now and then one that fails."""
    if draw.random() < 0.02:
        return (draw.choice(BAD[:4] if draw.random() < 0.9 else BAD),)
    return draw.choice(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_and_nothing_leaks(tmp_path: Path) -> None:
    pipe = compiled(PIPES[FLUX].build())
    for seed, name in enumerate((*GOOD, *BAD)):
        save_lora(tmp_path / f"{name}.safetensors", pipe, seed=seed, scale=4.0)
    one = (tmp_path / "good0.safetensors").stat().st_size
    adapters = Adapters(
        tmp_path,
        host_bytes=3 * one,
        loads=2,
        deadline=30.0,
        read="tests.factories.lora_files:unreliable",
    )
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(cut.read_bytes()[:-9])
    pipeline_state_of(pipe).adapters = lambda: adapters
    wanted = {kind: made(pipe(**arguments(FLUX), lora=list(kind) or None)) for kind in KINDS}
    draw, ended = random.Random(0), Counter[str]()
    before, resident = (0, 0, 0), 0
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        waiting: list[tuple[tuple[str, ...], Any]] = []
        for number in range(REQUESTS):
            if number == REQUESTS // 4:
                (tmp_path / "vanishes.safetensors").unlink()
            if number % EVERY == EVERY - 1:
                for pid in [pid for own in engine.services._services for pid in own.pids]:
                    os.kill(pid, signal.SIGKILL)
            kind = drawn(draw)
            given = {**arguments(FLUX), "adapters": list(kind) or None}
            waiting.append((kind, engine.submit(pipe, **given)))
            while len(waiting) >= AT_ONCE or number == REQUESTS - 1 and waiting:
                ended[finished(*waiting.pop(0), wanted)] += 1
            if number == EVERY:
                before, resident = measured(), psutil.Process().memory_info().rss
        assert ended.total() == REQUESTS
        assert ended["wrong"] == 0, ended
        assert ended["right"] > 0.95 * REQUESTS
        assert engine.services.counts().restarts >= REQUESTS // EVERY - 1
        after, grown = measured(), psutil.Process().memory_info().rss - resident
    counts = adapters.counts()
    assert counts.evictions > 0
    adapters.close()
    assert after[0] <= before[0] + AT_ONCE
    assert after[1] <= before[1] + 1
    assert after[2] <= before[2] + AT_ONCE
    assert grown < 128 << 20, f"{grown >> 20} MiB more than after {EVERY} requests"


def finished(kind: tuple[str, ...], ticket: Any, wanted: dict[tuple[str, ...], Any]) -> str:
    """How a request ended: "right", "wrong", or the error that its adapter stands for."""
    try:
        found = made(ticket.result(120))
    except (AdapterError, InputError) as error:
        return type(error).__name__ if kind and kind[0] in BAD else "wrong"
    return "right" if kind not in wanted or distance(found, wanted[kind]) < 1e-4 else "wrong"
