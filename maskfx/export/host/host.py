"""Host: runs the steps of an exported denoiser around graphs that something else computes.

A step takes calls with masks, makes the inputs of one graph for all of them, and returns their full
results. The graphs are computed by a function that the caller gives, with the graph's name and its
inputs by name: onnxruntime, TensorRT, a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maskfx.errors import InputError, MissingRequest
from maskfx.export.host.arguments import Arguments, check_arguments, number_at
from maskfx.export.host.arrays import Array, Bools
from maskfx.export.host.checks import check_edit, check_regions
from maskfx.export.host.dimensions import dimension_size
from maskfx.export.host.frame import HostFrame, HostMember
from maskfx.export.host.layout import HostLane, HostLayout
from maskfx.export.host.recording import Recording, keep
from maskfx.export.host.rows import own_parts, own_rows, placed
from maskfx.export.host.sites import Sites
from maskfx.export.manifest import check, read_manifest
from maskfx.ir.json_values import Document

Run = Callable[[str, Mapping[str, Array]], Sequence[Array]]  # graph, inputs -> outputs


@dataclass(frozen=True)
class Edit:
    """Computes the masked sites and reads the rest from a recording.

    Args:
        arguments: the denoiser's arguments by name.
        mask: true where the picture is edited: (height, width) of the latent, or (tokens,).
        recording: the recorded step.
        regions: the active sites of regions that have others than the mask's, by number.
        any_step: accept a recording of another step.
        request: what `Host.request` computed from these arguments; computed again if left out.
    """

    arguments: Mapping[str, object]
    mask: Bools
    recording: Recording
    regions: Mapping[int, Bools] = field(default_factory=dict)
    any_step: bool = False
    request: Sequence[Array] | None = None


@dataclass(frozen=True)
class Record:
    """Computes all sites and records what later edits read."""

    arguments: Mapping[str, object]
    request: Sequence[Array] | None = None


@dataclass(frozen=True)
class Result:
    """The denoiser's results of one call, and its recording if it was recorded."""

    outputs: list[Array]
    recording: Recording | None = None


