"""What befalls the cache of a launched server with a tiny pipeline: no fault changes a picture.

Memory for templates is so small in the first server that every recorded step is read from disk.
"""

from __future__ import annotations

import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from maskfx.runtime.cache.serialize import read_labels
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.stores.store_entry import HEADER, StoreEntry, header_of, payload_prefix
from maskfx.serve.request import Pixels
from tests.factories.served import build, picture, square
from tests.serve.launched import Served, served
from tests.serve.served import file, pixels_of

pytestmark = pytest.mark.slow

STEPS = 3
WHOLE = Counter(begin=1, after=STEPS, step=STEPS)  # entries of a template
PATIENCE = 300  # seconds
FULL = {"quality": "faithful"}  # whether the autoencoder is recorded depends on the memory
WHITE = file(np.where(square(), 255, 0).astype(np.uint8))


@dataclass
class Bench:
    """A server, its cache and the pictures as they are made of fresh recordings."""

    server: Served
    client: httpx.Client
    store: Store
    wanted: dict[int, Pixels]

    def edit(self, seed: int) -> Pixels:
        """An edit of one of the pictures."""
        data = {"prompt": "a cat", "seed": "1", "num_inference_steps": str(STEPS), "strength": "1"}
        files = {"image": file(picture(seed)), "mask_image": WHITE}
        made = self.client.post("/v1/images/edits", files=files, data=data)
        assert made.status_code == 200, made.text
        return pixels_of(made.json()["data"][0]["b64_json"])

    def same(self, seed: int) -> bool:
        return np.array_equal(self.edit(seed), self.wanted[seed])

    def count(self, metric: str) -> float:
        """A counter, all its labels together."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith(f"maskfx_{metric}"))

    def settles(self, metric: str, wanted: float) -> None:
        """Workers report their caches with each heartbeat; after two more it is still so."""
        until = time.monotonic() + 20
        while self.count(metric) != wanted:
            assert time.monotonic() < until, (metric, self.count(metric), wanted)
            time.sleep(0.05)
        time.sleep(0.5)
        assert self.count(metric) == wanted

    def kinds(self) -> Counter[str]:
        return Counter(kind_of(entry) for entry in self.store.ls())


def calling(server: Served) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=PATIENCE)


def kind_of(entry: StoreEntry) -> str:
    labels = read_labels(payload_prefix(entry))
    return labels["branch"] if labels["model"] == "latents" else "step"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    build("StableDiffusion3InpaintPipeline").save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def bench(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A server that reads all from disk, with one picture recorded."""
    cache = tmp_path_factory.mktemp("cache")
    settings: dict[str, Any] = {"cache_dir": str(cache), "cache_host_bytes": 1} | FULL
    settings["heartbeat_seconds"] = 0.1
    with served(PATIENCE, model=str(folder), **settings) as server, calling(server) as client:
        made = Bench(server, client, Store(cache), {})
        for seed in (4, 3, 2, 1):
            for entry in made.store.ls():
                entry.path.unlink()
            made.wanted[seed] = made.edit(seed)
        assert made.kinds() == WHOLE
        assert made.same(1)
        yield made


def flipped(at: float) -> Callable[[bytes, bytes], bytes]:
    def flip(data: bytes, _: bytes) -> bytes:
        place = int(at * (len(data) - 1))
        return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]

    return flip


def of_version(data: bytes, _: bytes) -> bytes:
    return data[:8] + (99).to_bytes(4, "little") + data[12:]


def of_schema(data: bytes, _: bytes) -> bytes:
    """Whole, but nothing that this version reads."""
    payload = b"from another age"
    return header_of(data[12:44], memoryview(payload)) + payload


