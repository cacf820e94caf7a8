"""Results as a table for people, and as a plot. Reads the dicts that go to JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Share of the counted limit that is asked for, from this mask ratio on.
TARGETS = ((0.35, 0.90), (0.20, 0.85), (0.10, 0.75), (0.0, 0.65))
PLOT_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50)


def target(ratio: float) -> float:
    return next(share for start, share in TARGETS if ratio >= start)


def milliseconds(figure: dict[str, float]) -> str:
    return f"{1e3 * figure['median']:.1f} ({1e3 * figure['min']:.1f}-{1e3 * figure['max']:.1f})"


def times(figure: dict[str, float]) -> str:
    return f"{figure['median']:.2f} ({figure['min']:.2f}-{figure['max']:.2f})"


def columns(rows: list[list[str]]) -> str:
    """Rows of text, the first one the head, as aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def mask_table(result: dict[str, Any]) -> str:
    """One line per mask and side of ours."""
    rows = [
        ["mask", "m", "side", "ms", "best dense", "its ms", "x best", "x dense eager", "limit",
         "of limit", "asked", "error"]
    ]  # fmt: skip
    for mask in result["masks"]:
        best = mask["best_dense"]
        for side, own in mask["ours"].items():
            line = [mask["kind"], f"{mask['ratio']:.3f}", side, milliseconds(mask["seconds"][side])]
            if best is None:
                line += ["-", "-", "-", "-"]
            else:
                line += [best, milliseconds(mask["seconds"][best]), times(own["to_best"])]
                line += [times(own["to_dense"]) if own["to_dense"] else "-"]
            line.append(f"{mask['limit']:.2f}")
            if own["of_limit"] is None:
                line += ["-", "-"]
            else:
                asked = f"{own['asked']:.0%} " + ("met" if own["met"] else "missed")
                line += [f"{own['of_limit']['median']:.0%}", asked]
            line.append(f"{own['error']:.1e}" + ("" if own["correct"] else " WRONG"))
            rows.append(line)
    return columns(rows)


def dense_table(result: dict[str, Any]) -> str:
    """What each dense side took, over all masks (which make no difference to it)."""
    masks = result["masks"]
    sides = [s for s in masks[0]["seconds"] if s not in masks[0]["ours"]]
    rows = [["dense side", "ms, lowest and highest median", "best on masks"]]
    for side in sides:
        medians = [1e3 * m["seconds"][side]["median"] for m in masks if side in m["seconds"]]
        wins = sum(m["best_dense"] == side for m in masks)
        rows.append([side, f"{min(medians):.1f}-{max(medians):.1f}", f"{wins} of {len(masks)}"])
    return columns(rows) + "\n"


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """A whole result in text."""
    yield f"== {result['shape']}: {result['title']}"
    hardware = result["hardware"]
    yield f"   {result['commit']}, {hardware['cpu']}, {hardware['threads']} threads"
    if result.get("masks"):
        flops = result["flops"]
        yield (
            f"   dense: {flops['dense']['total'] / 1e9:.2f} GFLOP a step; "
            f"{flops['request'] / 1e9:.3f} of ours are counted once per request"
        )
        yield dense_table(result)
        yield mask_table(result)
    for name, extra in result.get("extras", {}).items():
        yield f"-- {name}"
        yield from extra_lines(extra)
    for name, reason in result.get("failures", {}).items():
        yield f"failed: {name}: {reason}"


def extra_lines(extra: dict[str, Any], indent: str = "   ") -> Iterator[str]:
    """Any nested dict: figures with their extremes, lists of rows as columns."""
    for key, value in extra.items():
        if isinstance(value, dict) and set(value) == {"median", "min", "max"}:
            unit = " (seconds)" if key.endswith("seconds") else ""
            yield f"{indent}{key}{unit}: " + " ".join(f"{k} {v:.4g}" for k, v in value.items())
        elif isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from extra_lines(value, indent + "   ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            rows = [list(value[0]), *([str(cell) for cell in row.values()] for row in value)]
            yield f"{indent}{key}:"
            yield from (f"{indent}   {line}" for line in columns(rows).splitlines())
        elif key.endswith("bytes"):
            yield f"{indent}{key}: {value / 2**20:.1f} MiB"
        else:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            yield f"{indent}{key}: {text}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Times faster than the best dense side over the mask ratio, under the counted limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    kinds = sorted({m["kind"] for m in result["masks"]} - {"full"}) or ["full"]
    figure, axes = pyplot.subplots(
        1, len(kinds), figsize=(5.6 * len(kinds), 4.6), sharey=True, squeeze=False
    )
    for axis, kind in zip(axes[0], kinds, strict=True):
        masks = sorted(
            (m for m in result["masks"] if m["kind"] in (kind, "full")), key=lambda m: m["ratio"]
        )
        ratios = [m["ratio"] for m in masks]
        limits = [m["limit"] for m in masks]
        axis.plot(ratios, limits, color="black", marker=".", label="limit (counted FLOPs)")
        asked = [m["limit"] * target(m["asked_ratio"]) for m in masks]
        axis.plot(ratios, asked, color="grey", linestyle=":", marker=".", label="asked")
        for side in sorted({s for m in masks for s in m["ours"]}):
            points = [(m["ratio"], m["ours"][side]["to_best"]) for m in masks if side in m["ours"]]
            points = [(x, y) for x, y in points if y is not None]
            if not points:
                continue
            middle = [y["median"] for _, y in points]
            spread = [
                [y["median"] - y["min"] for _, y in points],
                [y["max"] - y["median"] for _, y in points],
            ]
            axis.errorbar(
                [x for x, _ in points], middle, yerr=spread, marker="o", capsize=3, label=side
            )
        axis.axhline(1.0, color="lightgrey", linewidth=1, zorder=0)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(ticker.FixedLocator(PLOT_TICKS))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.set_xlim(0, 1.05)
        axis.set_title(f"mask: {kind}")
        axis.set_xlabel("mask ratio m")
        axis.grid(visible=True, which="both", color="#eeeeee")
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("times faster than the best dense side")
    rounds = result["settings"]["rounds"]
    hardware = result["hardware"]
    figure.suptitle(
        f"{result['title']}\n{hardware['cpu']}, {hardware['threads']} threads, fp32, "
        f"median and extremes of {rounds} rounds",
        fontsize=10,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