class Host:
    """Runs the steps of one exported denoiser.

    Args:
        manifest: the manifest, which is checked.
    """

    def __init__(self, manifest: Mapping[str, object]) -> None:
        self.manifest = check(manifest)
        self.layout = HostLayout.read(manifest)

    @staticmethod
    def read(directory: str | Path) -> Host:
        """Return the host of the exported denoiser in a directory."""
        return Host(read_manifest(directory))

    def request(self, arguments: Mapping[str, object], run: Run) -> list[Array]:
        """Compute what depends on the request alone; it is the same in all steps of a request."""
        return self._side("side_request", check_arguments(self.manifest, arguments), run)

    def dense(self, arguments: Mapping[str, object], run: Run) -> list[Array]:
        """Compute a call with the denoiser's own graph, without rows and recording."""
        self._graph("dense")
        return self._side("dense", check_arguments(self.manifest, arguments), run)

    def step(self, calls: Sequence[Edit | Record], run: Run) -> list[Result]:
        """Run calls as one batch and return the result of each.

        Args:
            calls: edits and recordings, of any sizes, masks and texts.
            run: computes a graph, whose inputs it gets by name; returns the outputs in order.
        """
        if not calls:
            raise MissingRequest("step() got an empty list; pass at least one call")
        checked = [check_arguments(self.manifest, call.arguments) for call in calls]
        for call, arguments in zip(calls, checked, strict=True):
            if isinstance(call, Edit):
                check_edit(self.manifest, arguments, call.mask, call.recording, call.any_step)
        results: list[Result | None] = [
            unedited(call) if isinstance(call, Edit) and not call.mask.any() else None
            for call in calls
        ]
        chosen = [n for n, result in enumerate(results) if result is None]
        if chosen:
            found = self._run([calls[n] for n in chosen], [checked[n] for n in chosen], run)
            for number, result in zip(chosen, found, strict=True):
                results[number] = result
        return [result for result in results if result is not None]

    def _run(
        self, calls: Sequence[Edit | Record], checked: Sequence[Arguments], run: Run
    ) -> list[Result]:
        members = [self._member(call, a, run) for call, a in zip(calls, checked, strict=True)]
        frame = HostFrame(self.manifest, members)
        name = "record" if any(isinstance(call, Record) for call in calls) else "edit"
        graph = self._graph(name)
        values = run(name, frame.inputs(name))
        if len(values) != len(graph["outputs"]):
            raise InputError(
                f"run({name!r}) returned {len(values)} outputs; the manifest has "
                f"{len(graph['outputs'])}"
            )
        outputs = {
            described["name"]: (described, self._checked(name, described, value, frame))
            for described, value in zip(graph["outputs"], values, strict=True)
        }
        return [
            self._result(frame, n, isinstance(call, Record), outputs, checked[n])
            for n, call in enumerate(calls)
        ]

    def _checked(self, graph: str, described: Document, value: object, frame: HostFrame) -> Array:
        """Return a graph's output; raise InputError if its shape isn't that of this batch."""
        found, table = np.asarray(value), self.manifest["dimensions"]
        wanted = [
            dimension_size(table[dim], frame.tables) if isinstance(dim, str) else dim
            for dim in described["dims"]
        ]
        if list(found.shape) != wanted:
            raise InputError(
                f"run({graph!r}) returned {described['name']} of shape {list(found.shape)}, "
                f"expected {wanted}: {described['dims']}"
            )
        return found

    def _member(self, call: Edit | Record, arguments: Arguments, run: Run) -> HostMember:
        request = call.request
        if request is None:
            request = self._side("side_request", arguments, run)
        given = {
            "argument": arguments.values,
            "side_request": request,
            "side_dense": self._side("side_dense", arguments, run),
        }
        batch = arguments.sizes["batch"]
        if not isinstance(call, Edit):
            return HostMember(Sites(self.layout, arguments.sizes, None), batch, given)
        regions = check_regions(self.manifest, self.layout, call.mask, call.regions, call.recording)
        if call.mask.all() and all(sites.all() for sites in regions.values()):
            return HostMember(Sites(self.layout, arguments.sizes, None), batch, given)
        sites = Sites(self.layout, arguments.sizes, call.mask, regions)
        return HostMember(sites, batch, given, call.recording)

    def _result(
        self,
        frame: HostFrame,
        number: int,
        records: bool,
        outputs: Mapping[str, tuple[Document, Array]],
        arguments: Arguments,
    ) -> Result:
        """Return a call's part of a graph's outputs: full results, and a recording."""
        member = frame.members[number]
        full: list[Array] = []
        emitted: dict[str, Array] = {}
        for described, value in outputs.values():
            if described["tap"] is not None:
                tap = self.manifest["taps"][described["tap"]]
                parts = own_parts(value, tap["segments"], frame.tables, number)
                pairs = zip(tap["segments"], parts, strict=True)
                images = [p for name, p in pairs if self.layout.segments[name].is_image]
                emitted[described["tap"]] = np.concatenate(images, 1)
                continue
            lane = HostLane.read(described["lane"])
            own = own_rows(value, lane, frame.tables, number)
            if lane.kind == "rows":
                kept = member.recording
                recorded = None if kept is None else kept.output[len(full)]
                own = placed(own, lane, member.sites, recorded)
            full.append(own)
        if not records:
            return Result(full)
        recording = Recording(
            self.manifest["code"],
            dict(arguments.sizes),
            [value.copy() for value in full],
            {name: value.copy() for name, value in arguments.step.items()},
            self.manifest["weights"],
            constants=arguments.constants,
        )
        keep(recording, self.manifest["taps"], emitted)
        return Result(full, recording)

    # Graphs that compute full values.

    def _graph(self, name: str) -> Document:
        graphs = self.manifest["graphs"]
        if name not in graphs:
            raise MissingRequest(
                f"this export has no graph {name!r}, only {sorted(graphs)}; export the denoiser "
                "with part='all'"
            )
        found: Document = graphs[name]
        return found

    def _side(self, name: str, arguments: Arguments, run: Run) -> list[Array]:
        """Compute a graph of full values; one whose batch is fixed runs as often as needed."""
        if name not in self.manifest["graphs"]:
            return []
        graph, fixed = self._graph(name), self.manifest["sizes"]["batch"]
        batch = arguments.sizes["batch"]
        if fixed is None or fixed == batch:
            return list(run(name, self._whole(graph, arguments.values)))
        runs = [
            run(name, self._whole(graph, self._group(arguments.values, start, fixed)))
            for start in range(0, batch, fixed)
        ]
        lanes = [HostLane.read(output["lane"] or []) for output in graph["outputs"]]
        return [joined(parts, lane, batch) for lane, *parts in zip(lanes, *runs, strict=True)]

    def _whole(self, graph: Document, values: Sequence[object]) -> dict[str, Array]:
        """Return the inputs of a graph of full values; a number is the length of its input."""
        found = {}
        for item in graph["inputs"]:
            source = item["source"]
            value: Any = values[source["index"]]
            if source["kind"] == "number_at":
                value = np.zeros(number_at(source, value), np.int64)
            elif self.manifest["arguments"][source["index"]]["kind"] == "number":
                value = np.zeros(int(value), np.int64)
            found[item["name"]] = value
        return found

    def _group(self, values: Sequence[Any], start: int, fixed: int) -> list[object]:
        """Return the arguments of `fixed` batch elements from `start`, the last one repeated."""
        out = list(values)
        for number, argument in enumerate(self.manifest["arguments"]):
            for axis, dim in enumerate(argument.get("dims", ())):
                if isinstance(dim, str) and self.manifest["dimensions"][dim]["role"] == "batch":
                    last = values[number].shape[axis] - 1
                    index = np.arange(start, start + fixed).clip(max=last)
                    out[number] = values[number].take(index, axis)
        return out


def unedited(call: Edit) -> Result:
    """Return the recorded results, of an edit of no site."""
    return Result([np.array(value) for value in call.recording.output])


def joined(parts: Sequence[Array], lane: HostLane, batch: int) -> Array:
    """Concatenate results of several runs along the batch, without the last run's surplus."""
    if not any(axis.kind == "batch" for axis in lane.axes):
        return parts[0]
    axis = lane.batch_dim
    if lane.dims[axis][0].kind != "batch":
        raise InputError(
            f"values of {batch} batch elements can't be joined along an axis whose outermost part "
            "isn't the batch; run the requests in separate calls"
        )
    whole = np.concatenate(list(parts), axis)
    return whole.take(np.arange(batch * lane.features(axis)), axis)
