"""The judges that ship beside the trained pipelines: their cards, and that calls find them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import maskfx
from maskfx.cli.train_judge import observed_runs
from maskfx.pipelines import call_defaults
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.reuse.judge_training import AGREEING, looked_up, samples_of
from maskfx.runtime.reuse.judges import FEATURES, FILE, TableJudge, load_judge
from maskfx.runtime.reuse.patches import PatchReuse
from maskfx.serve.config import ServeSettings
from maskfx.shipped import FOLDER, names
from training import judges

each = pytest.mark.parametrize("name", names())


def judge_of(name: str) -> TableJudge:
    return load_judge(FOLDER / name / FILE)


@each
def test_a_card_has_features_importance_and_scores_of_runs_that_were_held_out(name: str) -> None:
    judge = judge_of(name)
    card: dict[str, Any] = json.loads((FOLDER / name / FILE).with_suffix(".json").read_text())
    assert card == judge.card
    assert card["model"] == name
    assert card["features"] == list(FEATURES) == list(card["importance"])
    assert sum(card["importance"].values()) == pytest.approx(1, abs=1e-3)
    assert (card["runs"], card["side"]) == (judges.RUNS, judges.SIDES[name])
    assert card["held_out"] == len(card["table_accuracy_by_run"]) >= 4
    assert card["prompts"] == judges.prompts(card["runs"])
    share = card["held_out_computed_share"]
    assert card["table_accuracy"] > max(share, 1 - share) + 0.2  # than always the same answer
    assert card["auc"] > 0.95
    assert card["table_agreement"] >= AGREEING
    assert judge.table.shape[:2] == (card["stretches"], card["age"])
    assert (FOLDER / name / FILE).stat().st_size < 10_000


@pytest.mark.parametrize("name", ["dit", pytest.param("unet", marks=pytest.mark.slow)])
def test_a_run_of_another_picture_scores_as_the_card_states(name: str) -> None:
    judge = judge_of(name)
    card = judge.card
    prompt = ["a shiny red ball on the sand under a blue sky"]
    _, [row] = observed_runs(
        ServeSettings(model=name), [card["runs"]], card["steps"], card["side"], prompt
    )
    [run, *_] = row[card["denoiser"]]
    samples = samples_of(run, card["age"], card["tolerance"])
    right = looked_up(judge.table, samples.features) == samples.computed
    assert right.mean() > card["table_accuracy"] - 0.05


@each
def test_auto_is_the_judge_beside_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TableJudge] = []
    original = TableJudge.computes

    def computes(judge: TableJudge, features: Any) -> Any:
        asked.append(judge)
        return original(judge, features)

    monkeypatch.setattr(TableJudge, "computes", computes)
    quality = maskfx.Quality(reuse="steps", patches=PatchReuse(judge="auto", age=4))
    pipe = maskfx.compile(maskfx.reference(name), quality=quality)
    pipe.set_progress_bar_config(disable=True)
    white = Image.new("L", (256, 256), 255)
    given = {**call_defaults.call_of(FOLDER / name), "num_inference_steps": 8}
    pipe(
        "a red ball",
        image=Image.new("RGB", (256, 256)),
        mask_image=white,
        height=256,
        width=256,
        generator=torch.Generator().manual_seed(0),
        **given,
    )
    state = pipeline_state_of(pipe)
    assert state.notes == Counter()
    assert state.patches.share < 1
    assert {id(judge) for judge in asked} == {id(judge_of(name))}


def test_the_judge_of_a_folder_brings_the_side_of_its_training(tmp_path: Path) -> None:
    own = PatchReuse(judge="auto", threshold=0.3)
    assert own.in_folders([tmp_path]) == PatchReuse(threshold=0.3)
    TableJudge(np.ones((2, 2, 2, 2), bool), {"side": 3}).save(tmp_path / FILE)
    found = own.in_folders([tmp_path / "unet", tmp_path])
    assert (found.judge, found.side) == (tmp_path / FILE, 3)
    named = PatchReuse(judge=tmp_path / FILE)
    assert named.in_folders([]) is named
