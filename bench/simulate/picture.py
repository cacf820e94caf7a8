"""The plots of bench.simulate. Reads the dicts that go to JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]

COLOURS = {
    "requests assigned": "#c9a37a",
    "tokens assigned": "#9ab7c9",
    "requests": "#d1790b",
    "tokens": "#2f7fb0",
    "cost": "#1a8a3c",
    "fcfs": "#d1790b",
    "fcfs, late dropped": "#2f7fb0",
    "slack": "#1a8a3c",
}


def picture(result: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    draws = []
    if "routing" in result:
        draws += [draw_routing, draw_variants]
    if len({row["load"] for row in result.get("slo", {}).get("curves", ())}) > 1:
        draws += [draw_cpu_slo, draw_gpu_slo]
    if "scale" in result:
        draws += [draw_scale]
    if not draws:
        return
    columns = min(2, len(draws))
    rows = -(-len(draws) // columns)
    figure, places = pyplot.subplots(
        rows, columns, figsize=(6.8 * columns, 4.6 * rows), squeeze=False
    )
    flat = list(places.flat)
    for draw, place in zip(draws, flat, strict=False):
        draw(place, result)
    for place in flat[len(draws) :]:
        place.axis("off")
    if len(draws) > 1:  # the one of decision times has other numbers of workers
        figure.suptitle(
            "Simulated: 8 workers of 8 slots; masks, sizes and deadlines as in FlashPS' and "
            "PatchedServe's evaluations",
            fontsize=11,
        )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_routing(place: Any, result: Row) -> None:
    curve = result["routing"]["curve"]
    for name in dict.fromkeys(row["router"] for row in curve):
        own = [row for row in curve if row["router"] == name]
        line = "--" if name.endswith("assigned") else "-"
        loads = [row["load"] for row in own]
        place.plot(
            loads, [row["p95"] for row in own], line, marker="o", label=name, color=COLOURS[name]
        )
        place.fill_between(
            loads,
            [row["p95_least"] for row in own],
            [row["p95_most"] for row in own],
            color=COLOURS[name],
            alpha=0.15,
            linewidth=0,
        )
    alone = result["routing"]["alone_p95"]
    place.axhline(alone, color="grey", linestyle=":", label="each request alone")
    place.set(xlabel="load", ylabel="seconds", title="P95 latency by router (SD1.5 on a CPU)")
    place.set_ylim(bottom=0)
    place.grid(visible=True, color="#eeeeee")
    place.legend(fontsize=8)


def draw_variants(place: Any, result: Row) -> None:
    rows = result["routing"]["variants"]
    titles = list(dict.fromkeys(row["variant"] for row in rows))
    names = [n for n in dict.fromkeys(row["router"] for row in rows) if n != "cost"]
    high = 0.8 / len(names)
    for at, name in enumerate(names):
        gains = []
        for title in titles:
            p95 = {row["router"]: row["p95"] for row in rows if row["variant"] == title}
            gains.append(100 * (1 - p95["cost"] / p95[name]))
        where = [n + (at - (len(names) - 1) / 2) * high for n in range(len(titles))]
        place.barh(where, gains, high * 0.9, label=f"than {name}", color=COLOURS[name])
    place.axvline(30, color="black", linestyle=":", label="asked: 30 %")
    place.set_yticks(range(len(titles)), titles)
    place.invert_yaxis()
    place.set(xlabel="% lower", title="P95 of routing by cost at load 0.8")
    place.legend(fontsize=8, loc="lower right")


def draw_cpu_slo(place: Any, result: Row) -> None:
    draw_slo(place, result["slo"]["curves"], "sd15-half-cpu", "SD1.5 on a CPU, measured costs")


def draw_gpu_slo(place: Any, result: Row) -> None:
    draw_slo(place, result["slo"]["curves"], "sdxl-h800-assumed", "SDXL on a GPU, assumed costs")


def draw_slo(place: Any, curves: list[Row], costs: str, title: str) -> None:
    for arrivals, line in (("Poisson", "-"), ("bursty", "--")):
        for name in dict.fromkeys(row["scheduler"] for row in curves):
            own = [
                row
                for row in curves
                if (row["costs"], row["arrivals"], row["scheduler"]) == (costs, arrivals, name)
            ]
            place.plot(
                [row["load"] for row in own],
                [100 * row["in_time"] for row in own],
                line,
                marker="o",
                markersize=4,
                color=COLOURS[name],
                label=name if arrivals == "Poisson" else f"{name} (bursty)",
            )
    place.set(xlabel="load", ylabel="% of requests in time", title=f"In time: {title}")
    place.set_ylim(0, 103)
    place.grid(visible=True, color="#eeeeee")
    place.legend(fontsize=7, handlelength=4)


def draw_scale(place: Any, result: Row) -> None:
    rows = result["scale"]["by_workers"]
    workers = [row["workers"] for row in rows]
    for name in ("cost", "tokens", "requests"):
        times = [row[f"{name}_ms"] for row in rows]
        place.plot(workers, times, marker="o", label=f"route by {name}", color=COLOURS[name])
    place.axhline(0.1, color="black", linestyle=":", label="asked of 8 workers: 0.1 ms")
    place.set_xscale("log")
    place.set_xticks(workers, [str(n) for n in workers], minor=False)
    place.minorticks_off()
    place.set_ylim(bottom=0)
    place.set(
        xlabel="workers", ylabel="milliseconds", title="Time of one routing decision (measured)"
    )
    place.grid(visible=True, color="#eeeeee")
    place.legend(fontsize=8)
