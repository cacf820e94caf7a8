"""Requests choose how their patches are reused: off, by a threshold, or as the server does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from maskfx.errors import InputError
from maskfx.pipelines.quality import Quality
from maskfx.runtime.reuse.patches import PatchReuse
from maskfx.runtime.step_kinds import StepKind
from maskfx.serve.config import ServeSettings
from maskfx.serve.errors import ApiError
from maskfx.serve.models.job_runner import reusing
from maskfx.serve.models.model import Made
from maskfx.serve.models.model_parts import quality_of
from maskfx.serve.request import Pictures
from tests.factories.served import SIDE, Served, build, edit, job

NAME = "StableDiffusion3InpaintPipeline"
STEPS = 8


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served(build(NAME), max_num_seqs=2, patches=0.05)
    yield made
    made.model.close()


def generated(served: Served, reuse: str | None) -> Made:
    return served.made(job(kind="generate", seed=3, steps=STEPS, reuse=reuse), Pictures())


def test_a_request_turns_reuse_off_or_sets_its_threshold(served: Served) -> None:
    assert "reuse" in served.model.ready().takes
    assert served.model.ready().patches
    off, every, none = (generated(served, reuse) for reuse in ("off", "9", "0"))
    assert (off.patch_share, off.mask_ratio) == (None, 1.0)
    assert none.patch_share == 1.0
    assert every.patch_share is not None
    assert every.patch_share < 0.8
    assert off.pixels is not None
    assert none.pixels is not None
    assert np.abs(none.pixels.astype(int) - off.pixels).max() <= 1
    assert every.pixels is not None
    assert off.pixels is not None
    assert not np.array_equal(every.pixels, off.pixels)


def test_the_counts_of_a_worker_have_each_stretch(served: Served) -> None:
    before = served.model.cache()
    generated(served, "9")
    counts = {key: value - before.get(key, 0) for key, value in served.model.cache().items()}
    numbers = sorted({int(key.split(".")[1]) for key in counts if key.startswith("stretches.")})
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 1
    computed = [counts[f"stretches.{n}.computed"] for n in numbers]
    totals = [
        count + counts[f"stretches.{n}.kept"] for n, count in zip(numbers, computed, strict=True)
    ]
    assert len(set(totals)) == 1
    assert max(computed) < totals[0]
    # calls in full have no choice: the mean of all calls is above that of these
    assert counts["patches.kept"] == pytest.approx(
        sum(counts[f"stretches.{n}.kept"] for n in numbers) / len(numbers), abs=len(numbers)
    )


def test_without_the_field_the_servers_threshold_counts(served: Served) -> None:
    usual, same = generated(served, None), generated(served, "0.05")
    assert usual.patch_share == same.patch_share
    assert usual.pixels is not None
    assert same.pixels is not None
    assert np.array_equal(usual.pixels, same.pixels)


def test_an_edit_keeps_patches_of_its_mask_unless_it_says_no(served: Served) -> None:
    shares = [
        served.made(job(seed=4, steps=STEPS, strength=1.0, reuse=reuse), edit(1)).patch_share
        for reuse in ("off", "9")
    ]
    assert shares[0] is None
    assert shares[1] is not None
    assert shares[1] < 1


def test_a_judge_that_the_server_lacks_is_refused(served: Served) -> None:
    failed = served.failed(job(kind="generate", reuse="judge"), Pictures())
    assert (failed.code, failed.param) == ("invalid_value", "reuse")


def test_the_servers_other_settings_of_patches_stay() -> None:
    usual = Quality(patches=PatchReuse(0.2, age=3))
    assert reusing(usual, usual, "off").patches is None
    assert reusing(usual, usual, "0.4").patches == PatchReuse(0.4, age=3, first=3, last=1)
    with pytest.raises(ApiError, match="reuses no patches"):
        reusing(Quality(), Quality(), "0.4")


def test_steps_report_what_their_requests_computed(served: Served) -> None:
    seen: dict[str, set[StepKind]] = {}
    for name, what in (
        ("edit", (job(seed=5, steps=STEPS, strength=1.0, reuse="off"), edit(7))),
        ("reuse", (job(kind="generate", seed=5, steps=STEPS, reuse="9"), Pictures())),
        ("dense", (job(kind="generate", seed=5, steps=STEPS, reuse="off"), Pictures())),
    ):
        served.told.steps.clear()
        served.made(*what)
        members = [member for step in served.told.steps for member in step.members]
        assert {(m.whole, m.samples) for m in members} == {((SIDE // 2) ** 2, 2)}
        for member in members:
            whole = member.whole * member.samples
            partial = member.kind in (StepKind.EDIT, StepKind.REUSE)
            assert member.sites <= whole if partial else member.sites == whole
        seen[name] = {member.kind for member in members}
    assert seen == {
        "edit": {StepKind.RECORD, StepKind.EDIT},  # the recording's other steps are extrapolated
        "reuse": {StepKind.RECORD, StepKind.REUSE, StepKind.DENSE},
        "dense": {StepKind.DENSE},
    }


def test_the_server_chooses_when_patches_are_chosen() -> None:
    for order in ("step", "stretch"):
        settings = ServeSettings(model="m", patches=0.05, patch_order=order)
        found = quality_of(settings).patch_reuse
        assert found is not None
        assert found.order == order
        assert reusing(Quality(), quality_of(settings), "0.4").patches == PatchReuse(
            0.4, first=found.first, last=found.last, order=order
        )
    usual = quality_of(ServeSettings(model="m", patches=0.05)).patch_reuse
    assert usual is not None
    assert usual.order == PatchReuse.order
    with pytest.raises(InputError, match="patch_order=stretch: no patches are kept"):
        quality_of(ServeSettings(model="m", patch_order="stretch"))
