"""What each denoiser call of an edit becomes, from step numbers alone."""

from __future__ import annotations

import pytest
import torch

from maskfx.pipelines.call_policy import CallKind, EditPolicy
from maskfx.pipelines.handlers.edit_handler import EditHandler
from maskfx.pipelines.masks.videos import VideoMask
from maskfx.pipelines.quality import Quality

EDGES = Quality(first=2, last=1)


def kinds(policy: EditPolicy, steps: int | None, count: int) -> str:
    """Return the first letter of each step's kind."""
    return "".join(policy.kind(step, steps).value[0] for step in range(count))


@pytest.mark.parametrize(
    ("recorded", "steps", "wanted"),
    [
        (6, 6, "ddtttd"),
        (6, None, "ddtttd"),  # the template has the number of steps
        (6, 5, "ddttdd"),
        (None, 6, "ddsssd"),
        (None, None, "ddssss"),  # nothing has it
    ],
)
def test_first_and_last_steps_are_dense(
    recorded: int | None, steps: int | None, wanted: str
) -> None:
    policy = EditPolicy(EDGES, recorded)
    assert kinds(policy, steps, 6) == wanted
    assert policy.ignores_last(steps) == (recorded is None and steps is None)


def test_without_dense_steps_all_are_edits() -> None:
    assert kinds(EditPolicy(Quality(), 3), 3, 3) == "ttt"
    assert kinds(EditPolicy(Quality()), 3, 3) == "sss"
    assert not EditPolicy(Quality()).ignores_last(None)
    assert kinds(EditPolicy(Quality(refresh=1)), 3, 3) == "ddd"
    assert kinds(EditPolicy(Quality(refresh=1), 3), 3, 3) == "ttt"
    assert kinds(EditPolicy(Quality(refresh=1, patches=0.1)), 3, 3) == "sss"


def test_a_whole_picture_reads_no_template_and_has_its_own_steps() -> None:
    quality = Quality(every=5, least=2)
    part, whole = EditPolicy(quality, 20), EditPolicy(quality, 20, whole=True)
    assert kinds(part, 20, 3) == "ttt"
    assert kinds(whole, 20, 3) == kinds(EditPolicy(EDGES, 3, whole=True), 3, 3) == "ddd"
    assert whole.following(0, 20) is None
    assert whole.selection.selected(20) == EditPolicy(quality, whole=True).selection.selected(20)
    assert whole.selection.selected(20) != part.selection.selected(20)


def test_only_edits_of_the_template_have_a_following_one() -> None:
    quality = Quality(every=2, first=1, last=1)
    policy = EditPolicy(quality, 8)
    computed = [step for step in range(8) if policy.selection.computes(step, 8)]
    for step, after in zip(computed, computed[1:], strict=False):
        wanted = after if policy.kind(after, 8) is CallKind.TEMPLATE else None
        assert policy.following(step, 8) == wanted
    assert policy.following(computed[-1], 8) is None
    assert EditPolicy(quality).following(computed[0], 8) is None


def test_a_video_is_whole_if_each_of_its_frames_is() -> None:
    """Masks of frames that together cover the picture are of a part of each."""
    halves = torch.zeros(2, 4, 4, dtype=torch.bool)
    halves[0, :2], halves[1, 2:] = True, True
    for frames, whole in ((halves, False), (torch.ones_like(halves), True), (None, True)):
        mask = torch.ones(4, 4, dtype=torch.bool)
        handler = EditHandler(mask, Quality(every=4), video=VideoMask(frames))
        assert handler.selection.even == whole
        assert handler.policy.whole == whole
