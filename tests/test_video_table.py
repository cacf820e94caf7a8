"""docs/how-to/videos.md: it lists every class that makes a video, and its rows are what runs."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.factories.video_kinds import VIDEO_KINDS

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs" / "how-to" / "videos.md").read_text(encoding="utf-8")
WRITTEN = dict(re.findall(r"^\| `([^`]+)` \|(.*)\|$", TABLE, re.M))


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "videos"))


def test_every_class_that_makes_a_video_has_a_row(script: dict[str, Any]) -> None:
    assert set(script["classes"]()) <= set(WRITTEN)


def test_every_case_has_figures() -> None:
    tried = {name for name, row in WRITTEN.items() if row.split("|")[1].strip()[:1].isdigit()}
    assert tried == set(VIDEO_KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIDEO_KINDS)
def test_rows_are_what_runs(script: dict[str, Any], name: str) -> None:
    found = script["row"](VIDEO_KINDS[name]).split("|")
    assert found[3].strip() == WRITTEN[name].split("|")[1].strip()
    assert float(found[4]) < 1e-4
