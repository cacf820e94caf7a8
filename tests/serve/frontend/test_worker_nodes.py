"""Workers by node."""

from __future__ import annotations

from maskfx.serve.frontend.worker_nodes import WorkerNodes
from maskfx.serve.metrics import Metrics


def lines(metrics: Metrics) -> set[str]:
    found = metrics.text().decode().splitlines()
    names = ("maskfx_workers{", "maskfx_workers_lost_total{")
    return {line for line in found if line.startswith(names)}


def test_ready_and_lost_workers_by_node() -> None:
    metrics = Metrics()
    nodes = WorkerNodes(metrics)
    for worker, node in (("a", "n1"), ("b", "n1"), ("c", "n2")):
        nodes.joined(worker, node)
    assert nodes.counts() == {"n1": 2, "n2": 1}
    nodes.left("a")
    nodes.left("a")
    nodes.left("c", asked=True)
    nodes.left("c")
    assert nodes.counts() == {"n1": 1}
    assert lines(metrics) == {
        'maskfx_workers{node="n1"} 1.0',
        'maskfx_workers_lost_total{node="n1"} 1.0',
        'maskfx_workers_lost_total{node="n2"} 0.0',
    }


def test_without_a_cluster_there_are_no_nodes() -> None:
    metrics = Metrics()
    nodes = WorkerNodes(metrics)
    nodes.joined("a", "")
    assert nodes.counts() == {}
    assert 'maskfx_workers{node="local"} 1.0' in lines(metrics)
