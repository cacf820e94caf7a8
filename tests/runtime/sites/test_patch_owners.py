"""Patches at levels whose sites cover several of them: all of them change with the site."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maskfx.runtime.cache.rolling.patch_changes import ChangeSums, PatchChanges
from maskfx.runtime.sites.patches import PatchGrid


@pytest.mark.parametrize(
    ("shape", "side", "size", "owners"),
    [
        ((8, 8), 2, (8, 8), range(16)),
        ((8, 8), 2, (4, 4), range(16)),
        ((8, 8), 2, (2, 2), [0, 0, 2, 2, 0, 0, 2, 2, 8, 8, 10, 10, 8, 8, 10, 10]),
        ((8, 8), 2, (1, 1), [0] * 16),
        ((6, 4), 2, (3, 1), [0, 0, 2, 2, 4, 4]),
        ((5, 3), 2, (3, 2), [0, 0, 0, 0, 2, 2]),
    ],
)
def test_a_patch_without_a_site_belongs_to_the_one_that_has_it(
    shape: tuple[int, int], side: int, size: tuple[int, int], owners: list[int]
) -> None:
    grid = PatchGrid(shape, side)
    found = grid.owners(size)
    assert found.tolist() == list(owners)
    assert set(found.tolist()) <= set(grid.at(size).tolist())


def test_changes_of_a_site_are_those_of_all_patches_that_it_covers() -> None:
    grid = PatchGrid((4, 4), 2)
    changes = PatchChanges(grid, {}, 2, owners={2: grid.owners((1, 1))})
    sums = torch.zeros(3, 4, 2)
    sums[1:, 0] = torch.tensor([1.0, 2.0])
    changes.put(ChangeSums(sums), slice(0, 4))
    found = changes.read()
    assert found is not None
    assert found.tolist() == [[0] * 4, [0.5, 0, 0, 0], [0.5] * 4]
    assert np.array_equal(ChangeSums(sums).relative[2], [0.5, 0, 0, 0])
