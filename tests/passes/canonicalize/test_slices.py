"""canonicalize_slices: attention in slices of the batch and its heads is one attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import maskfx
from maskfx.passes.canonicalize.slices import canonicalize_slices
from tests.passes.canonicalize.test_attention import Attends, spelled
from tests.passes.tools import (
    TOLERANCE,
    a_mask,
    check_values,
    denoiser_of,
    error,
    joint,
    run_pass,
    shared,
    tokens,
)

NAME = "scaled_dot_product_attention"
Piece = Callable[[Tensor, Tensor, Tensor, slice], Tensor]


def sliced(q: Tensor, k: Tensor, v: Tensor, piece: Piece, size: int = 2) -> Tensor:
    """As diffusers' sliced processors do it: heads beside the batch, results into zeros."""
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = torch.zeros_like(flat[0])
    for first in range(0, out.shape[0], size):
        part = slice(first, first + size)
        out[part] = piece(flat[0], flat[1], flat[2], part)
    return out.unflatten(0, (q.shape[0], -1))


def attended(q: Tensor, k: Tensor, v: Tensor, part: slice) -> Tensor:
    return F.scaled_dot_product_attention(q[part], k[part], v[part], scale=0.3)


def in_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One attention for each slice."""
    return sliced(q, k, v, attended)


def in_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products and a softmax for each slice."""

    def piece(q: Tensor, k: Tensor, v: Tensor, part: slice) -> Tensor:
        scores = torch.bmm(q[part], k[part].transpose(-1, -2)) * 0.3
        return torch.bmm(scores.softmax(-1), v[part])

    return sliced(q, k, v, piece, 1)


def crossed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every slice has the keys of the first."""

    def piece(q: Tensor, k: Tensor, v: Tensor, part: slice) -> Tensor:
        return F.scaled_dot_product_attention(q[part], k[:2], v[:2], scale=0.3)

    return sliced(q, k, v, piece)


def cropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last slice stays zero."""
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = torch.zeros_like(flat[0])
    for first in range(0, out.shape[0] - 2, 2):
        out[first : first + 2] = attended(flat[0], flat[1], flat[2], slice(first, first + 2))
    return out.unflatten(0, (q.shape[0], -1))


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every slice has a scale of its own."""

    def piece(q: Tensor, k: Tensor, v: Tensor, part: slice) -> Tensor:
        scale = 0.1 * (1 + part.start)
        return F.scaled_dot_product_attention(q[part], k[part], v[part], scale=scale)

    return sliced(q, k, v, piece)


def changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """More than attention happens to each slice."""
    return sliced(q, k, v, lambda q, k, v, part: attended(q, k, v, part).relu())


@pytest.mark.parametrize("attend", [in_one, in_steps])
@pytest.mark.parametrize("make", [tokens, joint])
def test_spells_attention_in_slices(attend: Any, make: Any) -> None:
    module = Attends(attend)
    run = run_pass(canonicalize_slices, module, make)
    assert run.rewrites == run.after[NAME] == 1
    assert run.before[NAME] > 1
    assert run.after["slice_scatter"] == 0
    check_values(module, make, oracle=False)  # the twin doesn't know this spelling


@pytest.mark.parametrize("attend", [in_one, in_steps])
def test_edits_as_the_one_operator_does(attend: Any) -> None:
    first, then, found = tokens(0), tokens(2), []
    for module in (Attends(attend), Attends(spelled)):
        denoiser = denoiser_of(module, tokens)
        assert denoiser.programs
        kept = denoiser.record(**first)[1]
        step = maskfx.EditStep(then, a_mask(first), kept, any_step=True)
        found.append(denoiser.edit([step])[0])
    assert error(*found) < TOLERANCE


@pytest.mark.parametrize(
    "attend",
    [cropped, changed, *(pytest.param(one, marks=pytest.mark.slow) for one in (crossed, scaled))],
)
def test_keeps_what_the_one_operator_cannot_do(attend: Any) -> None:
    module = Attends(attend)
    assert run_pass(canonicalize_slices, module, tokens).unchanged
    denoiser = denoiser_of(module, tokens)  # its batch is fixed, and known to be: rows are right
    assert denoiser.programs
    assert error(denoiser.record(**tokens(3))[0], module(**tokens(3))) < TOLERANCE


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_slices, shared(Attends), tokens).second_run_is_idle()
