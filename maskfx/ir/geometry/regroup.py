"""How views regroup the atoms of a lane, from one level of the image to another.

A site axis splits into a coarser level's axis and features, or into a fixed number of parts and
the places in them, and such pairs merge back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from maskfx.ir.geometry.lanes import Atom, Dim, Feature, NotLaned, Part, X, Y, atom_name
from maskfx.ir.geometry.pyramid import Level, Pyramid

MOST = 16  # sites along a side of a patch


def regroup(
    atoms: Iterable[Atom],
    sizes: Sequence[int],
    pyramid: Pyramid,
    fixed: Sequence[bool] = (),
) -> tuple[Dim, ...]:
    """Return the dimensions of a view: the same atoms in the same order, regrouped.

    Features split where needed. A site axis may split into a coarser level's axis and features
    (patchify), and such a pair merges back into the finer level's axis (unpatchify). One whose
    first part has a size that is `fixed`, whatever the picture's, is cut into that many parts.
    """
    left = joined_parts([a for a in atoms if pyramid.size(a) != 1])
    dims: list[Dim] = []
    all_fixed = bool(fixed) and all(fixed)  # what is written as a size then isn't known
    fixed = fixed or [False] * len(sizes)
    for size, is_fixed in zip(sizes, fixed, strict=True):
        dim: list[Atom] = []
        need = size
        while need > 1:
            if not left:
                raise NotLaned(f"no axes are left for a view to {list(sizes)}")
            atom = left.pop(0)
            have = pyramid.size(atom)
            if need % have == 0:
                dim.append(atom)
                need //= have
            elif have % need == 0:
                first, second = split_atom(atom, need, pyramid, None if all_fixed else is_fixed)
                dim.append(first)
                left.insert(0, second)
                need = 1
            else:
                raise NotLaned(f"a view to {list(sizes)} cuts across {atom_name(atom)}")
        dims.append(tuple(dim))
    if any(pyramid.size(a) != 1 for a in left):
        raise NotLaned(f"a view to {list(sizes)} drops {[atom_name(a) for a in left]}")
    return merge_patches(tuple(dims), pyramid)


def joined_parts(atoms: Sequence[Atom]) -> list[Atom]:
    """Return atoms in which the parts of an axis and the places in them are the axis again."""
    found: list[Atom] = []
    for atom in atoms:
        before = found[-1] if found else None
        if isinstance(atom, Part) and atom.inner and before == replace(atom, inner=False):
            found[-1] = atom.axis
        else:
            found.append(atom)
    return found


def split_atom(atom: Atom, first: int, pyramid: Pyramid, fixed: bool | None) -> tuple[Atom, Atom]:
    """Split an atom into a product of two, the first of the given size.

    `fixed`: whether that is the size for any picture; None if it isn't known.
    """
    if isinstance(atom, Feature):
        return Feature(first), Feature(atom.size // first)
    if isinstance(atom, (Y, X)):
        patch = pyramid.size(atom) // first
        if fixed or fixed is None and patch > MOST:
            return Part(atom, first, False), Part(atom, first, True)
        if patch > MOST:
            raise NotLaned(f"{atom_name(atom)} is split into {first} x {patch}")
        coarse = pyramid.derive(Level(parent=atom.level, divide=(patch, patch)))
        return replace(atom, level=coarse), Feature(patch)
    raise NotLaned(f"{atom_name(atom)} is split into {first} x {pyramid.size(atom) // first}")


def merge_patches(dims: tuple[Dim, ...], pyramid: Pyramid) -> tuple[Dim, ...]:
    """Merge (y1 p) and (x1 p) into the finer level's y0 and x0, if both are present.

    They may be dimensions, or follow each other in one, as tokens do.
    """
    found = {
        kind: [place for place in patches_in(dims) if isinstance(dims[place[0]][place[1]], kind)]
        for kind in (Y, X)
    }
    if any(len(places) != 1 for places in found.values()):
        return dims
    (own,), (other,) = found.values()
    coarse, patch = dims[own[0]][own[1]], dims[own[0]][own[1] + 1]
    if patch != dims[other[0]][other[1] + 1]:
        return dims
    assert isinstance(coarse, Y)
    assert isinstance(patch, Feature)
    fine = pyramid.derive(Level(parent=coarse.level, times=(patch.size, patch.size)))
    out = [list(dim) for dim in dims]
    axes: dict[tuple[int, int], Atom] = {own: pyramid.y(fine), other: pyramid.x(fine)}
    for dim, at in sorted(axes, reverse=True):  # the last one first, so that places stay
        out[dim][at : at + 2] = [axes[dim, at]]
    return tuple(map(tuple, out))


def patches_in(dims: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """Yield the dimension and the place in it of each axis of the picture with one feature axis."""
    for i, dim in enumerate(dims):
        for k, atom in enumerate(dim):
            after = [isinstance(a, Feature) for a in dim[k + 1 : k + 3]]
            if isinstance(atom, (Y, X)) and after[:1] == [True] and after[1:] != [True]:
                yield i, k
