"""Our frontier of speed and likeness, and which baselines cross it.

Rows have `side`, `family`, `times_faster` and `ssim`; no pictures, no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Row = dict[str, Any]
Point = tuple[float, float]  # times faster, SSIM

OURS = ("whole steps", "patches, threshold", "patches, judge")  # the oracle is no side of ours
ENOUGH = 0.95  # SSIM


def is_ours(row: Row) -> bool:
    return str(row["family"]).startswith(OURS)


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The sides than which no other is both faster and more alike; the slowest is first."""
    found: list[Row] = []
    best = -1.0
    for row in sorted(rows, key=lambda row: (-row["times_faster"], -row["ssim"])):
        if row["ssim"] > best:
            best = row["ssim"]
            found.append(row)
    return found[::-1]


def likeness_at(points: Sequence[Point], speed: float) -> float | None:
    """The SSIM of a frontier at a speed, on the lines between its points; None beyond the last.

    Before the first point it is the SSIM of that point, which is faster and as much alike.
    """
    if speed <= points[0][0]:
        return points[0][1]
    for (low, more), (high, less) in pairwise(points):
        if speed <= high:
            return more + (less - more) * (speed - low) / (high - low)
    return None


def against(rows: Sequence[Row]) -> list[Row]:
    """For each baseline its SSIM above our frontier at its speed, and whether it crosses it.

    The full run is the first point of our frontier: a run without savings is a setting of ours too.
    A baseline that is faster than all of our sides crosses if it is as much alike as the fastest.
    """
    full = (1.0, 1.0)
    points = [full, *((r["times_faster"], r["ssim"]) for r in frontier([*filter(is_ours, rows)]))]
    points = sorted(point for point in points if point == full or point[0] > full[0])
    found = []
    for row in rows:
        if is_ours(row) or row["family"] in ("dense", "patches, oracle"):
            continue
        speed, ssim = row["times_faster"], row["ssim"]
        ours = likeness_at(points, speed)
        beyond = ours is None
        above = ssim - (points[-1][1] if ours is None else ours)
        crosses = above >= 0 if beyond else above > 0
        found.append(
            {
                "side": row["side"],
                "family": row["family"],
                "times_faster": speed,
                "ssim": ssim,
                "ssim_above_ours": above,
                "faster_than_all_of_ours": beyond,
                "crosses": crosses,
            }
        )
    return found


def fastest(rows: Sequence[Row], least: float = ENOUGH) -> Row | None:
    """The fastest side whose SSIM is at least this; None if there is none."""
    alike = [row for row in rows if row["ssim"] >= least]
    return max(alike, key=lambda row: float(row["times_faster"]), default=None)


def report(rows: Sequence[Row]) -> Row:
    """What was asked for: our fastest side at SSIM 0.95, the baselines', and which sides cross."""
    baselines = [row for row in rows if not is_ours(row) and row["family"] != "patches, oracle"]
    best = {"ours": [*filter(is_ours, rows)], "baselines": baselines}
    found = {name: fastest(some) for name, some in best.items()}
    compared = against(rows)
    return {
        "ssim": ENOUGH,
        "fastest": {
            name: row and {k: row[k] for k in ("side", "times_faster", "ssim")}
            for name, row in found.items()
        },
        "crossing": [row["side"] for row in compared if row["crosses"]],
        "baselines": compared,
    }


def lines(found: Row) -> list[str]:
    """The report as text."""
    text = []
    for name, row in found["fastest"].items():
        figures = (
            "none" if row is None else "{side}, {times_faster:.2f} times, {ssim:.4f}".format(**row)
        )
        text.append(f"fastest at SSIM {found['ssim']}, {name}: {figures}")
    for row in found["baselines"]:
        where = "beyond ours" if row["faster_than_all_of_ours"] else "below ours"
        verdict = "CROSSES" if row["crosses"] else where
        text.append(f"{row['side']}: {verdict}, SSIM {row['ssim_above_ours']:+.4f}")
    return text
