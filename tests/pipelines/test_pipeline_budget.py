"""Pipelines whose templates have a budget: a template fits into it, edits are within bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import maskfx
from maskfx import Budget
from maskfx.errors import BudgetError, InputError
from maskfx.pipelines.call_policy import CallPosition
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.cache.tiers import Tiers
from tests.factories.pipelines import PIPES, anew, call_of, distance, latents, square

NAME = "FluxInpaintPipeline"
LARGE = 1 << 30


def edit(**more: Any) -> Any:
    return call_of(PIPES[NAME], 0, square(), **more)


def held(pipe: Any) -> int:
    return pipeline_state_of(pipe).library.tiers.counters().nbytes[Tier.HOST]


def facts(pipe: Any) -> tuple[int, int]:
    """How many steps a template of this pipeline has, and elements in each."""
    library = pipeline_state_of(pipe).library
    [template] = library._recorded
    slots = [slot for slot in library.recorded_calls(template) if slot[0] == "transformer"]
    found = library.templates["transformer"].get(template, 0, min(b for _, s, b in slots if s == 0))
    assert found is not None
    steps = {step for _, step, _ in slots}
    return max(steps) + 1, found.sizes["batch"] * (len(slots) // len(steps))


def test_a_pipelines_template_obeys_its_budget() -> None:
    free = anew(NAME)
    wanted, whole = latents(free, **edit()), held(free)
    steps, branches = facts(free)
    seen = set()
    for part, allow in ((1.05, ()), (0.7, ("16bit",)), (0.45, ("8bit", "16bit"))):
        budget = Budget(part * whole, steps, branches, allow)
        pipe = anew(NAME, library=TemplateLibrary(Tiers(host_bytes=LARGE), budget=budget))
        off = distance(latents(pipe, **edit()), wanted)
        keeping = pipeline_state_of(pipe).library.templates["transformer"].keeping
        assert keeping is not None
        assert 0.5 * part * whole < held(pipe) <= budget.nbytes
        assert off < {"lossless": 1e-5, "16bit": 5e-3, "8bit": 0.1}[keeping.encoding]
        assert (off > 0) == (keeping.encoding != "lossless")
        assert "no recording" not in maskfx.explain(pipe)
        seen.add(keeping.encoding)
    assert seen == {"lossless", "16bit", "8bit"}


def test_compile_takes_the_budget_and_says_what_does_not_fit() -> None:
    pipe = maskfx.compile(PIPES[NAME].build(), budget=Budget(1e4, 1), quality="all-steps")
    assert pipeline_state_of(pipe).library.budget == Budget(1e4, 1)
    for budget, said in (
        (Budget(1e3, 50, 2), "latents alone take .*give more"),
        (Budget(8e4, 4, 2), "don't fit into .*smallest template needs"),
        (Budget(1e9, 1, 2), r"number 1, but the budget is for 1 steps, .*give Budget\(steps=\)"),
    ):
        one = anew(NAME, library=TemplateLibrary(Tiers(host_bytes=LARGE), budget=budget))
        with pytest.raises(BudgetError, match=said):
            latents(one, **edit())


def test_more_branches_than_a_budget_is_for_are_an_error() -> None:
    library = TemplateLibrary(Tiers(host_bytes=LARGE), budget=Budget(1e9, 50, 1))
    library.begin("cat")
    both = StepCache("", {"batch": 2}, torch.float32, [], {})
    with pytest.raises(BudgetError, match=r"the budget is for 1; give Budget\(branches=2\)"):
        library.put("cat", CallPosition("transformer", 0, "0"), both)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"share": 2}, "share=2 .* the budget decides both; leave them out"),
        ({"keep": "keys"}, "keep='keys' .* leave them out"),
        (
            {"tiers": Tiers(host_bytes=1, encoding=Encoding(Format.INT8))},
            "the tiers have an encoding, .*give Tiers without encoding=",
        ),
        ({"mode": "dense"}, 'mode="dense" records nothing'),
    ],
)
def test_refuses_what_a_budget_decides(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        maskfx.compile(PIPES[NAME].build(), budget=Budget(1e9, 4), **more, quality="all-steps")


def test_a_budget_is_for_the_steps_that_edits_compute() -> None:
    """Ten steps, of which the quality computes six: the others keep nothing but latents."""

    def call() -> Any:
        return edit(num_inference_steps=10)

    full = replace(maskfx.Quality.of("balanced"), vae="full")  # as with a budget
    free = maskfx.compile(PIPES[NAME].build(), quality=full)
    wanted, whole = latents(free, **call()), held(free)
    _, branches = facts(free)
    budget = Budget(1.05 * whole, 10, branches)
    pipe = maskfx.compile(PIPES[NAME].build(), budget=budget, quality="balanced")
    assert distance(latents(pipe, **call()), wanted) < 1e-5
    library = pipeline_state_of(pipe).library
    [template] = library._recorded
    steps = {step for name, step, _ in library.recorded_calls(template) if name == "transformer"}
    assert len(steps) == 6
    assert 0.5 * whole < held(pipe) <= budget.nbytes
    own = latents(pipe, **call(), quality="all-steps")
    assert "a budget's templates don't store" in maskfx.explain(pipe)
    assert bool(torch.isfinite(own).all())
    assert held(pipe) <= budget.nbytes, "recorded for a quality that the budget isn't for"


def test_several_denoisers_share_a_budget(tmp_path: Path) -> None:
    name = "FluxControlNetInpaintPipeline"

    def call() -> Any:
        return call_of(PIPES[name], 0, square())

    def under(budget: Budget, tiers: Tiers) -> Any:
        return anew(name, library=TemplateLibrary(tiers, budget=budget))

    free = anew(name)
    wanted, whole = latents(free, **call()), held(free)
    _, branches = facts(free)
    budget, tiers = Budget(1.1 * whole, 3, branches), Tiers(Store(tmp_path), host_bytes=LARGE)
    pipe = under(budget, tiers)
    assert distance(latents(pipe, **call()), wanted) < 1e-5
    shares = pipeline_state_of(pipe).library.shares.known
    assert 0.5 * whole < held(pipe) <= budget.nbytes
    assert set(shares) == {"controlnet", "transformer"}
    assert sum(shares.values()) == pytest.approx(1)
    tiers.close()

    # another process: the shares are those with which the template on disk was recorded
    again = under(budget, Tiers(Store(tmp_path), host_bytes=LARGE))
    assert distance(latents(again, **call()), wanted) < 1e-5
    assert pipeline_state_of(again).library.shares.known == shares
    assert "no recording" not in maskfx.explain(again)

    tight = Budget(0.65 * whole, 3, branches, ("16bit", "8bit"))
    packed = under(tight, Tiers(host_bytes=LARGE))
    assert distance(latents(packed, **call()), wanted) < 0.1
    assert held(packed) <= tight.nbytes
