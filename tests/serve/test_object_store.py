"""Launched servers whose templates are in an object store, which another process has filled."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from maskfx.serve.request import Pixels
from tests.factories.served import build, picture, square
from tests.serve.launched import Served, served
from tests.serve.served import file, pixels_of

pytestmark = pytest.mark.slow

PATIENCE = 300  # seconds
WHITE = file(np.where(square(), 255, 0).astype(np.uint8))
STEPS = {"num_inference_steps": "3", "strength": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    build("StableDiffusion3InpaintPipeline").save_pretrained(where)
    return where


@contextlib.contextmanager
def serving(folder: Path, url: str) -> Iterator[tuple[Served, httpx.Client]]:
    settings: dict[str, Any] = {"quality": "faithful", "heartbeat_seconds": 0.1}
    with (
        served(PATIENCE, model=str(folder), cache_dir=url, **settings) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield server, client


def edit(client: httpx.Client, **given: str) -> Pixels:
    files = {"mask_image": WHITE}
    if not given:
        files["image"] = file(picture(1))
    data = {"prompt": "a cat", "seed": "1", **STEPS, **given}
    made = client.post("/v1/images/edits", files=files, data=data)
    assert made.status_code == 200, made.text
    return pixels_of(made.json()["data"][0]["b64_json"])


def count(client: httpx.Client, metric: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith(f"maskfx_{metric}"))


def settled(client: httpx.Client, metric: str) -> float:
    """The counter after two more heartbeats."""
    threading.Event().wait(0.5)
    return count(client, metric)


def test_a_second_server_edits_with_the_template_of_the_first(folder: Path, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    with serving(folder, url) as (_, client):
        made = client.post(
            "/v1/templates", files={"image": file(picture(1))}, data={"id": "hat", **STEPS}
        )
        assert made.status_code == 200, made.text
        assert made.json()["bytes"]["disk"] > 0
        wanted = edit(client, template_id="hat")
    with serving(folder, url) as (_, client):
        (found,) = client.get("/v1/templates").json()["data"]
        assert (found["id"], found["workers"]) == ("hat", 1)
        assert found["bytes"]["disk"] == made.json()["bytes"]["disk"]
        assert np.array_equal(edit(client, template_id="hat"), wanted)
        loads = settled(client, "cache_loads_total")
        assert loads > 0
        assert count(client, 'cache_hits_total{tier="disk"}') > 0
        assert np.array_equal(edit(client, template_id="hat"), wanted)
        assert np.array_equal(edit(client), wanted)  # found by its picture
        assert settled(client, "cache_loads_total") == loads, "it was fetched again"
        assert count(client, "cache_corrupt_total") == count(client, "cache_failures_total") == 0
        assert client.delete("/v1/templates/hat").status_code == 200
        # the worker removes the rows in the background, and `served` kills it when this block ends
        until = time.monotonic() + 30
        while list((tmp_path / "store").rglob("*.rows")) and time.monotonic() < until:
            time.sleep(0.02)
    assert not list((tmp_path / "store").rglob("*.rows"))
    with serving(folder, url) as (_, client):
        assert client.get("/v1/templates").json()["data"] == []


def test_a_damaged_entry_in_the_store_is_recorded_again(folder: Path, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    with serving(folder, url) as (_, client):
        wanted = edit(client)
    for name in (tmp_path / "store").rglob("*.rows"):
        data = bytearray(name.read_bytes())
        data[len(data) // 2] ^= 4
        name.write_bytes(data)
    with serving(folder, url) as (server, client):
        assert np.array_equal(edit(client), wanted)
        assert settled(client, "cache_corrupt_total") > 0
        assert any("is damaged" in line for line in server.lines)
    with serving(folder, url) as (_, client):
        assert np.array_equal(edit(client), wanted)
        assert settled(client, "cache_corrupt_total") == 0


def test_a_store_that_never_answers_delays_edits_and_fails_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in {
            "ENDPOINT": endpoint,
            "ALLOW_HTTP": "true",
            "ACCESS_KEY_ID": "a",
            "SECRET_ACCESS_KEY": "b",
            "REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with serving(folder, "s3://bucket/prefix") as (server, client):
            first = edit(client)
            assert np.array_equal(edit(client), first)
            assert settled(client, "cache_failures_total") > 0
            assert any("reads from s3://bucket/prefix failed" in line for line in server.lines)
            assert any("recorded again" in line for line in server.lines)
