"""narrow_choices: experts choose sites of the whole picture; edits follow the recorded choice."""

from functools import partial

import pytest
import torch

import maskfx
from maskfx.ir.programs.sources import Kept
from maskfx.passes.narrow.choices import narrow_choices
from tests.factories.experts import Choosing, Routed, Tokens, seeded
from tests.passes.tools import a_mask, check_values, denoiser_of, error, run_pass, tokens

STYLES = ("flat", "batched", "grouped")


@pytest.mark.parametrize("style", STYLES)
def test_keeps_to_the_recorded_choice(style: str) -> None:
    module = seeded(partial(Tokens, partial(Choosing, style)))
    run = run_pass(narrow_choices, module, tokens)
    assert run.gained("choose") == run.before["topk"] == 2
    assert run.after["topk"] == run.after["scatter_add"] == 0
    assert sum(isinstance(s, Kept) for s in run.ctx.interface.inputs.values()) == 2
    check_values(module, tokens, oracle=False)


def test_an_edit_of_other_tokens_has_the_choice_of_the_recording() -> None:
    """The masked tokens' experts are the recorded ones, and the others' tokens don't change."""
    module = seeded(partial(Tokens, partial(Choosing, "flat")))
    denoiser, first, other = denoiser_of(module, tokens), tokens(0), tokens(1)
    output, kept = denoiser.record(**first)
    mask = a_mask(first)
    step = maskfx.EditStep(other, mask, kept, any_step=True)
    found = denoiser.edit([step])[0]
    assert torch.equal(found[:, ~mask], output[:, ~mask])
    again = denoiser.step([maskfx.RecordStep(first), step, maskfx.DenseStep(other)])
    assert error(again[1], found) < 1e-5
    assert error(again[2], module(**other)) < 1e-4
    chosen = {n: rows for n, rows in kept.rows.items() if rows.shape[2:] == (3,)}  # type: ignore[union-attr]
    assert len(chosen) == 2
    for name, rows in chosen.items():  # none chosen: the experts add nothing
        kept.rows[name] = torch.zeros_like(rows)  # type: ignore[arg-type]
    assert error(denoiser.edit([step])[0], found) > 1e-2


def test_picks_features_of_each_row() -> None:
    module = seeded(partial(Tokens, partial(Routed, "gathered")))
    run = run_pass(narrow_choices, module, tokens)
    assert run.rewrites == run.before["topk"] + run.before["gather"] == 4
    check_values(module, tokens, oracle=False)


def test_keeps_topk_of_other_values() -> None:
    run = run_pass(narrow_choices, seeded(partial(Tokens, torch.nn.Tanh)), tokens)
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    module = seeded(partial(Tokens, partial(Choosing, "flat")))
    assert run_pass(narrow_choices, module, tokens).second_run_is_idle()
