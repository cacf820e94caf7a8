"""What workers reserve, and what is reported of a cluster. No cluster is started."""

from __future__ import annotations

from typing import Any

import pytest

from maskfx.serve.config import RaySettings, ServeSettings

ray_cluster = pytest.importorskip(
    "maskfx.serve.workers.ray_cluster", reason="needs the extra `ray`", exc_type=ImportError
)


def settings(ranks: int = 1, device: str = "cpu", **ray: Any) -> ServeSettings:
    return ServeSettings(model="fake", ranks=ranks, device=device, ray=RaySettings(**ray))


def test_what_a_worker_reserves() -> None:
    needs = ray_cluster.needs
    assert needs(settings()) == {"CPU": 1}
    assert needs(settings(cpus=4, resources="disk=0.5,big=2")) == {"CPU": 4, "disk": 0.5, "big": 2}
    assert needs(settings(device="cuda")) == {"CPU": 1, "GPU": 1}
    assert needs(settings(device="cuda", gpus=0.5, cpus=0)) == {"GPU": 0.5}
    assert needs(settings(ranks=4, device="cuda", cpus=2)) == {"CPU": 8, "GPU": 4}


def test_room_is_counted_per_node() -> None:
    nodes = [("a", {"CPU": 7.0, "GPU": 1.0}), ("b", {"CPU": 4.0})]
    places = ray_cluster.places
    assert places({"CPU": 2}, nodes) == 5
    assert places({"CPU": 8}, nodes) == 0, "no node has as many, though all together do"
    assert places({"CPU": 2, "GPU": 1}, nodes) == 1
    assert places({"TPU": 1}, nodes) == 0


def test_resources_that_do_not_suffice_are_reported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"CPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0, "object_store_memory": 1e9}
    nodes = [
        {"Alive": k != 3, "NodeManagerAddress": f"10.0.0.{k}", "Resources": held} for k in range(12)
    ]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_cluster.ray, "available_resources", lambda: {"CPU": 1.5, **held})
    text = ray_cluster.too_few({"CPU": 4, "GPU": 1}, 2)
    assert "2 workers need CPU 4, GPU 1 each, on one node" in text
    assert "10.0.0.0: CPU 2; 10.0.0.1: CPU 2" in text
    assert "10.0.0.3" not in text
    assert "and 3 more" in text
    assert "memory" not in text
    assert "lower workers, ray.cpus, ray.gpus" in text


def test_clients_without_their_package_are_named() -> None:
    text = ray_cluster.not_joined("ray://head:10001", ImportError("no grpc"))
    assert "pip install 'ray[client]'" in text
    text = ray_cluster.not_joined("head:6379", RuntimeError("Version\n  mismatch"))
    assert "ray.address head:6379: the cluster can't be joined: Version mismatch;" in text
