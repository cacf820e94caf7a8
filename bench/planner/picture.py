"""The picture of `bench.planner`: both streams of one step, under each way to plan it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.planner.steps import buffer_of, make_step
from maskfx.runtime.planner import baselines
from maskfx.runtime.planner.plan import QUICK, plan
from maskfx.runtime.planner.timeline import BlockTimes, Timeline, simulate

RATIO, BANDWIDTH, SHAPE = 0.1, 12e9, "flux-like"
COLOURS = {"all": "#8a8a8a", "output": "#e08214", "input": "#fdb863", "keys": "#b35806"}
LOAD, WAIT = "#4393c3", "#d6604d"
MEANINGS = {
    "all": "computes every site",
    "output": "masked sites, loads the rest's output",
    "input": "masked sites, loads the rest's input",
    "keys": "masked sites, loads the rest's keys and values",
}


def sides(blocks: list[BlockTimes]) -> dict[str, tuple[Timeline, list[str]]]:
    """The timeline of each way, and each block's choice."""
    buffer_bytes = buffer_of(blocks)
    cached = ["output"] * len(blocks)
    greedy = baselines.greedy(blocks, "output", "all")
    best = plan(blocks, buffer_bytes, widths=QUICK)

    def names(selection: Any) -> list[str]:
        return [b.members[0][row[0]].name for b, row in zip(blocks, selection, strict=True)]

    return {
        "naive": (baselines.naive(blocks, "output", buffer_bytes), cached),
        "strawman": (baselines.strawman(blocks, "output", buffer_bytes), cached),
        "Algorithm 1": (simulate(blocks, greedy, buffer_bytes), names(greedy)),
        "ours": (best.timeline, names(best.selection)),
    }


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    blocks = make_step(SHAPE, [RATIO], BANDWIDTH)
    figure, axis = pyplot.subplots(figsize=(11, 5.2))
    ticks, labels = [], []
    used: set[str] = set()
    for row, (name, (timeline, choices)) in enumerate(sides(blocks).items()):
        load, compute = -3 * row, -3 * row - 1
        for begin, end in timeline.loads:
            bar(axis, load, begin, end, LOAD)
        for (begin, end), choice in zip(timeline.computes, choices, strict=True):
            bar(axis, compute, begin, end, COLOURS[choice])
            used.add(choice)
        for begin, end in timeline.bubbles:
            bar(axis, compute, begin, end, WAIT, alpha=0.35)
        ticks += [load, compute]
        labels += [f"{name}: load", "compute"]
        axis.text(
            1e3 * timeline.end + 1, compute, f"{1e3 * timeline.end:.1f} ms", va="center", fontsize=9
        )
    axis.set_yticks(ticks, labels)
    axis.set_ylim(-3 * 3 - 1.7, 0.7)
    axis.set_xlim(0, axis.get_xlim()[1] * 1.06)
    axis.set_xlabel("predicted time in ms")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#eeeeee", zorder=0)
    axis.set_axisbelow(True)
    keys = [Patch(color=LOAD, label="load"), Patch(color=WAIT, alpha=0.35, label="bubble: waits")]
    keys += [Patch(color=COLOURS[c], label=MEANINGS[c]) for c in COLOURS if c in used]
    figure.legend(handles=keys, loc="lower center", ncols=4, fontsize=8.5, frameon=False)
    figure.suptitle(
        f"First step of a {SHAPE} denoiser ({len(blocks)} blocks), one request, mask {RATIO:.0%}, "
        f"{BANDWIDTH / 1e9:g} GB/s",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def bar(axis: Any, row: int, begin: float, end: float, colour: str, alpha: float = 1.0) -> None:
    """One block on one stream, in milliseconds; a white line separates it from the next."""
    if end > begin:
        axis.barh(
            row,
            1e3 * (end - begin),
            left=1e3 * begin,
            height=0.8,
            color=colour,
            alpha=alpha,
            edgecolor="white",
            linewidth=0.4,
            zorder=2,
        )
