"""README.md: the table of what was tried is that of docs/, the first figures are those measured."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
RESULTS = ROOT / "bench" / "results"


@pytest.fixture(scope="module")
def tried() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "tried"))


def test_the_table_of_what_was_tried_is_up_to_date(tried: dict[str, Any]) -> None:
    _, _, rest = README.partition(tried["BEGIN"])
    written, _, _ = rest.partition(tried["END"])
    assert written == tried["text"](), "run scripts/tried --write"


def test_counts_and_exceptions_of_denoisers_follow_from_rows(tried: dict[str, Any]) -> None:
    row = tried["Row"]
    text = tried["denoisers_text"](
        [
            row("A", ("all", "any", "1e-6", "")),
            row("A-wide", ("46 % of FLOPs", "any", "1e-6", "it pads")),
            row("B", ("100 % of FLOPs", "any", "1e-6", "")),
            row("C", ("nothing", "–", "–", "")),
        ]
    )
    assert text.startswith("Of 3 denoiser classes of diffusers, 1 run on rows in all")
    assert "in part: `A-wide` (46 % of the FLOPs); dense: `C`:" in text


def test_a_pipeline_counts_if_all_of_its_cases_do(tried: dict[str, Any]) -> None:
    row = tried["Row"]
    classes = tried["by_class"](
        [
            row("A", ("", "3 of 3")),
            row("A-two", ("", "2 of 3")),
            row("B", ("", "12 of 12")),
        ]
    )
    assert (len(classes), tried["whole"](classes)) == (2, 1)


@pytest.mark.parametrize("text", [README, INDEX], ids=["README", "index"])
def test_the_first_figures_are_those_measured(text: str) -> None:
    result = json.loads((RESULTS / "quality-dit.json").read_text(encoding="utf-8"))
    sides = result["sides"]
    ours, steps = sides["ours, fast"], sides["ours, all sites, every=4"]
    [line] = [line for line in text.splitlines() if "times faster** than in" in line] or [
        line for line in text.splitlines() if "times faster than in diffusers" in line
    ]
    assert f"{ours['times_faster_in_sum']:.1f} times faster" in line
    assert f"SSIM of {ours['ssim']['mean']:.3f}" in line
    assert f"{steps['times_faster_in_sum']:.1f} times by computing" in line
    assert f"{100 * result['masked']['mean']:.0f} %" in line
    assert f"{result['edits']} edits" in line
    assert f"in {100 * sides['dense']['shape']:.0f} % of the {result['edits']}" in text
    if text is README:
        assert f"dense result in {sides['dense']['seconds']['median']:.2f} s" in text
        assert f"maskfx result in {ours['seconds']['median']:.2f} s" in text
        older = sides["ours, balanced"]["times_faster_in_sum"]
        assert f"an older setting, {older:.1f} times faster" in text


def test_no_other_document_gives_another_first_figure() -> None:
    measured = (ROOT / "docs" / "measured" / "quality.md").read_text(encoding="utf-8")
    found = re.search(r"\*\*maskfx, `fast` and `balanced`\*\*.*?\| ([\d.]+) \|", measured)
    assert found is not None
    assert f"**{found[1]} times faster**" in README
