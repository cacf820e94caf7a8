"""From the rows of edits to what is reported of each side, which claims hold, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.harness import figure, ratio
from bench.quality.metrics import frechet
from bench.quality.sides import BACKGROUND, DENSE
from bench.report import columns

Summary = dict[str, Any]

# What was asked for, at this speed or more.
ASKED = {"times_faster": 4.0, "ssim": 0.99, "psnr_inside": 32.0, "probe_points": 2.0}
MEASURES = ("ssim", "psnr_inside")  # of which no baseline may have more at the same speed


def summary(edits: Sequence[Mapping[str, Any]], families: Mapping[str, str]) -> Summary:
    """All of a result but what it was run with."""
    sides = {name: side_of(edits, name, family) for name, family in families.items()}
    known = {name: side for name, side in sides.items() if side is not None}
    painted = [edit["painted"] for edit in edits]
    return {
        "edits": len(edits),
        "masked": spread([edit["masked"] for edit in edits]),
        "masked_sites": spread([edit["masked_sites"] for edit in edits]),
        "painted": {key: share(painted, key) for key in ("shape", "colour")},
        "sides": known,
        "asked": {**ASKED, "met_by": meeting(known)},
        "crossed": {measure: crossing(edits, known, measure) for measure in MEASURES},
        "outside_kept": all(side["outside_kept"] for side in known.values()),
    }


def side_of(edits: Sequence[Mapping[str, Any]], name: str, family: str) -> Summary | None:
    """What one side comes to, over the edits that it made."""
    own = [edit for edit in edits if name in edit["sides"]]
    if not own:
        return None
    rows = [edit["sides"][name] for edit in own]
    speeds = ratio([row["dense_seconds"] for row in rows], [row["seconds"] for row in rows])
    sums = sum(row["dense_seconds"] for row in rows) / sum(row["seconds"] for row in rows)
    whole = [row["dense_whole_seconds"] for row in rows], [row["whole_seconds"] for row in rows]
    found = {
        "family": family,
        "edits": len(rows),
        "times_faster": speeds,
        "times_faster_in_sum": sums,
        "times_faster_whole": ratio(*whole),
        "seconds": figure([row["seconds"] for row in rows]),
        "calls": statistics.median(row["calls"] for row in rows),
        **{key: spread([row[key] for row in rows]) for key in ("ssim", "psnr", "psnr_inside")},
        "shape": share(rows, "shape"),
        "colour": share(rows, "colour"),
        "both": float(np.mean([row["shape"] and row["colour"] for row in rows])),
        "frechet_to_dense": distance(rows, [edit["sides"].get(DENSE) for edit in own]),
        "frechet_to_painted": distance(rows, [edit["painted"] for edit in own]),
        "outside_kept": all(row["outside_kept"] for row in rows),
    }
    if "record_seconds" in rows[0]:
        found["record_seconds"] = figure([row["record_seconds"] for row in rows])
        found["template_bytes"] = statistics.median(row["template_bytes"] for row in rows)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, and the tenth of the values that is worst."""
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "tenth": float(np.quantile(values, 0.1)),
    }


def share(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def distance(rows: Sequence[Mapping[str, Any]], others: Sequence[Any]) -> float | None:
    """Of the probe's features; two edits at least make a spread."""
    pairs = [(r["features"], o["features"]) for r, o in zip(rows, others, strict=True) if o]
    if len(pairs) < 2:
        return None
    return frechet(np.array([one for one, _ in pairs]), np.array([other for _, other in pairs]))


def speed(side: Mapping[str, Any]) -> float:
    """Dense seconds over own, all edits together: rare large masks count as much as they cost."""
    found: float = side["times_faster_in_sum"]
    return found


def meeting(sides: Mapping[str, Summary]) -> list[str]:
    """Which of ours are as fast and as near to dense as asked."""
    dense = sides.get(DENSE)
    if dense is None:
        return []
    return [
        name
        for name, side in sides.items()
        if side["family"] == "ours"
        and speed(side) >= ASKED["times_faster"]
        and side["ssim"]["mean"] >= ASKED["ssim"]
        and side["psnr_inside"]["mean"] >= ASKED["psnr_inside"]
        and all(
            side[key] >= dense[key] - ASKED["probe_points"] / 100 for key in ("shape", "colour")
        )
    ]


def crossing(
    edits: Sequence[Mapping[str, Any]], sides: Mapping[str, Summary], measure: str
) -> list[str]:
    """Baselines that none of ours beats in both speed and a measure, on the edits of both."""
    ours = [name for name, side in sides.items() if side["family"] == "ours"]
    return [
        name
        for name, side in sides.items()
        if side["family"] not in ("ours", "dense")
        and not any(beats(edits, own, name, measure) for own in ours)
    ]


def beats(edits: Sequence[Mapping[str, Any]], one: str, other: str, measure: str) -> bool:
    made = [edit["sides"] for edit in edits]
    shared = [sides for sides in made if one in sides and other in sides]
    if not shared:
        return False

    def reached(name: str) -> tuple[float, float]:
        rows = [sides[name] for sides in shared]
        times = [sum(row[key] for row in rows) for key in ("dense_seconds", "seconds")]
        return times[0] / times[1], float(np.mean([row[measure] for row in rows]))

    (speed, value), (least, lowest) = reached(one), reached(other)
    return speed >= least and value >= lowest


def table(result: Mapping[str, Any]) -> str:
    """One line per side, the fastest of each family first."""
    head = ["side", "x faster", "median", "whole call", "SSIM", "PSNR", "inside", "worst tenth",
            "shape", "colour", "FD dense", "FD painted"]  # fmt: skip
    sides = result["sides"]
    order = sorted(sides, key=lambda name: (rank(sides[name]["family"]), -speed(sides[name])))
    lines = [head, *(line_of(name, sides[name]) for name in order)]
    asked = ", ".join(result["asked"]["met_by"]) or "none"
    ends = [
        f"{result['edits']} edits, masked {result['masked']['mean']:.3f} of the picture, "
        f"{result['masked_sites']['mean']:.3f} of the latent's sites",
        f"asked for (4 x, SSIM 0.99, 32 dB inside, probe within 2 points): met by {asked}",
        *(
            f"baselines that ours don't beat in speed and {measure}: {', '.join(names) or 'none'}"
            for measure, names in result["crossed"].items()
        ),
        f"pixels outside the mask are the input's in every mode: {result['outside_kept']}",
        *(f"left out: {name}: {why}" for name, why in result.get("absent", {}).items()),
    ]
    return columns(lines) + "\n" + "\n".join(ends)


def rank(family: str) -> tuple[int, str]:
    return (("dense", "ours").index(family) if family in ("dense", "ours") else 2, family)


def line_of(name: str, side: Mapping[str, Any]) -> list[str]:
    def distance_text(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return [
        name if name != BACKGROUND else f"{name} (the scale)",
        f"{speed(side):.2f}",
        f"{side['times_faster']['median']:.2f}",
        f"{side['times_faster_whole']['median']:.2f}",
        f"{side['ssim']['mean']:.4f}",
        f"{side['psnr']['mean']:.1f}",
        f"{side['psnr_inside']['mean']:.1f}",
        f"{side['psnr_inside']['tenth']:.1f}",
        f"{side['shape']:.1%}",
        f"{side['colour']:.1%}",
        distance_text(side["frechet_to_dense"]),
        distance_text(side["frechet_to_painted"]),
    ]
