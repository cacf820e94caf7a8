"""deploy/ and docs/serving.md say of the server what is so: metrics, settings, codes, files."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

from prometheus_client import Counter, Histogram

from maskfx.serve.config import ServeSettings
from maskfx.serve.errors import CODES
from maskfx.serve.metrics import PREFIX, Metrics
from maskfx.serve.sources import flat_values, known_keys, written

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana.json"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SERVING = ROOT / "docs" / "serving.md"
MISSING = "–"


def metrics() -> dict[str, object]:
    return {PREFIX + name: each for name, each in vars(Metrics()).items() if is_metric(name)}


def is_metric(name: str) -> bool:
    return name != "registry" and not name.startswith("_")


def series() -> set[str]:
    """Names that a query may have: a histogram has three, all others one."""
    found = set()
    for name, each in metrics().items():
        ends = ("_bucket", "_sum", "_count") if isinstance(each, Histogram) else ("",)
        found |= {name + end for end in ends}
    return found


def instructions(kind: str) -> list[str]:
    """What follows a word of the Dockerfile, lines joined."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.removeprefix(kind) for line in text.splitlines() if line.startswith(kind + " ")]


def table(header: str) -> list[list[str]]:
    """The cells of a table of docs/serving.md, by its first column's name."""
    rows: list[list[str]] = []
    inside = False
    for line in SERVING.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if inside and not line.startswith("|"):
            break
        if inside and not line.startswith("|---"):
            rows.append(cells)
        inside = inside or (line.startswith("|") and cells[0] == header)
    assert rows, f"docs/serving.md: there is no table of {header!r}"
    return rows


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# The dashboard.


def test_every_metric_of_the_dashboard_exists() -> None:
    used = set(re.findall(rf"{PREFIX}\w+", DASHBOARD.read_text(encoding="utf-8")))
    assert used
    assert used - series() == set()


def test_the_dashboard_shows_every_metric() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    assert [name for name in metrics() if not re.search(rf"{name}\b|{name}_bucket", text)] == []


def test_every_panel_of_the_dashboard_asks_for_something() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    silent = [p["title"] for p in panels if p["type"] != "row" and not p.get("targets")]
    assert silent == []


# The image.


def test_every_variable_of_the_image_is_a_setting() -> None:
    pairs = [pair for line in instructions("ENV") for pair in shlex.split(line)]
    names = [pair.partition("=")[0] for pair in pairs]
    ours = [name for name in names if name.startswith("MASKFX_")]
    assert ours
    keys = [name.removeprefix("MASKFX_").lower().replace("__", ".") for name in ours]
    assert set(keys) - set(known_keys()) == set()


def test_every_file_that_the_image_copies_is_there_and_not_ignored() -> None:
    sources = [name for line in instructions("COPY") for name in line.split()[:-1]]
    assert "maskfx" in sources
    assert [name for name in sources if not (ROOT / name).exists()] == []
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line.removeprefix("!") for line in ignore if line.startswith("!")]
    assert "*" in ignore, "all is ignored but what is named"
    assert [name for name in sources if not any(fnmatch(name, one) for one in kept)] == []


def test_the_image_asks_for_its_health_where_it_listens() -> None:
    [check] = re.findall(r"HEALTHCHECK.*\n.*", DOCKERFILE.read_text(encoding="utf-8"))
    command = json.loads(check[check.index("[") :])
    assert "/health/ready" in command[-1]
    assert "MASKFX_PORT" in command[-1]
    compile(command[-1], "HEALTHCHECK", "exec")


# What the docs say.


def test_the_table_of_metrics_is_complete() -> None:
    told = {quoted(row[0])[0] for row in table("metric")}
    labels = {
        name: getattr(each, "_labelnames", ()) for name, each in metrics().items()
    }  # the client has no public way to ask
    assert told == {
        name + (f"{{{','.join(labels[name])}}}" if labels[name] else "") for name in labels
    }


def test_a_counters_name_is_the_one_that_is_exported() -> None:
    exported = Metrics().text().decode()
    for name, each in metrics().items():
        assert isinstance(each, Counter) == name.endswith("_total")
        assert f"# HELP {name.removesuffix('_created')} " in exported


def test_the_table_of_errors_is_complete() -> None:
    told = [(int(row[0]), code) for row in table("status") for code in quoted(row[1])]
    assert sorted(told) == sorted((status, code) for code, (status, _) in CODES.items())


def test_the_table_of_settings_is_complete() -> None:
    told = {quoted(row[0])[0]: (quoted(row[1]) or [row[1]])[0] for row in table("setting")}
    defaults = {key: written(value) or MISSING for key, value in flat_values(ServeSettings())}
    assert told == defaults
