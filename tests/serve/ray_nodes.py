"""A Ray cluster of several nodes on this machine, and a front end whose workers run there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from maskfx.serve.config import RaySettings, ServeSettings
from maskfx.serve.frontend.frontend import Front
from tests.serve.fronts import QUICK, eventually, fronted

ROOT = Path(__file__).resolve().parents[2]
STORE_BYTES = 80 << 20  # the least that Ray accepts, almost
START_SECONDS = 120.0  # of workers on a busy machine


@contextlib.contextmanager
def nodes(*cpus: int) -> Iterator[Any]:
    """A cluster whose head has no CPUs and whose other nodes have these numbers of them."""
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))
    patch.setenv("RAY_AUTH_MODE", "disabled")  # tokens are for others' processes
    patch.delenv("RAY_ADDRESS", raising=False)
    common: dict[str, Any] = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    try:
        for number in cpus:
            cluster.add_node(num_cpus=number, **common)
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
        patch.undo()


@contextlib.asynccontextmanager
async def on_nodes(
    address: str,
    model: str = QUICK,
    *,
    workers: int = 1,
    wait: bool = True,
    **fields: Any,
) -> AsyncIterator[Front]:
    """A front end in the cluster at an address; all its workers are ready, unless set otherwise.

    Fields are those of the settings and of their table `ray`.
    """
    from maskfx.serve.workers.ray_cluster import join
    from maskfx.serve.workers.ray_executor import RayExecutor

    names = [name for name in fields if name in RaySettings.model_fields]
    ray = RaySettings(address=address, **{name: fields.pop(name) for name in names})
    told = ServeSettings(model=model, workers=workers, executor="ray", ray=ray, **fields)
    async with fronted(told=told, wait=False, executor=RayExecutor(join(told), told)) as front:
        if wait:
            await eventually(lambda: front.health().workers == workers, START_SECONDS)
        yield front
