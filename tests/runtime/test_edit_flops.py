"""An edit of a tenth of the sites costs at most three tenths of a dense call's FLOPs."""

from __future__ import annotations

import pytest

from tests.factories.edit_flops import RATIO, TRANSFORMERS, edit_share, large_size, square_tenth
from tests.factories.zoo import ZOO
from tests.runtime.test_oracle import denoiser_of, module_of

QUICK = ("AuraFlowTransformer2DModel", "FluxTransformer2DModel", "SanaTransformer2DModel")
MOST = 0.3


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TRANSFORMERS],
)
def test_an_edit_of_a_tenth_of_the_sites_costs_three_tenths_at_most(name: str) -> None:
    case, denoiser = ZOO[name], denoiser_of(name)
    denoiser.record(**case.inputs(case.sizes[0], 0))
    share = edit_share(case, module_of(name), denoiser)
    if denoiser.compilations[-1].program is None:
        pytest.skip("it runs dense at this size")
    assert RATIO / 2 < share <= MOST


def test_masks_hold_a_tenth_of_the_sites_and_pictures_a_thousand_tokens() -> None:
    for name in TRANSFORMERS:
        size = large_size(ZOO[name])
        mask = square_tenth(ZOO[name], size)
        assert size.height * size.width >= 1024
        assert size.text <= 77
        assert mask.float().mean() == pytest.approx(RATIO, abs=0.01)
