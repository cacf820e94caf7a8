"""The routes of LoRA files, the names and weights of requests, and models with a LoRA."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from maskfx.errors import InputError
from maskfx.runtime.lora.registry import Adapters
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.adapter_names import AdapterNames
from maskfx.serve.metrics import CacheCounts, Metrics
from maskfx.serve.request import loras_in
from tests.serve.http.test_refusals import check
from tests.serve.launched import served as launched
from tests.serve.served import MASK, PICTURE, Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


def test_names_and_weights() -> None:
    assert loras_in(None) == []
    assert loras_in("a") == [("a", 1.0)]
    assert loras_in("a:0.5,b-2.x:-1,c") == [("a", 0.5), ("b-2.x", -1.0), ("c", 1.0)]


def test_files_are_registered_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        AdapterNames(tmp_path / "none")
    (tmp_path / "ink.safetensors").write_bytes(b"12345")
    (tmp_path / "bad name.safetensors").touch()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "ink.safetensors")
    (tmp_path / "secret.txt").touch()
    names = AdapterNames(tmp_path)
    assert list(names.names) == ["ink"]
    assert names.get("ink").bytes == 5
    for name in ("link", "bad name", "secret", "../x", "oil", "ink\n"):
        with pytest.raises(ApiError) as caught:
            names.register(name)
        assert caught.value.code == "lora_not_found"
    (tmp_path / "oil.safetensors").touch()
    names.register("oil")
    assert list(names.names) == ["ink", "oil"]
    names.remove("ink")
    assert [one.name for one in names.all()] == ["oil"]
    with pytest.raises(ApiError):
        names.remove("ink")


def test_counters_of_workers_add_up() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)
    counts.heard("a", {"adapters.loads": 2, "adapters.load_ms": 1500, "adapters.bytes": 10})
    counts.heard("b", {"adapters.loads": 1, "adapters.bytes": 5})
    counts.heard("b", {"adapters.loads": 2, "adapters.bytes": 5})
    counts.lost("a")
    text = metrics.text().decode()
    assert "maskfx_adapter_loads_total 4.0" in text
    assert "maskfx_adapter_load_seconds_total 1.5" in text
    assert "maskfx_adapter_usage_bytes 5.0" in text


def test_adapters_are_registered_listed_and_deleted(server: Served) -> None:
    with server.client() as client:
        check(client.post("/v1/adapters", json={"name": "none"}), "lora_not_found", "name")
        check(client.post("/v1/adapters", json={"name": "../x"}), "invalid_value", "name")
        check(client.post("/v1/adapters", json={}), "missing_parameter", "name")
        check(client.post("/v1/adapters", json={"path": "x"}), "unknown_parameter", "path")
        made = client.post("/v1/adapters", json={"name": "oil"})
        assert (made.status_code, made.json()["id"]) == (200, "oil")
        listed = client.get("/v1/adapters").json()["data"]
        assert [one["id"] for one in listed] == ["ink", "oil"]
        assert client.get("/v1/adapters/oil").json() == made.json()
        models = [one["id"] for one in client.get("/v1/models").json()["data"]]
        assert models == ["fake/model", "fake/model:ink", "fake/model:oil"]
        one = client.get("/v1/models/fake/model:oil").json()
        assert (one["id"], one["parent"]) == ("fake/model:oil", "fake/model")
        assert client.delete("/v1/adapters/oil").json()["deleted"] is True
        check(client.delete("/v1/adapters/oil"), "lora_not_found", "adapter")
        check(client.get("/v1/adapters/..%2fx"), "lora_not_found", "adapter")
        check(client.get("/v1/models/fake/model:oil"), "model_not_found", "model")


def test_requests_name_adapters_with_weights_or_as_part_of_the_model(server: Served) -> None:
    assert server.edit({"mask": MASK}, lora="ink:0.5,ink").status_code == 200
    assert server.frontend.asked[-1].request.lora == "ink:0.5,ink"
    assert server.edit({"mask": MASK}, model="fake/model:ink").status_code == 200
    assert server.frontend.asked[-1].request.lora == "ink"
    assert server.edit({"mask": MASK}, model="fake/model").status_code == 200
    assert server.frontend.asked[-1].request.lora is None
    check(server.edit(lora="ink,none:0.5"), "lora_not_found", "lora")
    check(server.edit(lora="ink:high"), "invalid_value", "lora")
    check(server.edit(lora=",".join(["ink"] * 9)), "invalid_value", "lora")
    check(server.edit(model="fake/model:none"), "lora_not_found", "model")
    check(server.edit(model="fake/model:ink", lora="ink"), "invalid_value", "lora")


@pytest.mark.slow
def test_ten_thousand_files_are_listed_and_named(tmp_path: Path) -> None:
    """By a launched server; `Adapters` of its workers registers the files without reading them."""
    count, seconds = 10_000, 20.0
    for number in range(count):
        (tmp_path / f"style-{number:05}.safetensors").write_bytes(b"12345")
    began = time.monotonic()
    assert "style-09999" in Adapters(tmp_path)
    assert time.monotonic() - began < seconds
    with (
        launched(60, lora_dir=str(tmp_path)) as server,
        httpx.Client(base_url=server.url, timeout=seconds) as client,
    ):
        names = [f"style-{number:05}" for number in range(count)]
        assert [one["id"] for one in client.get("/v1/adapters").json()["data"]] == names
        base, *others = client.get("/v1/models").json()["data"]
        assert base["maskfx"]["loras"] == names
        assert [one["id"] for one in others] == [f"{base['id']}:{name}" for name in names]
        assert not any("loras" in one["maskfx"] for one in others), "each would list all"
        last = client.get(f"/v1/models/{base['id']}:style-09999").json()
        assert last == others[-1]
        given, files = {"prompt": "a cat"}, {"image": PICTURE, "mask": MASK}
        for more in ({"lora": "style-04999:0.5"}, {"model": f"{base['id']}:style-00000"}):
            made = client.post("/v1/images/edits", files=files, data={**given, **more})
            assert made.status_code == 200, made.text
        given["lora"] = "style-10000"
        unknown = client.post("/v1/images/edits", files=files, data=given)
        check(unknown, "lora_not_found", "lora")
