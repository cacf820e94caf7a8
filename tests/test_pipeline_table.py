"""docs/pipelines.md: it lists every class that takes a picture, and its rows are what runs."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import tests.factories.dit_pipelines
import tests.factories.edit_pipelines
import tests.factories.late_pipelines
import tests.factories.modular_pipelines
import tests.factories.more_pipelines
import tests.factories.more_text_pipelines
import tests.factories.staged_pipelines
import tests.factories.text_pipelines
import tests.factories.unet_pipelines  # noqa: F401  (cases register themselves)
from tests.factories.pipelines import PIPES

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
WRITTEN = dict(re.findall(r"^\| `([^`]+)` \|(.*)\|$", TABLE, re.M))


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "pipelines"))


def test_every_class_that_takes_a_picture_has_a_row(script: dict[str, Any]) -> None:
    listed = {name.partition("-")[0] for name in WRITTEN}
    assert set(script["classes"]()) <= listed


def test_figures_are_of_cases() -> None:
    tried = {name for name, row in WRITTEN.items() if row.split("|")[1].strip()[:1].isdigit()}
    assert tried
    assert tried <= set(PIPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PIPES if name in WRITTEN])
def test_rows_are_what_runs(script: dict[str, Any], name: str) -> None:
    found = script["row"](PIPES[name]).split("|")
    written = WRITTEN[name].split("|")
    if written[1].strip()[:1].isdigit():
        assert found[3].strip() == written[1].strip()
    assert float(found[4]) < 1e-4
