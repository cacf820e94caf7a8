"""The costs that bench.simulate runs with, and where each number of them is from.

    python -m bench.simulate.serving_costs

Writes bench/costs/sd15-half-cpu.json, fitted to the times in
bench/results/denoisers-a-two-cores.json (and encoders and disk from what other results or no result
measured: listed in `origin`), and bench/costs/sdxl-h800-assumed.json, which is no measurement of
ours: two figures that a paper reports, and assumptions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.regression import ObservationWindow

BENCH = Path(__file__).resolve().parents[1]
COSTS = BENCH / "costs"
MEASURED = BENCH / "results" / "denoisers-a-two-cores.json"
SIDE = "ours-prepack"


def rows_of(result: dict[str, Any]) -> list[tuple[tuple[float, ...], float]]:
    """(1, requests, sites, sites whole) and seconds of each mask alone, and of the ragged batch."""
    whole = result["extras"]["tables"]["sites"]
    rows: list[tuple[tuple[float, ...], float]] = []
    for mask in result["masks"]:
        sites = mask["ratio"] * whole
        rows.append(((1.0, 1.0, sites, sites * whole), mask["seconds"][SIDE]["median"]))
    ragged = result["extras"]["ragged"]
    wholes = [height * width for height, width in map(latent, ragged["requests"])]
    sites = [w * float(r["mask"]) for w, r in zip(wholes, ragged["requests"], strict=True)]
    pairs = sum(w * s for w, s in zip(wholes, sites, strict=True))
    together = ragged["seconds"][SIDE]["median"]
    rows.append(((1.0, float(len(wholes)), sum(sites), pairs), together))
    return rows


def latent(request: dict[str, Any]) -> tuple[int, int]:
    height, width = request["latent"].split("x")
    return int(height), int(width)


def fitted_steps(result: dict[str, Any]) -> dict[str, float | None]:
    window = ObservationWindow((0.0, 0.0, 0.0, 0.0), trust=1e-6)
    for features, seconds in rows_of(result):
        window.add(features, seconds)
    found, r2 = window.fit()
    names = ("base", "per_request", "per_site", "per_pair")
    return {**dict(zip(names, map(float, found), strict=True)), "r2": r2}


def measured() -> FittedCosts:
    result = json.loads(MEASURED.read_text())
    return FittedCosts(
        **fitted_steps(result),  # type: ignore[arg-type]  # names of floats
        around_base=0.05,
        around_per_site=1e-4,
        record=1.1,
        disk_bandwidth=1e9,
        origin=(
            f"base, per_request, per_site, per_pair: fitted to {MEASURED.name} (side {SIDE}, "
            f"commit {result['commit'][:7]}, {result['hardware']['threads']} threads of "
            f"{result['hardware']['cpu']}: SD1.5's UNet at half width). Assumed: around_*, record, "
            "disk_bandwidth; loads are free, as rows on the host are where the CPU computes."
        ),
    )


def assumed() -> FittedCosts:
    """FlashPS (EuroSys '26) on SDXL and an H800: 2.27 s at a mask ratio of 0.2, 2.2 times dense."""
    steps, sites, ratio = 50, 128 * 128, 0.2
    dense = 2.27 * 2.2 / steps
    fixed = dense * (1 / 2.2 - ratio) / (1 - ratio)
    return FittedCosts(
        base=fixed * 2 / 3,
        per_request=fixed / 3,
        per_site=(dense - fixed) / sites,
        load_bandwidth=25e9,
        around_base=0.1,
        around_per_site=0.2 / sites,
        record=1.1,
        disk_bandwidth=2e9,
        origin=(
            "Not measured. From FlashPS' SDXL on an H800: 2.27 s for an edit with mask ratio 0.2, "
            "2.2 times faster than dense. Assumed: 50 steps of 128x128 sites; of what a step takes "
            "besides its sites, two thirds are shared by the batch; linear in sites; 0.1-0.3 s "
            "around the steps; 25 GB/s from the host, 2 GB/s from disk."
        ),
    )


def main() -> None:
    COSTS.mkdir(exist_ok=True)
    for name, costs in (("sd15-half-cpu", measured()), ("sdxl-h800-assumed", assumed())):
        (COSTS / f"{name}.json").write_bytes(costs.to_json())
        print(name, costs)


def load(name: str) -> FittedCosts:
    """One of bench/costs by its name, or any file."""
    path = Path(name)
    return FittedCosts.from_json((path if path.suffix else COSTS / f"{name}.json").read_bytes())


if __name__ == "__main__":
    main()
