"""Lanes of videos whose frames lie beside the batch, each a picture for some operators."""

from __future__ import annotations

from maskfx.ir.geometry.lanes import PICTURE, SITES, Batch, Dim, Feature, Frames, Lane, X, Y, merged


def is_by_frame(lane: Lane) -> bool:
    """Return True if the first dimension has the frames of a video, and others have its sites."""
    kinds = [type(a) for a in lane.dims[0]]
    return kinds == [Batch, Frames] and not lane.is_half and bool(lane.segments)


def is_each_frame(one: Dim | None, other: Dim) -> bool:
    """Return True if one dimension's features are the other's frames.

    Each frame has a value of its own then, such as a time embedding, for all of its sites.
    """
    return one is not None and plain(one) == plain(other) and has_frames(one) != has_frames(other)


def frames_first(one: Dim | None, other: Dim) -> Dim:
    """Return the dimension that has the frames."""
    return one if one is not None and has_frames(one) else other


def has_frames(dim: Dim) -> bool:
    return any(isinstance(a, Frames) for a in dim)


def plain(dim: Dim) -> Dim:
    """Return the dimension with features in place of frames."""
    return merged(tuple(Feature(a.size) if isinstance(a, Frames) else a for a in dim))


def attends_by_frame(q: Lane, k: Lane, v: Lane) -> bool:
    """Return True if the sites of each frame attend to tokens that belong to the frame."""
    if not (len(q.dims) == len(k.dims) == len(v.dims) and len(q.dims) > 2 and is_by_frame(q)):
        return False
    heads = all(lane.is_feature_dim(i) for lane in (q, k, v) for i in range(1, len(q.dims) - 2))
    sites = [[a for a in lane.atoms() if isinstance(a, SITES)] for lane in (k, v)]
    return (
        heads
        and tuple(map(type, q.dims[-2])) == (Y, X)
        and all(merged(lane.dims[0]) == plain(q.dims[0]) for lane in (k, v))
        and merged(k.dims[-2]) == merged(v.dims[-2])
        and all(len(own) <= 1 and not any(isinstance(a, PICTURE) for a in own) for own in sites)
    )
