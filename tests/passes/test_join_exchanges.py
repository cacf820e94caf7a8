"""join_exchanges: border rows travel with the moments of the norm before their window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from maskfx import EditStep
from maskfx.compiler.rank_twins import SplitProgram, split_program
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import ReadOwner
from maskfx.passes.context import op_name
from tests.distributed import tiny
from tests.distributed.test_ranks import KINDS, check, error, mixed, shares
from tests.factories.masks import MASKS
from tests.factories.thread_ranks import ThreadRanks


def program(kind: Callable[[], nn.Module]) -> Program:
    return next(iter(tiny.compiled(kind).programs.values()))


def split(kind: Callable[[], nn.Module], joined: bool) -> SplitProgram:
    found = split_program(program(kind), joined=joined)
    assert not isinstance(found, str)
    return found


def ops_of(found: SplitProgram) -> Counter[str]:
    return Counter(op_name(n) for n in found.program.module.graph.nodes if op_name(n))


def test_joins_a_norm_and_the_window_after_it() -> None:
    before, after = (ops_of(split(tiny.Tiny, joined)) for joined in (False, True))
    assert before["peer_moments"] == after["exchange_normed"] == 1
    assert after["peer_moments"] == 0
    assert after["exchange"] == before["exchange"] - 1
    assert after["silu"] == before["silu"] + 1  # the sum after it reads this rank's rows alone
    found = split(tiny.Tiny, True)
    kinds = Counter(type(source) for source in found.program.interface.inputs.values())
    assert kinds[ReadOwner] == 1
    assert len(found.exchanges) == len(split(tiny.Tiny, False).exchanges) - 1


def test_keeps_rows_that_are_made_of_more_than_a_norm() -> None:
    """Of four norms one is added to other rows; the value of another is read by itself, too."""
    before, after = (ops_of(split(tiny.Resnet, joined)) for joined in (False, True))
    assert before["peer_moments"] == 4
    assert (after["exchange_normed"], after["peer_moments"]) == (3, 1)
    assert after["exchange"] == before["exchange"] - 3 == 2
    assert after["silu"] == before["silu"] + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_mixed_batch_of_norms_and_windows(ranks: int, kind: str) -> None:
    denoiser, steps = tiny.compiled(tiny.Resnet), mixed(ranks, tiny.Resnet)
    check(denoiser, steps, ThreadRanks(denoiser.settings, shares(kind, ranks, len(steps))))


def test_joined_exchanges_send_the_same_bytes_in_fewer_messages() -> None:
    denoiser, inputs = tiny.compiled(tiny.Resnet), tiny.inputs(5, 12, 12)
    cache = denoiser.record(**inputs)[1]
    step, sent, results = EditStep(inputs, MASKS["random"]((12, 12), 1), cache), [], []
    for joined in (False, True):
        split = ThreadRanks(denoiser.settings, shares("equal", 2, 1))
        run: Any = split.programs.run
        split.programs.run = lambda *given, j=joined, run=run: run(*given[:-1], j)  # type: ignore[method-assign]
        results += denoiser.step([step], split)
        sent.append(sum(split.sent))
    assert sent[0] == sent[1] > 0
    assert max(error(one, denoiser.module(**inputs)) for one in results) < 1e-4
