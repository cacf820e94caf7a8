"""What compilations of one module show: which are of use to a call, and which are worth a try."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils import _pytree as pytree

from maskfx.compiler.capture.attempt_sizes import has_batch
from maskfx.compiler.compile import Compilation


def tried_in_vain(one: Compilation) -> bool:
    """Return True for a compilation of one sample without a program: such calls stay whole."""
    return one.capture.single and one.program is None


def is_frozen_program(found: Compilation, inputs: Mapping[str, object], single: bool) -> bool:
    """Return True for a program of one size that stands for calls with arguments like these."""
    own, frozen = found.capture, found.program is not None and found.capture.frozen is not None
    return frozen and own.single == single and own.in_spec == pytree.tree_structure(dict(inputs))


def treats_alone(found: Compilation) -> bool:
    """Return True if the module may treat its samples one by one, which a batch of one shows."""
    fixed = found.capture.fixed_batch not in (None, 1)
    whole = found.program is None or fixed and bool(found.reasons)
    return has_batch(found.capture.leaves) and whole


def asks_for_size(found: Compilation) -> bool:
    """Return True if experts run dense because the number that they choose is symbolic."""
    symbolic = found.capture.module is not None and found.capture.frozen is None
    return symbolic and any(r.startswith("how many it picks") for r in found.reasons.values())


def better(one: Compilation, other: Compilation) -> Compilation:
    """Return the compilation of which less runs dense; the first, if neither has a program."""
    if other.program is None:
        return one
    return min(one, other, key=lambda found: (found.program is None, len(found.reasons)))
