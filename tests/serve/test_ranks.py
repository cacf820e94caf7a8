"""A launched server whose worker shares the steps of its requests over ranks."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskfx.errors import InputError
from maskfx.scheduling.step_reports import Stepped
from maskfx.serve.config import ServeSettings
from maskfx.serve.metrics import CacheCounts, Metrics
from maskfx.serve.models.pipeline_model import PipelineModel
from tests.factories.lora_files import save_lora
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


def test_a_model_refuses_settings_that_ranks_dont_support() -> None:
    settings = ServeSettings(ranks=2, overlap="on")
    with pytest.raises(InputError, match="overlap=on"):
        PipelineModel(settings, lambda event: None)


@pytest.mark.slow
def test_pictures_are_made_by_rounds(tmp_path: Path) -> None:
    pipe = build("StableDiffusionPipeline")
    pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "loras").mkdir()
    save_lora(tmp_path / "loras" / "ink.safetensors", pipe, seed=1, scale=4.0)

    async def test(server: Served) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            body = {"prompt": "a cat", "num_inference_steps": 6, "slo_ms": 200_000}
            each: list[dict[str, Any]] = [
                {"seed": 1},
                {"seed": 2},
                {"seed": 1},
                {"seed": 1, "lora": "ink:0.5"},
            ]
            answers = await asyncio.gather(
                *(client.post("/v1/images/generations", json=body | own) for own in each)
            )
            assert [answer.status_code for answer in answers] == [200] * 4, answers[0].text
            pictures = [answer.json()["data"][0]["b64_json"] for answer in answers]
            assert pictures[3] not in pictures[:3]
            found = await client.post("/v1/images/generations", json=body | {"reuse": "0.5"})
            assert found.status_code == 200, found.text
            assert found.json()["data"][0]["maskfx"]["patch_share"] < 1
            await asyncio.sleep(1.5)  # a heartbeat with the counts
            assert (await client.get("/health")).json()["ranks"] == 2
            text = (await client.get("/metrics")).text
            steps = re.findall(r'maskfx_steps_total\{degree="(\d)"\} (\d+)', text)
            assert sum(int(count) for _, count in steps) >= 6
            assert int(re.findall(r"maskfx_rounds_total (\d+)", text)[0]) > 0
            assert "maskfx_rank_failures_total 0.0" in text
            ranks = [p for p in server.children() if "rank_process" in " ".join(p.cmdline())]
            assert len(ranks) == 2

    folders: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "lora_dir": str(tmp_path / "loras"),
    }
    with served(300, **folders, ranks=2, max_num_seqs=4, patches=0.1) as server:
        asyncio.run(test(server))
