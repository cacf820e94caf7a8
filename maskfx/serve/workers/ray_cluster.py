"""The Ray cluster of a server: joined or started, and checked for what workers need."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ray

from maskfx.errors import InputError
from maskfx.serve.config import RaySettings, ServeSettings
from maskfx.serve.workers.executor import SECRETS

REACH_SECONDS = 5.0  # for the first connection to an address
STORE_BYTES = 80 << 20  # of a local cluster: pictures go by the link, not by Ray
SHOWN = 8  # nodes in a message

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process has joined."""

    host: str  # address of this process for the cluster's nodes
    node: str  # id of this process's node; empty if it is on none
    local: bool  # started for this server, of one node


def join(settings: ServeSettings) -> Cluster:
    """Join the cluster of the settings, or start one; InputError if that isn't possible."""
    address = settings.ray.address
    check_device(settings)
    if address is None:
        return start_local(settings)
    target = address.removeprefix("ray://")
    if address != "auto":
        check_reachable(target)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # of many types, by Ray's version
        raise InputError(not_joined(address, error)) from None
    client = address.startswith("ray://")
    node = "" if client else ray.get_runtime_context().get_node_id()
    host = settings.ray.link_host or own_address()
    return Cluster(host, node, local=False)


def start_local(settings: ServeSettings) -> Cluster:
    """Start a cluster of this machine alone, which ends with this process."""
    try:
        with without_secrets():
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
    except Exception as error:
        message = f"executor ray: no cluster could be started on this machine: {brief(error)}"
        raise InputError(f"{message}; its log is in /tmp/ray/session_latest/logs") from None
    need = needs(settings)
    if places(need, totals()) < settings.workers:
        why = too_few(need, settings.workers)
        shutdown()
        raise InputError(f"executor ray: {why}")
    return Cluster("127.0.0.1", ray.get_runtime_context().get_node_id(), local=True)


def own_address() -> str:
    """Return the address of this machine as the cluster's nodes see it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def shutdown() -> None:
    """Leave the cluster; a local one ends."""
    ray.shutdown()


@contextlib.contextmanager
def without_secrets() -> Iterator[None]:
    """Hide secret variables from the processes that are started meanwhile."""
    hidden = {name: os.environ.pop(name) for name in SECRETS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


# Checks.


def check_device(settings: ServeSettings) -> None:
    """Refuse devices that don't fit the reserved GPUs."""
    device, gpus = settings.device, gpus_of(settings)
    if device.startswith("cuda:"):
        raise InputError(
            f"device {device}: with executor ray each worker sees only the GPUs that Ray "
            "assigned to it; set device to cuda"
        )
    if device == "cuda" and not gpus:
        raise InputError("device cuda: ray.gpus is 0, so Ray hides all GPUs; set it to 1")


def check_reachable(target: str) -> None:
    """Refuse an address where nothing listens, which Ray would retry for long."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"ray.address {target}: no cluster answers there: {why.lower()}; "
            "see `ray status` on its head node, whose port is 6379 by default"
        ) from None


def not_joined(address: str, error: Exception) -> str:
    """Describe why a cluster can't be joined, and what to do."""
    if isinstance(error, ImportError):
        return (
            f"ray.address {address}: Ray's client isn't installed ({error}); install it with: "
            "pip install 'ray[client]', or start the server on a node of the cluster, with auto"
        )
    hint = (
        "start it on a node of the cluster, or give the head's HOST:PORT"
        if address == "auto"
        else "this machine must be a node of the cluster (`ray start --address=HOST:PORT`), with "
        "the same versions of Ray and Python"
    )
    return f"ray.address {address}: the cluster can't be joined: {brief(error)}; {hint}"


def brief(error: BaseException) -> str:
    """Return an error's text on one line, its cause's if another process raised it."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, BaseException) else error)
    return " ".join(text.split())[:1000] or type(error).__name__


# Resources.


def gpus_of(settings: ServeSettings) -> float:
    """Return the GPUs of one process of a worker."""
    given = settings.ray.gpus
    return float(settings.device.startswith("cuda")) if given is None else given


def needs(settings: ServeSettings) -> dict[str, float]:
    """Return what a worker reserves, all of it on one node."""
    ranks, ray_settings = settings.ranks, settings.ray
    needed = {"CPU": ranks * ray_settings.cpus, "GPU": ranks * gpus_of(settings)}
    needed |= amounts(ray_settings)
    return {name: amount for name, amount in needed.items() if amount}


def amounts(settings: RaySettings) -> dict[str, float]:
    pairs = (each.split("=") for each in settings.resources)
    return {name: float(amount) for name, amount in pairs}


def totals() -> list[tuple[str, Resources]]:
    """Return the address and all resources of each living node."""
    found = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [(node["NodeManagerAddress"], node["Resources"]) for node in found]


def places(need: Resources, nodes: Sequence[tuple[str, Resources]]) -> float:
    """Return the number of workers that nodes have room for if nothing else runs there."""
    return sum(
        min((held.get(name, 0) // amount for name, amount in need.items()), default=float("inf"))
        for _, held in nodes
    )


def too_few(need: Resources, workers: int) -> str:
    """Describe resources that don't suffice, and what to do."""
    nodes = totals()
    seen = "; ".join(f"{address}: {listed(held)}" for address, held in nodes[:SHOWN])
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    free = listed(ray.available_resources())  # type: ignore[no-untyped-call]
    return (
        f"{workers} workers need {listed(need)} each, on one node; the cluster's nodes have "
        f"{seen or 'nothing'}{more}; free now, of all: {free}; add nodes, or lower workers, "
        "ray.cpus, ray.gpus or ray.resources"
    )


def listed(resources: Resources) -> str:
    """Format resources; what Ray adds for each node and for memory is left out."""
    shown = {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(("node:", "memory", "object_store_memory", "accelerator_type"))
        and "_group_" not in name
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"
