"""Lists of samples without a batch, and the noisy picture of a sample that has several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Join:
    """How the results of samples form that of their call.

    Args:
        items: The kind of sequence whose items are samples; None where a tensor has all of them.
        axis: The dimension of a tensor along which samples lie.
    """

    items: type[list[Any]] | type[tuple[Any, ...]] | None = None
    axis: int = 0


def count_listed(inputs: Mapping[str, object]) -> int:
    """Return the number of samples that the call lists; 0 if it doesn't pass lists of samples."""
    return len(listed_pictures(inputs))


def picture_sides(inputs: Mapping[str, object]) -> list[tuple[int, ...]]:
    """Return the height and width of the noisy picture of each sample that the call lists."""
    return [tuple(own[-1].shape[-2:]) for own in listed_pictures(inputs)]


def listed_pictures(inputs: Mapping[Any, object]) -> list[list[Tensor]]:
    """Return the pictures of each sample that the call lists; [] if it has a batch.

    A sample is a picture, a list of several, or a mapping with its arguments.
    """
    # a mapping may hold lists of other things, where another argument is the picture
    for value in sorted(inputs.values(), key=lambda value: isinstance(value, Mapping)):
        if not any(is_picture(one) for one in tensors_of(value)):
            continue
        if isinstance(value, Mapping):
            return listed_pictures(value)
        if not isinstance(value, (list, tuple)):
            return []
        found, kinds = list(map(pictures_of, value)), set(map(kind_of, value))
        alike = len(kinds) == 1 and None not in kinds and all(found)
        if alike and are_samples([one for own in found for one in own]):
            return found
        return listed_pictures(dict(enumerate(value)))  # arguments in a sequence
    return []


def kind_of(entry: object) -> type | None:
    """Return which kind of entry a list of samples has; None for one that is no sample."""
    return next((kind for kind in (Tensor, Mapping, list, tuple) if isinstance(entry, kind)), None)


def pictures_of(entry: object) -> list[Tensor]:
    """Return the pictures of a sample in a list; [] if an entry is something else."""
    if isinstance(entry, Tensor):
        return [entry]
    if isinstance(entry, Mapping):
        return next(filter(None, map(pictures_of, entry.values())), [])
    if isinstance(entry, (list, tuple)):
        given = [one for one in entry if one is not None]
        tensors = [one for one in given if isinstance(one, Tensor)]
        return tensors if len(tensors) == len(given) else []
    return []


def are_samples(entries: Sequence[object]) -> bool:
    """Return True if a list's entries may be samples without a batch, which differ in size only.

    Other lists hold several arguments, or the levels of a pyramid.
    """
    shapes = [v.shape[:-2] if isinstance(v, Tensor) else None for v in entries]
    return bool(shapes) and bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)


def is_picture(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 3


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(part)


def noisy_path(first: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the noisy picture of a listed sample, given its first one: references precede it."""
    names = first.split(".")
    if len(names) < 3 or not names[-1].isdigit():
        return first
    before = ".".join(names[:-1]) + "."
    own = (p for p, v in tensors.items() if p.startswith(before) and is_picture(v))
    return max(own, key=lambda path: int(path.removeprefix(before)))
