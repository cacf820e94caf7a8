"""Which executor the settings select, and what they are refused for. No cluster is started."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from maskfx.serve.config import RaySettings, ServeSettings
from maskfx.serve.launch import LaunchRefusal, executor_of
from maskfx.serve.workers.executor import LOCAL


def settings(executor: Any = "ray", **fields: Any) -> ServeSettings:
    ray = {name: fields.pop(name) for name in tuple(fields) if name in RaySettings.model_fields}
    return ServeSettings(model="fake", executor=executor, ray=RaySettings(**ray), **fields)


def refusal(told: ServeSettings) -> str:
    with pytest.raises(LaunchRefusal) as caught:
        executor_of(told)
    return str(caught.value)


def test_child_processes_are_the_default() -> None:
    assert executor_of(ServeSettings(model="fake")) is LOCAL


def test_an_address_without_ray_is_refused() -> None:
    assert "--executor ray" in refusal(settings("processes", address="auto"))


def test_most_workers_are_no_fewer_than_workers() -> None:
    assert "ray.max_workers is 1, less than workers, 2" in refusal(
        settings(workers=2, max_workers=1)
    )


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray_cluster", "ray_executor", "ray_actor"):
        monkeypatch.delitem(sys.modules, f"maskfx.serve.workers.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'maskfx[ray]'" in refusal(settings())


def test_another_package_that_is_absent_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "maskfx.serve.workers.ray_cluster", None)
    with pytest.raises(ModuleNotFoundError):
        executor_of(settings())


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://head", "http://head:1", "head:", "a b:1"])
def test_addresses_have_three_forms(address: str) -> None:
    with pytest.raises(ValidationError):
        RaySettings(address=address)


@pytest.mark.parametrize("given", ["big", "big=", "big=0", "big=-1", "=1", "big=1=2"])
def test_resources_are_names_with_amounts(given: str) -> None:
    with pytest.raises(ValidationError, match="NAME=AMOUNT"):
        RaySettings(resources=given)


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as line:
        port = line.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        why = refusal(settings(address=address))
        assert f"ray.address 127.0.0.1:{port}: no cluster answers there" in why
        assert "refused" in why
        assert "ray status" in why


@pytest.mark.parametrize(
    ("device", "gpus", "wanted"),
    [("cuda:1", None, "set device to cuda"), ("cuda", 0.0, "ray.gpus is 0")],
)
def test_devices_fit_the_reserved_gpus(device: str, gpus: float | None, wanted: str) -> None:
    pytest.importorskip("ray")
    assert wanted in refusal(settings(device=device, gpus=gpus, address="127.0.0.1:1"))
