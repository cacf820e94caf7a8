"""Sites, steps and branches of a request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from maskfx.ir.geometry.level_shares import LevelShare
from maskfx.serve.request import Card, RequestKind
from maskfx.serve.request_cost import active_share, size_of, steps_of, work_of
from tests.serve.fronts import request

CARD = Card("m", "F", (512, 256), 8, 20, 4.0, frozenset({"mask", "negative_prompt"}), True, site=8)


def test_one_pixel_makes_a_site_active() -> None:
    mask = np.zeros((24, 32), bool)
    assert active_share(mask, 8) == 0
    mask[15, 8] = True  # the site at row 1, column 1, of 3 x 4
    assert active_share(mask, 8) == pytest.approx(1 / 12)
    mask[16, 8] = True
    assert active_share(mask, 8) == pytest.approx(2 / 12)
    assert active_share(None, 8) == 1


def test_what_isnt_whole_sites_counts_as_one_more() -> None:
    mask = np.zeros((9, 17), bool)
    mask[8, 16] = True
    assert active_share(mask, 8) == pytest.approx(1 / 6)


def test_a_requests_own_size_comes_before_its_images_and_the_models() -> None:
    images = request()[1].images
    assert size_of((80, 40), images, CARD) == (80, 40)
    assert size_of(None, images, CARD) == (64, 48)
    assert size_of(None, (), CARD) == (512, 256)


def test_strength_skips_steps() -> None:
    assert steps_of(None, None, CARD) == 20
    assert steps_of(10, 0.55, CARD) == 5
    assert steps_of(10, 0.01, CARD) == 1
    assert steps_of(10, 1.0, CARD) == 10


def test_an_edit_that_says_no_strength_has_the_models() -> None:
    card = replace(CARD, strength=0.3)
    recording = request(kind=RequestKind.RECORD)
    assert work_of(*request(), card).steps == work_of(*recording, card).steps == 6
    assert work_of(*request(strength=0.5), card).steps == 10
    assert work_of(*request(images=()), card).steps == 20


@pytest.mark.parametrize(
    ("quality", "setting", "steps"),
    [
        (None, "all-steps", 20),
        ("auto", "all-steps", 20),
        ("half-steps", "all-steps", 11),
        ("third-steps", "half-steps", 8),
        (None, "fifth-steps", 5),
        ("all-steps", "fifth-steps", 20),
    ],
)
def test_whole_pictures_take_the_steps_that_their_quality_computes(
    quality: str | None, setting: str, steps: int
) -> None:
    card = replace(CARD, whole=setting)
    asked = request(quality=quality, mask=None)
    assert work_of(*asked, card).steps == steps
    assert work_of(*request(quality=quality), card).steps == 20  # an edit of a part
    assert work_of(*request(kind=RequestKind.RECORD), card).steps == 20


def test_recordings_take_the_steps_that_edits_compute() -> None:
    card = replace(CARD, every=4, least=5)
    edit, recording = work_of(*request(), card), work_of(*request(kind=RequestKind.RECORD), card)
    assert (edit.steps, edit.total) == (recording.steps, recording.total) == (6, 20)
    assert work_of(*request(mask=None), card).steps == 20


def test_work_of_an_edit() -> None:
    work = work_of(*request(template="t"), CARD, template_bytes=2000)
    assert (work.sites, work.whole, work.steps, work.branches) == (6, 48, 20, 2)
    assert (work.template, work.bytes) == ("t", 100)


def test_sites_are_weighted_by_the_levels_of_the_model() -> None:
    coarse = LevelShare(parent=0, divide=(2, 2), per_site=2.0, per_pair=16.0)
    card = replace(CARD, levels=(LevelShare(per_site=0.5, per_pair=0.0), coarse))
    asked, pictures = request()
    spots = np.zeros((48, 64), np.bool_)
    spots[::24, ::24] = True  # 2 x 3 sites, no two of which share a coarser one
    found = work_of(asked, replace(pictures, mask=spots), card)
    assert (found.sites, found.weighted, found.pairs) == (6, 0.5 * 6 + 2 * 6, 16 * 6 * 12)
    larger = replace(pictures, mask=spots)
    twice = work_of(request(size=(128, 96))[0], larger, card)
    assert (twice.weighted, twice.pairs) == (4 * 15.0, 16 * 16 * 6 * 12)
    square = np.zeros_like(spots)
    square[:16, :24] = True
    assert work_of(asked, replace(pictures, mask=square), card).weighted == 0.5 * 6 + 2 * 2
    assert work_of(*request(kind=RequestKind.RECORD), card).weighted is None


def test_the_masks_share_holds_for_another_size_too() -> None:
    assert work_of(*request(size=(128, 96)), CARD).sites == 4 * 6


def test_without_guidance_there_is_one_branch() -> None:
    assert work_of(*request(guidance=1.0), CARD).branches == 1
    distilled = replace(CARD, takes=frozenset({"mask"}))  # guidance is an input there
    assert work_of(*request(), distilled).branches == 1


def test_a_recording_computes_all_sites() -> None:
    work = work_of(*request(kind=RequestKind.RECORD), CARD)
    assert work.sites == work.whole == 48


def test_a_model_that_says_no_steps_makes_one() -> None:
    """Where a pipeline has no number of steps by default its card has 0."""
    assert work_of(*request(template="t"), replace(CARD, steps=0), 100).steps == 1


def test_a_margin_counts_and_ends_at_the_pictures_edge() -> None:
    mask = np.zeros((40, 40), bool)
    mask[17, 1] = True  # the site at row 2, column 0, of 5 x 5
    assert active_share(mask, 8, margin=1) == pytest.approx(3 * 2 / 25)
    assert active_share(mask, 8, margin=3) == pytest.approx(5 * 4 / 25)


def test_of_an_edit_only_some_steps_may_be_computed() -> None:
    card = replace(CARD, every=3)
    request_, pictures = request(template="t")
    edit = work_of(request_, pictures, card, template_bytes=2000)
    assert (edit.steps, edit.total, edit.bytes) == (8, 20, 250)
    assert work_of(request_, replace(pictures, mask=None), card).steps == 20
    assert work_of(*request(mask=np.ones((48, 64), bool)), card).steps == 20


def test_steps_left_of_a_run_are_fewer_where_some_are_forecast() -> None:
    work = work_of(*request(), replace(CARD, every=3))
    assert work.computed(20) == work.steps
    assert work.computed(2) == 1
    assert work_of(*request(), CARD).computed(7) == 7
