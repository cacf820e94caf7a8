"""Loading processes: weights arrive as shared memory, and no fault costs more than its request."""

from __future__ import annotations

import gc
import inspect
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maskfx.errors import AdapterError, Closed, InputError
from maskfx.pipelines.adapters.lora_files import LoraTarget
from maskfx.runtime.lora.loader import AdapterLoader
from maskfx.runtime.lora.registry import PROCESS, Adapters
from tests.factories.lora_files import save_lora
from tests.factories.pipelines import PIPES

STORES = "tests.factories.lora_files"


@pytest.fixture(scope="module")
def pipe() -> Any:
    return PIPES["FluxInpaintPipeline"].build()


@pytest.fixture
def path(tmp_path: Path, pipe: Any) -> Path:
    return save_lora(tmp_path / "style.safetensors", pipe)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> list[str]:
    """The processes that this one started and hasn't reaped, on any thread."""
    tasks = Path("/proc/self/task").iterdir()
    return [child for task in tasks for child in (task / "children").read_text().split()]


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    before = open_files(), len(children())
    yield
    gc.collect()
    assert (open_files(), len(children())) == before


def held(adapters: Adapters, path: Path, pipe: Any) -> Any:
    target = LoraTarget.of(pipe)
    return adapters.acquire(adapters.resolve(path), target.fields, target.kind_digest)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_leaks")
def test_weights_cross_as_shared_memory_and_files_are_loaded_once(path: Path, pipe: Any) -> None:
    adapters = Adapters(loads=1)
    try:
        with ThreadPoolExecutor(10) as threads:
            leases = list(threads.map(lambda _: held(adapters, path, pipe), range(10)))
        adapter = leases[0].adapter()
        layers = adapter.parts["transformer"]
        tensors = load_file(path)
        assert 2 * len(layers) == len(tensors)
        for layer, update in layers.items():
            assert torch.equal(update.down, tensors[f"transformer.{layer}.lora_A.weight"])
            assert torch.equal(update.up, tensors[f"transformer.{layer}.lora_B.weight"])
        assert adapters.counts().loads == 1
        assert not [f for f in Path("/proc/self/fd").iterdir() if "memfd" in str(f.resolve())]
        path.write_bytes(path.read_bytes()[:-1])
        failed = adapters.acquire(
            adapters.resolve(path), LoraTarget.of(pipe).fields, "of another pipeline"
        )
        with pytest.raises(InputError, match="not a whole safetensors file"):
            failed.adapter()
        assert adapters.restarts == 0
    finally:
        adapters.close()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_leaks")
def test_a_process_that_ends_costs_one_try(path: Path, pipe: Any) -> None:
    fields = LoraTarget.of(pipe).fields
    for read, fails in (("dying_once", False), ("dying", True)):
        loader = AdapterLoader(PROCESS, read=f"{STORES}:{read}")
        file = Adapters().resolve(path).file
        try:
            if fails:
                with pytest.raises(AdapterError, match="style.*ended 2 times"):
                    loader.load(file, fields)
            else:
                assert loader.load(file, fields).parts
                (idle,) = loader._idle
                idle.kill()
                while not idle.exited():
                    time.sleep(0.01)
                assert loader.load(file, fields).parts
            assert loader.restarts == 2
        finally:
            loader.close()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_leaks")
def test_a_store_that_hangs_fails_its_load_at_the_deadline(path: Path, pipe: Any) -> None:
    adapters = Adapters(read=f"{STORES}:hanging", deadline=1.0)
    began = time.monotonic()
    with pytest.raises(AdapterError, match="not loaded within 1 s; is its store reachable"):
        held(adapters, path, pipe).adapter()
    assert time.monotonic() - began < 3
    assert not children()
    waiting = held(adapters, path, pipe)
    while not adapters._loader._busy:
        time.sleep(0.01)
    adapters.close()
    with pytest.raises(Closed):
        waiting.adapter()


def test_many_files_are_registered_without_being_read(tmp_path: Path) -> None:
    for number in range(10_000):
        (tmp_path / f"a{number}.safetensors").touch()
    began = time.monotonic()
    adapters = Adapters(tmp_path)
    try:
        assert time.monotonic() - began < 10
        assert len(adapters.names()) == 10_000
        adapters.remove("a5")
        with pytest.raises(InputError, match="no adapter of this name"):
            adapters.get("a5")
        with pytest.raises(InputError, match="a name has letters"):
            adapters.register("../a", tmp_path / "a6.safetensors")
    finally:
        adapters.close()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize("loads", [None, 10])
def test_ten_files_at_once_for_requests_that_wait(
    tmp_path: Path, pipe: Any, loads: int | None
) -> None:
    """Each request gets the weights of its file, by no more processes than may load at a time."""
    paths = [save_lora(tmp_path / f"{n}.safetensors", pipe, seed=n) for n in range(10)]
    tensors = [load_file(path) for path in paths]
    adapters = Adapters() if loads is None else Adapters(loads=loads)
    most = loads or default_loads()
    seen, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen[0] = max(seen[0], len(adapters._loader._busy))

    def request(number: int) -> int:
        layers = held(adapters, paths[number % 10], pipe).adapter().parts["transformer"]
        for layer, update in layers.items():
            wanted = tensors[number % 10][f"transformer.{layer}.lora_A.weight"]
            assert torch.equal(update.down, wanted)
        return len(layers)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(30) as threads:
            found = list(threads.map(request, range(30), timeout=240))
        counts = adapters.counts()
    finally:
        done.set()
        watcher.join()
        adapters.close()
    assert found == [len(one) // 2 for one in tensors] * 3
    assert (counts.loads, counts.failures, adapters.restarts) == (10, 0, 0)
    assert 1 < seen[0] <= most


def default_loads() -> int:
    found: int = inspect.signature(Adapters).parameters["loads"].default
    return found
