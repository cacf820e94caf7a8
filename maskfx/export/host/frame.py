"""Frame: makes the inputs of a graph for one batch of calls, from a manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from maskfx.export.host.arrays import Array, DType, Index, converted, dtype_of
from maskfx.export.host.layout import HostLane
from maskfx.export.host.recording import Recording, rest_stats, rest_sum, rows_at
from maskfx.export.host.rows import gathered
from maskfx.export.host.sites import Sites
from maskfx.export.host.tables import BatchTables
from maskfx.ir.json_values import Document


@dataclass(frozen=True)
class HostMember:
    """One call of a batch.

    Args:
        sites: its active sites.
        batch: its batch size; each batch element is a request.
        given: its full values by origin: "argument", "side_request", "side_dense".
        recording: the recorded step that it reads; None if all sites are active.
    """

    sites: Sites
    batch: int
    given: Mapping[str, Sequence[object]]
    recording: Recording | None = None


@dataclass
class HostFrame:
    """Makes the inputs of the graphs of one batch.

    Args:
        manifest: the manifest.
        members: the calls of the batch.
    """

    manifest: Document
    members: Sequence[HostMember]
    _stats: dict[tuple[tuple[str, ...], int], Array] = field(default_factory=dict)

    @cached_property
    def tables(self) -> BatchTables:
        sites = [member.sites for member in self.members]
        return BatchTables(sites, [member.batch for member in self.members])

    def inputs(self, graph: str) -> dict[str, Array]:
        """Return all inputs of a graph by name, in its order."""
        described = self.manifest["graphs"][graph]["inputs"]
        return {value["name"]: self.input(value) for value in described}

    def input(self, described: Document) -> Array:
        """Return an input that the manifest describes, in its type."""
        source = described["source"]
        dtype = dtype_of(described["dtype"])
        if source["kind"] == "pair_table":
            return self._pair_table(source, dtype)
        found = MAKERS[source["kind"]](self, source, described["name"])
        return np.asarray(converted(found, dtype), order="C")  # keeps scalars, too

    # Full values and rows of the cache.

    def _given(self, source: Document, name: str) -> Array:
        values = self._values(source)
        return gathered(values, HostLane.read(source["lane"]), self.tables, name)

    def _values(self, source: Document) -> list[Array]:
        return [np.asarray(m.given[source["of"]][source["index"]]) for m in self.members]

    def _cached(self, tap: str, pick: Callable[[Sites], Index]) -> Array:
        """Return the rows of a tap at the sites that `pick` returns for each call."""
        kept = self.manifest["taps"][tap]
        out = [np.empty((0, *kept["shape"]), dtype_of(kept["dtype"]))]
        for member in self.members:
            index = pick(member.sites)
            if member.recording is not None and len(index):
                rows = rows_at(member.recording.rows_of(tap), index)
                out.append(rows.reshape(-1, *kept["shape"]))
        return np.concatenate(out[1:] or out)

    def _halo(self, source: Document, name: str) -> Array:
        window = source["window"]
        return self._cached(source["tap"], lambda sites: sites.window(window)[1])

    def _rest(self, source: Document, name: str) -> Array:
        segments = source["segments"]
        return self._cached(source["tap"], lambda sites: sites.laid_out(segments, sites.rest))

    def _loaded(self, source: Document, name: str) -> Array:
        before, after = source["before"], source["after"]
        return self._cached(source["tap"], lambda sites: sites.missing(before, after))

    def _rest_stats(self, source: Document, name: str) -> Array:
        """Return one norm's part of the statistics, which those of one row set are made with."""
        taps, segments = self.manifest["taps"], source["segments"]
        groups = taps[source["tap"]]["groups"]
        alike = [n for n, t in taps.items() if (t["segments"], t["groups"]) == (segments, groups)]
        key = tuple(segments), groups
        if key not in self._stats:
            parts = [self._stats_of(member, key, len(alike)) for member in self.members]
            self._stats[key] = np.concatenate(parts)
        return self._stats[key][:, alike.index(source["tap"])]

    def _stats_of(self, member: HostMember, key: tuple[tuple[str, ...], int], norms: int) -> Array:
        (segments, groups), sites = key, member.sites
        rest = sum(map(sites.rest_count, segments))
        if member.recording is None or not rest:
            return np.zeros((member.batch, norms, groups, 3), dtype=np.float32)
        images = sites.layout.images(segments)
        active = sites.laid_out(images, sites.active)
        return rest_stats(member.recording.stats[key], active, rest)

    def _rest_sum(self, source: Document, name: str) -> Array:
        segments, out = source["segments"], []
        width = prod(self.manifest["taps"][source["tap"]]["shape"]) + 1
        for member in self.members:
            sites = member.sites
            rest = sum(map(sites.rest_count, segments))
            if member.recording is None or not rest:
                out.append(np.zeros((member.batch, width), dtype=np.float32))
                continue
            active = sites.laid_out(segments, sites.active)
            out.append(rest_sum(member.recording.rows_of(source["tap"]), active, rest))
        return np.concatenate(out)

    # Attention masks.

    def _masks(self, source: Document) -> list[Array]:
        """Return the (heads, queries, keys) mask of each request."""
        out = []
        for member, value in zip(self.members, self._values(source), strict=True):
            full = value.reshape(-1, source["heads"], *np.atleast_2d(value).shape[-2:])
            rows = joint_order(member.sites, source["queries"], with_rest=False)
            columns = joint_order(member.sites, source["keys"], with_rest=True)
            for request in range(member.batch):
                own = full[min(request, len(full) - 1)]
                own = picked(own, rows, 1) if source["queries"] else own
                out.append(picked(own, columns, 2))
        return out

    def _pairs(self, source: Document, name: str) -> Array:
        return np.concatenate([mask.reshape(-1) for mask in self._masks(source)])

    def _pair_table(self, source: Document, dtype: DType) -> Array:
        """Return the masks of all requests in one table, as numbers, between zeros."""
        layout = self.tables.layout
        images = layout.images(source["keys"])
        keys = [self.tables.owners(source["keys"]), self.tables.rest_owners(images)]
        columns = np.concatenate(keys)
        rows = self.tables.owners(source["queries"]) if source["queries"] else None
        count = 1 if rows is None else len(rows)
        out = np.zeros((source["heads"], count, len(columns)), dtype)
        for request, mask in enumerate(self._masks(source)):
            at = np.arange(1) if rows is None else np.flatnonzero(rows == request)
            out[:, at[:, None], np.flatnonzero(columns == request)] = added(mask, dtype)
        return out


