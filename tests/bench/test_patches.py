"""bench.patches at its smallest: rows that are kept, schedules of blocks, two pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench.patches import run as patches
from bench.patches.kept import Kept, common
from bench.quality.block_caching import measure, schedule, scheduled
from tests.factories.shipped import ship_dit
from training.probe import make_probe


def test_rows_are_kept_and_only_what_is_missing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "rows" / "dit.json"
    kept = Kept(path, {"model": "dit", "steps": 4})
    assert kept.lacking("a", 0, ["dense", "other"]) == ["dense", "other"]
    kept.begin({"command": "first"})
    kept.leave_out("a", "other", "no such blocks")
    kept.add("a", 0, {"dense": {"ssim": 1.0}})
    kept.add("a", 2, {"dense": {"ssim": 0.5}, "more": {"ssim": 0.4}})
    again = Kept(path, {"model": "dit", "steps": 4})
    assert again.lacking("a", 0, ["dense", "other", "more"]) == ["more"]
    assert again.lacking("b", 0, ["dense"]) == ["dense"]
    assert again.absent("a") == {"other": "no such blocks"}
    assert [row["command"] for row in again.sessions] == ["first"]
    assert common(again.rows("a", "dense"), again.rows("a", "more"), "ssim") == [[0.5], [0.4]]
    with pytest.raises(ValueError, match="steps: 4 before, 5 now"):
        Kept(path, {"model": "dit", "steps": 5})


class Moving(nn.Module):
    """Two blocks whose residuals depend on the time in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(Moved(kind) for kind in (0, 1))

    def forward(self, x: Tensor, time: float) -> Tensor:
        for block in self.transformer_blocks:
            x = block(x, time=time)
        return x


class Moved(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind, self.ran = kind, list[float]()

    def forward(self, x: Tensor, time: float) -> Tensor:
        self.ran.append(time)
        return x + (1 + 0.3 * time * self.kind)


def test_blocks_run_by_the_profile_and_add_their_last_residuals() -> None:
    model, times = Moving(), [float(n) for n in range(6)]
    x = torch.zeros(1, 4, 2)
    profile = measure(model, lambda: [model(x, time) for time in times])
    assert profile[0] == [float("inf"), 0.0, 0.0, 0.0, 0.0, 0.0]
    assert profile[1][1:] == pytest.approx([0.3 / (1 + 0.3 * n) for n in range(5)], rel=1e-5)
    plan = schedule(profile, 0.4)
    assert plan[0] == [True, False, False, False, False, True]
    assert plan[1] == [True, False, True, False, False, True]
    for block in model.transformer_blocks:
        block.ran.clear()  # type: ignore[union-attr, operator]
    with scheduled(model, plan):
        found = [float(model(x, time)[0, 0, 0]) for time in times]
    assert [block.ran for block in model.transformer_blocks] == [[0.0, 5.0], [0.0, 2.0, 5.0]]
    seconds = [1.0, 1.0, 1.6, 1.6, 1.6, 2.5]
    assert found == pytest.approx([1 + second for second in seconds])
    assert float(model(x, 5.0)[0, 0, 0]) == pytest.approx(3.5)
    assert model.transformer_blocks[0].ran[-1] == 5.0  # type: ignore[index]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    ship_dit(tmp_path)
    (tmp_path / "probe").mkdir()
    torch.save({"average": dict(make_probe().named_parameters())}, tmp_path / "probe/checkpoint.pt")
    threads = torch.get_num_threads()

    def run(pictures: int, *more: str) -> dict[str, Any]:
        given = [
            *("--model", "dit", "--steps", "4", "--pictures", str(pictures), "--quick"),
            *("--pipelines", str(tmp_path), "--runs", str(tmp_path), "--out", str(tmp_path)),
            *("--rows", str(tmp_path / "rows.json"), "--strength", "1.0", "0.6"),
            *("--only", "patches, threshold", "BlockCaching 0.1", "TeaCache rule 0.1"),
        ]
        assert patches.main([*given, *more]) == 0
        torch.set_num_threads(threads)
        found: dict[str, Any] = json.loads((tmp_path / "patches-dit-quick.json").read_text())
        return found

    nothing = run(2, "--seconds", "0")
    assert [task["sides"] for task in nothing["tasks"]] == [[], []]
    first = json.loads(json.dumps(run(1)["tasks"]))
    second = run(2)
    for before, after in zip(first, second["tasks"], strict=True):
        assert {side["pictures"] for side in before["sides"]} == {1}
        assert {side["pictures"] for side in after["sides"]} == {2}
        families = {side["family"] for side in after["sides"]}
        assert {"dense", "BlockCaching", "patches, threshold, stretch"} <= families
        assert all(0 <= side["frechet"] < np.inf for side in after["sides"])
        assert after["absent"] == {}
    rows = json.loads((tmp_path / "rows.json").read_text())
    kept = rows["tasks"]["text-to-image"]["pictures"]["0"]["dense"]
    assert len(kept["features"]) == 128
    assert len(second["earlier_sessions"]) == 1  # of those that added pictures
