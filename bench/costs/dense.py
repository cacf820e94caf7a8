"""CPU seconds of dense steps of the shipped transformer, as costs for bench.simulate.

    OMP_NUM_THREADS=1 python -m bench.costs.dense [--rounds N] [--out FILE]

Dense members of a step on a CPU are computed by the module, in one call for the requests of each
size, so such calls are timed: latents of 24, 32 and 40 sites, as of pictures of 192, 256 and 320
pixels, 1 to 4 requests with guidance each. A call costs `per_size`, and each request and each of
its sites their part; what mixes sites grows with the pairs of them. Reports the fit's R2, writes
bench/costs/dit-cpu.json. Edits, recordings and patches are not measured here
(`bench.costs.compositions` does).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bench.harness import ROOT
from maskfx.runtime.planner.least_squares import non_negative
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.regression import explained
from maskfx.shipped import reference

SIDES, REQUESTS, TEXT = (24, 32, 40), (1, 2, 4), 32


@torch.no_grad()
def seconds(module: nn.Module, side: int, requests: int) -> float:
    """Return the CPU seconds of one call for requests of a size, with guidance."""
    draw, batch = torch.Generator().manual_seed(side), 2 * requests
    config = module.config
    tokens, wide = (side // 2) ** 2, (config.in_channels, config.joint_attention_dim)
    given = {
        "hidden_states": torch.randn(batch, tokens, wide[0], generator=draw),
        "encoder_hidden_states": torch.randn(batch, TEXT, wide[1], generator=draw),
        "pooled_projections": torch.randn(batch, config.pooled_projection_dim, generator=draw),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }
    began = time.thread_time()
    module(**given, return_dict=False)
    return time.thread_time() - began


def fitted(rounds: int) -> FittedCosts:
    module = reference("dit").transformer.eval()
    cases = [(side, requests) for side in SIDES for requests in REQUESTS]
    seconds(module, *cases[0])
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            found[case].append(seconds(module, *case))
    rows = np.array(
        [(1.0, n, 2 * n * side**2, 2 * n * side**4) for side, n in cases], dtype=np.float64
    )
    took = np.array([statistics.median(found[case]) for case in cases])
    per_size, per_request, per_site, per_pair = non_negative(rows, took).tolist()
    said = rows @ np.array([per_size, per_request, per_site, per_pair])
    r2 = explained(took, said, np.ones(len(took), np.bool_))
    return FittedCosts(
        base=0.0,
        per_request=per_request,
        per_site=per_site,
        per_size=per_size,
        per_pair=per_pair,
        around_base=0.05,
        around_per_site=1e-4,
        record=1.1,
        r2=r2,
        origin=(
            f"Dense steps: fitted to the CPU seconds of {len(cases)} calls of the shipped 'dit' on "
            f"one core, medians of {rounds} (bench.costs.dense). Assumed: around_*, record, and "
            "that sites of other steps cost as much."
        ),
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "costs" / "dit-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    costs = fitted(options.rounds)
    options.out.write_bytes(costs.to_json())
    print(costs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
