"""Requests and costs of `bench.rounds`, and where each number of them is from.

TetriServe's evaluation, as far as its text allows: resolutions, deadlines, arrival rates and the
work of an image are printed; the times of a step per degree are a plot, so they are assumed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf

import msgspec
import numpy as np

from bench.simulate.serving_costs import load as load_costs
from bench.simulate.traffic import gaps, ratios
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.degree_costs import DegreeCost, DegreeCosts
from maskfx.scheduling.load import Demand, Work

# Printed in the paper: FLUX.1-dev on H100s.
TOKENS = {256: 256, 512: 1024, 1024: 4096, 2048: 16384}
TFLOP = {256: 556.48, 512: 1388.24, 1024: 5045.92, 2048: 24964.72}  # of an image (Table 1)
DEADLINES = {256: 1.5, 512: 2.0, 1024: 3.0, 2048: 5.0}  # seconds at SLO scale 1.0
SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
RATES = (6, 9, 12, 15, 18)  # requests a minute
RATE = 12
REQUESTS = 300
MINUTE = 60.0  # "generating a 2048x2048 image on a single H100 GPU can take up to a minute"

# Of the model: FLUX.1-dev has 57 blocks of width 3072.
BLOCKS, WIDTH = 57, 3072
EXCHANGED = 4 * WIDTH * 2 * BLOCKS  # bytes per token and step: q, k, v and the result, bf16

# Assumed. The times of a step per degree are a plot in the paper (figure 2), without values; the
# part `efficiencies` of the benchmark shows what follows from other ones.
TABLE_STEPS = 50  # of Table 1: 2 FLOP per parameter and token of FLUX.1-dev give its sums
STEPS = 28  # diffusers' default for FLUX.1-dev; with 50 no degree meets the deadline of 2048
EFFICIENCY = {2: 0.98, 4: 0.96, 8: 0.94}  # of the divided work
COLLECTIVES = {2: 4e-3, 4: 5e-3, 8: 6e-3}  # seconds of a step: four all-to-alls a block
BANDWIDTH = 300e9  # bytes per second in an all-to-all: a third of the 900 GB/s of NVLink 4.0 (6.1)
LOWER = {  # efficiencies of degree 2, 4 and 8
    "0.98, 0.96, 0.94": EFFICIENCY,
    "0.96, 0.92, 0.88": {2: 0.96, 4: 0.92, 8: 0.88},
    "0.92, 0.85, 0.78": {2: 0.92, 4: 0.85, 8: 0.78},
    "0.85, 0.72, 0.6": {2: 0.85, 4: 0.72, 8: 0.6},
}

SIDES = (64, 96, 128)  # of the latent of an edit
EDIT_RATIO = 0.2  # an edit with this mask takes as long, on one device, as its deadline allows

# Whole pictures and edits by the same denoiser. Assumed of an edit of a share m of s sites: it
# shares the base of a step, computes m s sites and m s^2 pairs of a query and a key, and loads keys
# and values of the other sites in every block, from the host, while it computes. Its deadline is
# to that of a whole picture of its size as the time of an edit with `EDIT_RATIO`, on one device, to
# the time of that picture: neither kind has more time for its work.
EDITED = (0.7, 0.3)  # shares of edits
LOADED = 2 * WIDTH * 2 * BLOCKS  # bytes per site that isn't computed, and step: k and v, bf16
HOST_BANDWIDTH = 50e9  # bytes per second and device: most of the 64 GB/s of PCIe 5.0


def degree_costs(
    one: FittedCosts, origin: str, efficiency: Mapping[int, float] = EFFICIENCY
) -> DegreeCosts:
    """The assumed collectives and efficiencies on top of the costs on one device."""
    by_degree = {
        k: DegreeCost(
            fixed=COLLECTIVES[k],
            slowdown=1 / efficiency[k],
            per_site=EXCHANGED * (k - 1) / k**2 / BANDWIDTH,
        )
        for k in efficiency
    }
    return DegreeCosts(one=one, by_degree=by_degree, origin=origin)


def flux_costs(efficiency: Mapping[int, float] = EFFICIENCY) -> DegreeCosts:
    """FLUX.1-dev on H100s: the printed work at the speed that the printed minute means.

    The work of a step is base + per_site s + per_pair s^2; the four printed values lie on such a
    parabola, which is taken through the first three. The fourth is off by less than 0.1 %.
    """
    speed = TFLOP[2048] / MINUTE
    points = [(TOKENS[side], TFLOP[side] / TABLE_STEPS / speed) for side in TOKENS]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    per_pair = (slopes[1] - slopes[0]) / (points[2][0] - points[0][0])
    per_site = slopes[0] - per_pair * (points[0][0] + points[1][0])
    base = points[0][1] - per_site * points[0][0] - per_pair * points[0][0] ** 2
    one = FittedCosts(base=base, per_request=0.0, per_site=per_site, per_pair=per_pair)
    return degree_costs(
        one,
        "TetriServe, Table 1, at 416 TFLOP/s: 2048x2048 in 50 steps takes a minute on one device, "
        "as it reports. Assumed: 28 steps; efficiencies and collectives of each degree.",
        efficiency,
    )


def edit_costs() -> DegreeCosts:
    """SDXL on H800s, as `bench.simulate` assumes it; rows of templates are on each device."""
    one = msgspec.structs.replace(load_costs("sdxl-h800-assumed"), load_bandwidth=None)
    return degree_costs(one, f"{one.origin} Divided over devices as assumed for FLUX.1-dev.")


@dataclass(frozen=True)
class Arrivals:
    """What is asked, and how often."""

    mix: str = "uniform"  # "skewed", "edits", or the side of the only resolution
    per_minute: float = RATE
    scale: float = 1.0  # of the deadlines
    burst: float = 1.0  # coefficient of variation between arrivals; 1: Poisson
    edited: float = 0.0  # share of masked edits; the others are whole pictures

    def describe(self) -> dict[str, object]:
        return asdict(self)


def shares(mix: str) -> Mapping[int, float]:
    """The probability of each resolution."""
    if mix == "uniform":
        return dict.fromkeys(TOKENS, 1 / len(TOKENS))
    if mix == "skewed":  # exp(L / Lmax), L = height width / 16^2
        weights = {side: float(np.exp(side**2 / 2048**2)) for side in TOKENS}
        return {side: weight / sum(weights.values()) for side, weight in weights.items()}
    return {int(mix): 1.0}


def images(arrivals: Arrivals, count: int, seed: int) -> list[Demand]:
    """Dense images, in the order of their arrival."""
    draw = np.random.default_rng(seed)
    chances = shares(arrivals.mix)
    sides = draw.choice(list(chances), count, p=list(chances.values())).tolist()
    times = np.cumsum(gaps(count, arrivals.per_minute / 60, arrivals.burst, draw)).tolist()
    return [
        Demand(str(n), dense(side), at, at + arrivals.scale * DEADLINES[side])
        for n, (side, at) in enumerate(zip(sides, times, strict=True))
    ]


def dense(side: int) -> Work:
    return Work(sites=TOKENS[side], whole=TOKENS[side], steps=STEPS)


def both_costs() -> DegreeCosts:
    """FLUX.1-dev as `flux_costs` has it, and the loads of edits."""
    costs = flux_costs()
    one = msgspec.structs.replace(costs.one, load_bandwidth=HOST_BANDWIDTH)
    origin = f"{costs.origin} Edits: {LOADED} bytes per cached site and step at 50 GB/s, assumed."
    return msgspec.structs.replace(costs, one=one, origin=origin)


def both(arrivals: Arrivals, costs: DegreeCosts, count: int, seed: int) -> list[Demand]:
    """Whole pictures and edits with production mask ratios, in the order of their arrival."""
    draw = np.random.default_rng(seed)
    found = []
    for demand in images(arrivals, count, seed):
        side = next(side for side, tokens in TOKENS.items() if tokens == demand.work.whole)
        [ratio] = ratios("production", 1, draw).tolist()
        if draw.random() < arrivals.edited:
            seconds = arrivals.scale * edit_deadline(costs, side)
            demand = replace(demand, work=part(side, ratio), due=demand.arrived + seconds)
        found.append(demand)
    return found


def part(side: int, ratio: float) -> Work:
    """An edit by the denoiser of the whole pictures."""
    sites = max(1, round(ratio * TOKENS[side]))
    return Work(sites, TOKENS[side], STEPS, bytes=(TOKENS[side] - sites) * LOADED)


def edit_deadline(costs: DegreeCosts, side: int) -> float:
    edited, whole = costs.step(1, [part(side, EDIT_RATIO)]), costs.step(1, [dense(side)])
    return DEADLINES[side] * edited / whole


def both_rate(costs: DegreeCosts, edited: float) -> float:
    """Requests a minute with as many device-seconds as `RATE` whole pictures, at degree 1."""

    def mean(share: float) -> float:
        asked = both(Arrivals(edited=share), costs, 5000, seed=0)
        return float(np.mean([costs.step(1, [d.work]) for d in asked]))

    return RATE * mean(0.0) / mean(edited)


def few_steps(demands: Iterable[Demand], steps: int) -> list[Demand]:
    """The same requests with fewer steps, and deadlines in proportion to them."""
    return [
        replace(
            d,
            work=replace(d.work, steps=steps),
            due=d.arrived + (d.due - d.arrived) * steps / d.work.steps,
        )
        for d in demands
    ]


def edits(arrivals: Arrivals, costs: DegreeCosts, count: int, seed: int) -> list[Demand]:
    """Masked edits with the mask ratios of `bench.simulate`."""
    draw = np.random.default_rng(seed)
    masks = ratios("public", count, draw).tolist()
    sides = draw.choice(SIDES, count).tolist()
    times = np.cumsum(gaps(count, arrivals.per_minute / 60, arrivals.burst, draw)).tolist()
    found = []
    for number, (ratio, side, at) in enumerate(zip(masks, sides, times, strict=True)):
        allowed = edit(side, EDIT_RATIO)
        seconds = arrivals.scale * allowed.steps * costs.step(1, [allowed])
        found.append(Demand(str(number), edit(side, ratio), at, at + seconds))
    return found


def edit(side: int, ratio: float) -> Work:
    return Work(sites=max(1, round(ratio * side**2)), whole=side**2, steps=50)


def edit_rate(costs: DegreeCosts, devices: int, load: float) -> float:
    """Edits a minute that occupy a share of the devices at degree 1, without batching."""
    asked = edits(Arrivals("edits", 1.0, inf), costs, 5000, seed=0)
    seconds = [d.work.steps * costs.step(1, [d.work]) for d in asked]
    return 60 * load * devices / float(np.mean(seconds))
