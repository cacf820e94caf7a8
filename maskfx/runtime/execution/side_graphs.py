"""Side graphs: computes in full what belongs to one request, and memoises the results."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from maskfx.compiler.capture.captured import Capture, groups_of
from maskfx.errors import InputError
from maskfx.ir.geometry.lanes import Batch, Lane
from maskfx.ir.programs.program import SideGraph
from maskfx.ir.weak_memo import WeakMemo
from maskfx.runtime.lora.calls import adapted
from maskfx.runtime.lora.layers import AdapterSet

RESULTS = 64  # kept: requests whose results are known


class SideMemo:
    """Memoises the results of a request graph for as long as the same tensors are passed."""

    def __init__(self) -> None:
        # adapters are held, because ids of their updates are in the key
        self.kept: WeakMemo[tuple[AdapterSet | None, Sequence[object]]] = WeakMemo(RESULTS)

    def run(
        self,
        side: SideGraph,
        capture: Capture,
        values: Sequence[Any],
        owner: int,
        batch: int,
        adapters: AdapterSet | None = None,
    ) -> Sequence[object]:
        key: list[Hashable] = [owner, batch, None if adapters is None else adapters.key]
        tensors = []
        for i in side.used:
            value = values[i]
            if not isinstance(value, Tensor):
                key.append(value)
            elif capture.leaves[i].step:  # only its size is used
                key.append(tuple(value.shape))
            else:
                tensors.append(value)

        def run() -> tuple[AdapterSet | None, Sequence[object]]:
            results = run_side(side, capture, values, adapters)
            return adapters, [r.detach() if isinstance(r, Tensor) else r for r in results]

        return self.kept.made_of(tensors, run, tuple(key))[1]

    def drop(self, gone: Collection[int]) -> None:
        """Release the results of requests that have updates of these ids (of their `Layers`)."""
        for key, (_, (adapters, _)) in self.kept.items():
            if adapters is not None and adapters.has(gone):
                self.kept.remove(key)


def run_side(
    side: SideGraph, capture: Capture, values: Sequence[object], adapters: AdapterSet | None = None
) -> Sequence[object]:
    """Run a side graph; one whose batch size is frozen runs as often as the call needs.

    Its layers have the updates of the request's adapters.
    """
    with adapted([(1, adapters)]):
        return _run_side(side, capture, values)


def _run_side(side: SideGraph, capture: Capture, values: Sequence[Any]) -> Sequence[object]:
    fixed = capture.fixed_batch
    batch = next(
        (
            v.shape[leaf.roles.index("batch")]
            for v, leaf in zip(values, capture.leaves, strict=True)
            if "batch" in leaf.roles
        ),
        1,
    )
    if fixed is None or fixed == batch or not side.lanes:
        results: Sequence[object] = side.module(*values)
        return results
    runs = [side.module(*group) for group in groups_of(capture.leaves, values, fixed)]
    joined = []
    for parts, lane in zip(zip(*runs, strict=True), side.lanes, strict=True):
        joined.append(join(parts, lane, batch, fixed) if lane.has_batch else parts[0])
    return joined


def join(parts: Sequence[Tensor], lane: Lane, batch: int, fixed: int) -> Tensor:
    """Concatenate results of runs of `fixed` requests along the batch axis, without a surplus."""
    axis = next(i for i, dim in enumerate(lane.dims) if Batch() in dim)
    if lane.dims[axis][0] != Batch():
        raise InputError(
            f"step(): values of {batch} requests can't be joined along {lane}, whose batch isn't "
            "outermost; run the requests in separate calls"
        )
    each = batch * parts[0].shape[axis] // fixed
    return torch.cat(list(parts), axis).narrow(axis, 0, each)
