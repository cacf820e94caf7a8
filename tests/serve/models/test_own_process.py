"""A worker's model whose ControlNets are computed in processes of their own."""

from __future__ import annotations

import numpy as np
import pytest

from maskfx.errors import InputError
from maskfx.pipelines.quality import Quality
from maskfx.runtime.cache.tiers import Tiers
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.model_parts import own_processes_of
from maskfx.serve.models.pipeline_set import PipelineSet, compiling
from tests.factories.served import Served, build, edit, job, picture

CONTROL = "StableDiffusionControlNetInpaintPipeline"


@pytest.mark.slow
def test_edits_are_those_without_and_processes_are_counted() -> None:
    controls = (picture(5),)
    usual = Served(build(CONTROL))
    wanted = [usual.made(job("a", seed=s), edit(1, controls=controls)).pixels for s in (1, 2)]
    usual.model.close()
    served = Served(
        build(CONTROL),
        own_process=["controlnet"],
        own_process_replicas=2,
        own_process_bytes=1 << 30,
        own_process_seconds=200,
    )
    try:
        found = [served.made(job("a", seed=s), edit(1, controls=controls)).pixels for s in (1, 2)]
        for one, other in zip(found, wanted, strict=True):
            assert one is not None
            assert other is not None
            assert np.abs(one.astype(int) - other).max() <= 1
        counts = served.model.cache()
        assert counts["nets.processes"] == 2
        assert counts["nets.computed_here"] == 0
        assert counts["nets.hits"] >= 1
        assert counts["nets.sent"] > 0
        assert 0 < counts["nets.nbytes"] <= 1 << 30
        (service,) = served.model.engine.services._services
        assert [replica.seconds for replica in service.replicas] == [200, 200]
    finally:
        served.model.close()


def test_a_name_without_a_denoiser_is_refused() -> None:
    tiers = Tiers(host_bytes=1 << 20)
    family = PipelineSet.of(build(CONTROL), compiling(Quality.of("all-steps"), tiers))
    assert own_processes_of(ServeSettings(own_process=("controlnet",)), family).has("controlnet")
    with pytest.raises(InputError, match="no denoiser 'control'; it has controlnet, unet"):
        own_processes_of(ServeSettings(own_process=("control",)), family)
