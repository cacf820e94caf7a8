"""The actor of a Ray cluster that is a worker.

Its class is made by a function, so that Ray sends its code instead of its name: then it can check,
on a node with another maskfx or with none, what is installed there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from maskfx.serve.config import ServeSettings
from maskfx.serve.logs import configure_logs
from maskfx.serve.workers.executor import SECRETS, WorkerAddress
from maskfx.serve.workers.link_keys import RemoteAddress
from maskfx.serve.workers.process import WorkerProcess, run_worker


def actor_class() -> type:
    """Return the actor's class. It refers to nothing outside of itself but what it imports."""

    class MaskfxWorker:
        """A worker, or an error that states what its node lacks."""

        def __init__(self, wanted: str) -> None:
            import socket

            import ray

            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            where = f"node {address} ({socket.gethostname()})"
            todo = f"install maskfx {wanted} there, with its extras serve and ray"
            try:
                import maskfx
            except ImportError as missing:
                raise RuntimeError(f"{where} has no maskfx ({missing}); {todo}") from None
            if maskfx.__version__ != wanted:
                seen = maskfx.__version__
                raise RuntimeError(f"{where} has maskfx {seen}, the server has {wanted}; {todo}")

        def place(self) -> dict[str, Any]:
            """Return where this actor runs."""
            import os
            import socket

            import ray

            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            return {
                "node": ray.get_runtime_context().get_node_id(),
                "address": address,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            }

        def run(self, worker: dict[str, object], settings: str) -> int:
            """Serve requests until the front end asks to stop; return the exit code."""
            from maskfx.serve.workers.ray_actor import run_here

            return run_here(worker, settings, self.place()["node"])

    return MaskfxWorker


def run_here(worker: Mapping[str, Any], settings: str, node: str) -> int:
    """Run a worker in this process.

    Args:
        worker: Its name, the addresses of the front end, and the front end's node.
        settings: The settings, as JSON.
        node: The id of this node.
    """
    for name in SECRETS:
        os.environ.pop(name, None)
    remote = None if worker["remote"] is None else RemoteAddress(**worker["remote"])
    place = WorkerAddress(worker["address"], worker["name"], remote, label_of(node))
    if node == worker["node"] and socket_exists(place.address):
        place = replace(place, remote=None)  # without encryption, and as fast as a child process
    told = ServeSettings.model_validate_json(settings)
    process = WorkerProcess(place, told)
    configure_logs(told.log_level, copy=process.log, worker=place.name, node=place.node)
    return run_worker(process)


def socket_exists(address: str) -> bool:
    return os.path.exists(address.removeprefix("ipc://"))


def label_of(node: str) -> str:
    """Return a node's short name in logs and metrics: the beginning of its id."""
    return node[:8]
