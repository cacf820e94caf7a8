"""The lines of sites that attend to each other."""

from math import prod

import numpy as np
import pytest

from maskfx.ir.geometry.lines import is_apart, line_count, lines_of, places_of

FRAMES, H, W = 2, 8, 12
# which axes of (frames, parts of y, places in them, parts of x, places in them) a line has
AXES = {
    "x": ((H, 1, W, 1), (3, 4)),
    "y": ((H, 1, W, 1), (1, 2)),
    "frames": ((H, 1, W, 1), (0,)),
    "picture": ((H, 1, W, 1), (1, 2, 3, 4)),
    "y4far_x3far": ((4, 2, 3, 4), (1, 3)),
    "y4near_x3near": ((4, 2, 3, 4), (2, 4)),
    "y2far": ((2, 4, W, 1), (1,)),
    "y_x3near": ((H, 1, 3, 4), (1, 2, 4)),
    "frames_y2far_x": ((2, 4, W, 1), (0, 1, 3, 4)),
}


@pytest.mark.parametrize("axis", AXES)
def test_lines_and_places_are_those_of_a_view(axis: str) -> None:
    sizes, own = AXES[axis]
    shape = FRAMES, *sizes
    others = [i for i in range(5) if i not in own]
    sites = np.arange(FRAMES * H * W)
    turned = sites.reshape(shape).transpose(*others, *own)
    wanted = turned.reshape(-1, prod(shape[i] for i in own))
    lines, places = (f(axis, sites, (H, W)) for f in (lines_of, places_of))
    found = np.empty_like(wanted)
    found[lines, places] = sites
    assert line_count(axis, (H, W), FRAMES) == len(wanted)
    assert (found == wanted).all()


def test_only_rows_and_frames_are_lines_whose_sites_follow_each_other() -> None:
    assert [axis for axis in AXES if not is_apart(axis)] == ["x", "picture"]
