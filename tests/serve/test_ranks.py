"""A launched server whose worker shares the steps of its requests over ranks."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from maskfx.errors import InputError
from maskfx.serve.config import ServeSettings
from maskfx.serve.messages import Stepped
from maskfx.serve.metrics import CacheCounts, Metrics
from maskfx.serve.models.pipeline_model import PipelineModel
from tests.factories.served import build
from tests.serve.launched import Served, served


def test_counts_of_rounds_reach_the_metrics() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)
    counts.heard("a", {"rounds.made": 3, "rounds.late": 1, "rounds.failures": 0, "rounds.ranks": 2})
    counts.heard("b", {"rounds.made": 1, "rounds.late": 0, "rounds.failures": 2, "rounds.ranks": 1})
    counts.heard("a", {"rounds.made": 5, "rounds.late": 1, "rounds.failures": 0, "rounds.ranks": 2})
    assert counts.ranks() == 3
    text = metrics.text().decode()
    for line in (
        "rounds_total 6.0",
        "rounds_late_total 1.0",
        "rank_failures_total 2.0",
        "ranks 3.0",
    ):
        assert f"\nmaskfx_{line}\n" in text
    counts.lost("b")
    assert counts.ranks() == 2


def test_a_step_occupies_its_share_of_the_worker() -> None:
    assert Stepped(4.0, []).occupied == 4.0
    assert Stepped(4.0, [], degree=1, ranks=4).occupied == 1.0
    assert Stepped(4.0, [], degree=4, ranks=4).occupied == 4.0


def test_a_model_refuses_settings_that_ranks_dont_support(tmp_path: Path) -> None:
    settings = ServeSettings(ranks=2, lora_dir=tmp_path)
    with pytest.raises(InputError, match="lora_dir"):
        PipelineModel(settings, lambda event: None)


@pytest.mark.slow
def test_pictures_are_made_by_rounds(tmp_path: Path) -> None:
    build("StableDiffusionPipeline").save_pretrained(tmp_path)

    async def test(server: Served) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            body = {"prompt": "a cat", "num_inference_steps": 6, "slo_ms": 200_000}
            answers = await asyncio.gather(
                *(client.post("/v1/images/generations", json=body | {"seed": n}) for n in (1, 2, 1))
            )
            assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
            await asyncio.sleep(1.5)  # a heartbeat with the counts
            assert (await client.get("/health")).json()["ranks"] == 2
            text = (await client.get("/metrics")).text
            steps = re.findall(r'maskfx_steps_total\{degree="(\d)"\} (\d+)', text)
            assert sum(int(count) for _, count in steps) >= 6
            assert int(re.findall(r"maskfx_rounds_total (\d+)", text)[0]) > 0
            assert "maskfx_rank_failures_total 0.0" in text
            ranks = [p for p in server.children() if "rank_process" in " ".join(p.cmdline())]
            assert len(ranks) == 2

    with served(300, model=str(tmp_path), ranks=2, max_num_seqs=4) as server:
        asyncio.run(test(server))