def joint_order(sites: Sites, segments: Sequence[str], with_rest: bool) -> Index:
    """Return the sites of a joint axis in the order of rows: active ones, then the rest."""
    active = sites.laid_out(segments, sites.active)
    if not with_rest:
        return active
    return np.concatenate([active, sites.laid_out(segments, sites.rest)])


def picked(value: Array, index: Index, axis: int) -> Array:
    """Return these places of an axis; an axis of size 1 holds one value for all of them."""
    if value.shape[axis] > 1:
        return value.take(index, axis)
    shape = list(value.shape)
    shape[axis] = len(index)
    return np.broadcast_to(value, shape)


def added(mask: Array, dtype: DType) -> Array:
    """Return what an attention mask adds to products."""
    if mask.dtype == bool:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    return converted(mask, dtype)


MAKERS: dict[str, Callable[[HostFrame, Document, str], Array]] = {
    "given": HostFrame._given,
    "owner": lambda frame, source, _: frame.tables.owners(source["segments"]),
    "rest_owner": lambda frame, source, _: frame.tables.rest_owners(source["segments"]),
    "requests": lambda frame, source, _: np.arange(frame.tables.requests),
    "call_spans": lambda frame, source, _: frame.tables.call_spans(),
    "calls": lambda frame, source, _: frame.tables.calls(),
    "spans": lambda frame, source, _: frame.tables.spans(source["segments"]),
    "rest_spans": lambda frame, source, _: frame.tables.rest_spans(source["segments"]),
    "neighbours": lambda frame, source, _: frame.tables.neighbours(source["window"]),
    "weights": lambda frame, source, _: frame.tables.weights(source["window"]),
    "parents": lambda frame, s, _: frame.tables.parents(s["source"], s["target"]),
    "subsites": lambda frame, s, _: frame.tables.subsites(s["coarse"], s["fine"], s["patch"]),
    "lines": lambda frame, source, _: frame.tables.lines(source),
    "enter": lambda frame, s, _: frame.tables.enter(s["before"], s["after"]),
    "halo": HostFrame._halo,
    "rest": HostFrame._rest,
    "loaded": HostFrame._loaded,
    "rest_stats": HostFrame._rest_stats,
    "rest_sum": HostFrame._rest_sum,
    "pairs": HostFrame._pairs,
}
