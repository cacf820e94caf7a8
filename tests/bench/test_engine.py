"""bench.engine runs all its parts and writes what they measure."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.engine.arrivals import Served, busy, from_start, poisson, rows_of, summary
from bench.engine.bed import requests
from bench.engine.run import main


@pytest.mark.slow
def test_all_parts_are_written(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    small = "--pixels 64 --steps 2 --width 32 --requests 4 --batches 1 2 --rounds 1 --small 16"
    main([*small.split(), "--loads", "0.9", "--batch", "2", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [row["batch"] for row in found["throughput"]] == [1, 2]
    assert "engine, every step" in found["throughput"][0]
    ways = ("engine", "engine static", "engine in loop", "engine in threads", "engine by slack")
    sides = {"diffusers static", *ways}
    assert {row["side"] for row in found["arrivals"]} == sides
    assert all(row["p95"] >= row["p50"] > 0 for row in found["arrivals"])
    assert len(found["overhead"]) == 4
    assert found["memory"][-1]["requests"] >= 16
    assert out.with_suffix(".png").stat().st_size > 1000


def test_rows_are_over_all_blocks() -> None:
    quick = from_start([Served(10.0, 10.5, 11.0), Served(11.0, 11.0, 13.0)])
    slow = from_start([Served(5.0, 5.0, 10.0)])
    assert quick[1] == Served(1.0, 1.0, 3.0)
    blocks = [
        {"run": "first", "capacity": 1.0, "served": {"engine": quick}},
        {"run": "next", "capacity": 2.0, "served": {"engine": json.loads(json.dumps(slow))}},
    ]
    (row,) = rows_of({"0.9": blocks, "2": []})
    assert (row["load"], row["side"], row["requests"]) == (0.9, "engine", 3)
    assert row["mean"] == pytest.approx((1 + 2 + 5) / 3)
    assert [block["mean"] for block in row["blocks"]] == [1.5, 5.0]
    assert row["capacities"] == [1.0, 2.0]


@pytest.mark.slow
def test_a_run_goes_on_with_its_next_block(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    small = "--pixels 64 --steps 2 --width 32 --parts arrivals --loads 0.9 --batch 2"
    main([*small.split(), *["--requests", "2", "--blocks", "1"], "--out", str(out)])
    first = json.loads(out.read_text())["blocks"]["0.9"]
    main([*small.split(), *["--requests", "4", "--blocks", "2", "--resume"], "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["blocks"]["0.9"][:1] == first
    assert len(found["blocks"]["0.9"]) == 2
    assert found["arrivals"][0]["requests"] == 4


def test_masks_are_as_large_as_a_production_services() -> None:
    ratios = [np.count_nonzero(np.asarray(r.mask)) / 256**2 for r in requests(200, 256)]
    assert 0.095 < sum(ratios) / len(ratios) < 0.13
    assert min(ratios) > 0.005
    few = [np.count_nonzero(np.asarray(r.mask)) / 256**2 for r in requests(8, 256, even=True)]
    assert 0.095 < sum(few) / len(few) < 0.13
    assert few[0] < 0.06 < 0.2 < few[-1]


def test_arrivals_come_at_their_rate() -> None:
    times = poisson(2000, 5.0, seed=1)
    assert times == sorted(times)
    assert 0.9 < 2000 / times[-1] / 5.0 < 1.1


def test_a_summary_counts_from_the_arrival() -> None:
    found = summary([Served(0.0, 1.0, 3.0), Served(1.0, 3.0, 4.0)])
    assert (found["mean"], found["queued"]) == (3.0, 1.5)


def test_busy_counts_no_time_twice() -> None:
    alone, nested = Served(0.0, 2.0, 4.0), Served(1.0, 3.0, 3.5)
    assert busy([alone, nested, Served(5.0, 8.0, 10.0)]) == pytest.approx(4 / 10)
