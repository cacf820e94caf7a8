"""narrow_whole: a module that computes each token by itself runs on rows."""

from functools import partial

import pytest

import maskfx
from maskfx.passes.narrow.whole import narrow_whole
from tests.factories.experts import Capped, Routed, Tokens, seeded
from tests.passes.tools import (
    a_mask,
    check_values,
    denoiser_of,
    error,
    joint,
    run_pass,
    tokens,
)

STYLES = ("sorted", "masked", "one_hot", "grouped")


@pytest.mark.parametrize("style", STYLES)
def test_runs_experts_on_rows(style: str) -> None:
    module = seeded(partial(Tokens, partial(Routed, style)))
    run = run_pass(narrow_whole, module, tokens)
    assert run.rewrites == run.before["run_whole"] == run.after["run_whole"] == 2
    check_values(module, tokens, oracle=False)


def test_runs_experts_on_rows_of_text_and_image() -> None:
    module = seeded(partial(Tokens, partial(Routed, "sorted", experts=5, top=3), text=True))
    assert run_pass(narrow_whole, module, joint).rewrites == 2
    check_values(module, joint, oracle=False)


def test_keeps_experts_whose_tokens_compete() -> None:
    module = seeded(partial(Tokens, partial(Capped, "sorted")))
    compilation = denoiser_of(module, tokens).compilations[0]
    assert compilation.program is None
    assert compilation.capture.module is None


def test_keeps_modules_that_can_be_traced() -> None:
    module = seeded(partial(Tokens, partial(Routed, "gathered")))
    run = run_pass(narrow_whole, module, tokens)
    assert run.before["run_whole"] == 0
    assert run.unchanged
    check_values(module, tokens, oracle=False)


def test_experts_run_operator_by_operator_under_inductor() -> None:
    module = seeded(partial(Tokens, partial(Routed, "sorted")))
    denoiser, inputs = maskfx.compile(module, inductor=True), tokens()
    output, kept = denoiser.record(**inputs)
    step = maskfx.EditStep(inputs, a_mask(inputs), kept)
    assert error(denoiser.edit([step])[0], output) < 1e-4
    assert all(one.program is not None for one in denoiser.compilations)


def test_second_run_rewrites_nothing() -> None:
    module = seeded(partial(Tokens, partial(Routed, "sorted")))
    assert run_pass(narrow_whole, module, tokens).second_run_is_idle()
