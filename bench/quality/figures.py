"""The frontier plots of a contest, and its grid of pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.quality.folder import MASKED, TEMPLATE, Folder
from bench.quality.report import ASKED, Summary, speed
from bench.quality.sides import BACKGROUND, DENSE

Measure = Callable[[Summary], float]

PANELS: tuple[tuple[str, Measure, float | None], ...] = (
    ("SSIM of the whole picture", lambda side: side["ssim"]["mean"], ASKED["ssim"]),
    (
        "PSNR inside the mask, dB",
        lambda side: min(MOST_DB, side["psnr_inside"]["mean"]),
        ASKED["psnr_inside"],
    ),
    ("shape and colour as asked, % of edits", lambda side: 100 * side["both"], None),
)
MOST_ROWS = 8
ENOUGH = 0.2  # of the edits
WIDTH, HEIGHT, HEAD = 1.9, 2.4, 0.65  # inches of a picture with its caption, and of the head
MOST_DB = 60.0  # what is nearer is drawn there
TICKS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)


def frontier(sides: Mapping[str, Summary], measure: Measure) -> list[tuple[float, float]]:
    """The points than which no other is both faster and better, the slowest first."""
    points = sorted(((speed(side), measure(side)) for side in sides.values()), reverse=True)
    best: list[tuple[float, float]] = []
    for point in points:
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]


def draw_frontiers(result: Mapping[str, Any], path: Path) -> None:
    """Quality over speed, one panel per measure."""
    pyplot, ticker = plotting()
    sides: Mapping[str, Summary] = result["sides"]
    families = sorted({side["family"] for side in sides.values()} - {"dense"})
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(6.2 * len(PANELS), 5.4))
    for axis, (title, measure, asked) in zip(axes, PANELS, strict=True):
        for number, family in enumerate(families):
            own = {name: side for name, side in sides.items() if side["family"] == family}
            colour = "black" if family == "ours" else f"C{number % 10}"
            draw_family(axis, own, measure, family, colour, ENOUGH * result["edits"])
        for name, colour in ((DENSE, "grey"), (BACKGROUND, "lightgrey")):
            if name in sides:
                axis.axhline(measure(sides[name]), color=colour, linestyle="--", label=name)
        if asked is not None:
            axis.axhline(asked, color="green", linestyle=":", linewidth=1)
            axis.axvline(ASKED["times_faster"], color="green", linestyle=":", label="asked for")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.FixedLocator(TICKS))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel("times faster than dense (seconds in the denoiser, all edits)")
        axis.set_title(title)
        axis.grid(visible=True, color="#eeeeee")
    axes[0].legend(fontsize=7, loc="lower left")
    hardware = result["hardware"]
    figure.suptitle(
        f"{result['settings']['model']}: {result['edits']} edits, masks of "
        f"{result['masked']['mean']:.1%} of the picture on average, {result['settings']['steps']} "
        f"steps; {hardware['cpu']}, {hardware['threads']} threads",
        fontsize=10,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_family(
    axis: Any,
    sides: Mapping[str, Summary],
    measure: Measure,
    family: str,
    colour: str,
    enough: float,
) -> None:
    """All settings as points; those that none of the family beats are joined.

    Of settings with few edits, which may be easier or harder ones, points are hollow and unjoined.
    """
    big = family == "ours"
    many = {name: side for name, side in sides.items() if side["edits"] >= enough}
    few = [side for name, side in sides.items() if name not in many]
    for some, fill in ((list(many.values()), colour), (few, "none")):
        x, y = [speed(side) for side in some], [measure(side) for side in some]
        axis.scatter(x, y, s=26 if big else 14, edgecolors=colour, facecolors=fill, zorder=3)
    line = frontier(many, measure)
    x, y = [point[0] for point in line], [point[1] for point in line]
    axis.plot(x, y, color=colour, label=family, linewidth=2 if big else 1, zorder=2)


def draw_pictures(folder: Folder, result: Mapping[str, Any], path: Path) -> None:
    """Template, mask, dense, ours and baselines, a row for each of the first edits."""
    pyplot, _ = plotting()
    columns = columns_of(result["sides"])
    whole = (
        i for i in range(result["edits"])
        if all(folder.picture(i, name) is not None for name in columns)
    )  # fmt: skip
    rows = [index for index, _ in zip(whole, range(MOST_ROWS), strict=False)]
    if not rows:
        return
    wide, high = WIDTH * len(columns), HEIGHT * len(rows) + HEAD
    figure, axes = pyplot.subplots(
        len(rows),
        len(columns),
        figsize=(wide, high),
        squeeze=False,
        gridspec_kw={"left": 0.004, "right": 0.996, "top": 1 - HEAD / high, "bottom": 0.3 / high,
                     "wspace": 0.04, "hspace": 0.3},
    )  # fmt: skip
    for line, index in zip(axes, rows, strict=True):
        found = folder.edit(index)
        for axis, name in zip(line, columns, strict=True):
            axis.imshow(folder.picture(index, name), interpolation="nearest")
            axis.set_axis_off()
            axis.set_title(caption(name, found, result["sides"], index == rows[0]), fontsize=7)
        line[0].text(
            0.0, -0.03, f"“{found['prompt']}”", transform=line[0].transAxes, fontsize=7, va="top"
        )
    figure.text(
        0.004,
        1 - 0.16 / high,
        f"{result['settings']['model']}.  x: times faster than dense, over all edits;  dB: PSNR "
        "against dense inside the mask, of this edit",
        fontsize=8,
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def columns_of(sides: Mapping[str, Summary]) -> list[str]:
    """Ours at the asked speed, and of each other family the setting nearest to it in speed."""
    ours = {name: side for name, side in sides.items() if side["family"] == "ours"}
    fast = {n: s for n, s in ours.items() if speed(s) >= ASKED["times_faster"]} or ours
    chosen = sorted(fast, key=lambda name: -fast[name]["psnr_inside"]["mean"])[:1]
    chosen += [name for name in ("ours, balanced", "ours, faithful") if name in ours]
    chosen = list(dict.fromkeys(chosen))
    wanted = speed(sides[chosen[0]]) if chosen else ASKED["times_faster"]
    for family in sorted({side["family"] for side in sides.values()} - {"ours", "dense"}):
        own = [name for name, side in sides.items() if side["family"] == family]
        chosen.append(min(own, key=lambda name: abs(np.log(speed(sides[name]) / wanted))))
    return [TEMPLATE, MASKED, DENSE, *chosen]


def caption(name: str, found: Mapping[str, Any], sides: Mapping[str, Summary], first: bool) -> str:
    """In the first row what a column is; below a side's picture how near it is to dense."""
    if name not in found["sides"]:
        return name if first else ""
    near = f"{found['sides'][name]['psnr_inside']:.1f} dB" if name != DENSE else ""
    if not first:
        return near
    return f"{name}\n{speed(sides[name]):.1f} x   {near}" if name != DENSE else f"{name}\n"


def plotting() -> Any:
    """Imported late: tables need no matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    return pyplot, ticker