FAULTS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "nothing is left": lambda data, _: b"",
    "cut in its header": lambda data, _: data[: HEADER.size // 2],
    "cut after its header": lambda data, _: data[: HEADER.size],
    "cut in its payload's head": lambda data, _: data[: HEADER.size + 30],
    "cut in its rows": lambda data, _: data[: len(data) * 3 // 4],
    "the last byte is missing": lambda data, _: data[:-1],
    "a byte more": lambda data, _: data + b"\0",
    "a bit of its header": flipped(0.0),
    "a bit of its rows": flipped(0.7),
    "another version": of_version,
    "another schema": of_schema,
    "another entry under its name": lambda data, other: other,
}


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=list(FAULTS))
def test_a_damaged_entry_is_recorded_again(bench: Bench, number: int) -> None:
    """The edit is that of a fresh recording, and the directory is whole again."""
    fault = list(FAULTS.values())[number]
    kind = list(WHOLE)[number % len(WHOLE)]
    entries = bench.store.ls()
    damaged = [entry for entry in entries if kind_of(entry) == kind][-1]
    other = next(entry for entry in entries if entry.path != damaged.path)
    before = bench.count("cache_corrupt_total")
    damaged.path.write_bytes(fault(damaged.path.read_bytes(), other.path.read_bytes()))
    assert bench.same(1), kind
    bench.settles("cache_corrupt_total", before + 1)
    report = bench.store.verify()
    assert (report.entries, report.removed, bench.kinds()) == (sum(WHOLE.values()), 0, WHOLE)
    assert bench.same(1)
    assert bench.count("cache_corrupt_total") == before + 1


def test_what_a_dead_writer_left_harms_nobody(bench: Bench) -> None:
    """A crash between writing and renaming: the old entry is there, or none."""
    for entry in bench.store.ls():
        left = entry.path.with_name(f"{entry.path.stem}.1.00{'0' * 14}.maskfx-tmp")
        left.write_bytes(entry.path.read_bytes()[:-1])
    bench.store.ls()[0].path.unlink()  # whose replacement was on its way
    assert bench.same(1)
    assert bench.kinds() == WHOLE


def test_a_directory_that_is_removed_comes_back(bench: Bench) -> None:
    shutil.rmtree(bench.store.root)
    assert bench.same(1)
    assert bench.kinds() == WHOLE


def test_after_a_restart_all_is_found_and_a_broken_disk_costs_no_picture(
    bench: Bench, folder: Path
) -> None:
    settings: dict[str, Any] = {"cache_dir": str(bench.store.root), "heartbeat_seconds": 0.1} | FULL
    with served(PATIENCE, model=str(folder), **settings) as server, calling(server) as client:
        again = Bench(server, client, bench.store, bench.wanted)
        check_restarted(again)
        check_full(again)
        check_no_directory(again)


def check_restarted(bench: Bench) -> None:
    """Every entry is read, none recorded."""
    time.sleep(1)  # heartbeats: the warm-up's counts are in
    steps, misses = bench.count("step_latency_seconds_count"), bench.count("cache_misses_total")
    hits = bench.count("cache_hits_total")
    assert bench.same(1)
    assert bench.count("step_latency_seconds_count") == steps + STEPS
    bench.settles("cache_misses_total", misses)
    assert bench.count("cache_hits_total") >= hits + sum(WHOLE.values())
    assert bench.count('cache_hits_total{tier="disk"}') > 0, "what is read ahead counts as host's"


def check_full(bench: Bench) -> None:
    """Files can't grow beyond a size that no entry fits in."""
    worker = psutil.Process(bench.server.workers()[0].pid)
    before = worker.rlimit(resource.RLIMIT_FSIZE)
    worker.rlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    assert bench.same(2)
    assert bench.kinds() == WHOLE, "nothing but the first picture's"
    worker.rlimit(resource.RLIMIT_FSIZE, before)
    assert bench.same(3)
    assert bench.kinds() == WHOLE + WHOLE
    assert bench.same(2)
    said = [line for line in bench.server.lines if "entries can't be written" in line]
    assert len(said) == 1, said


def check_no_directory(bench: Bench) -> None:
    """Something else is where the directory was."""
    root = bench.store.root
    shutil.rmtree(root)
    root.write_bytes(b"")
    assert bench.same(4)
    root.unlink()
    bench.edit(5)
    assert bench.kinds() == WHOLE
