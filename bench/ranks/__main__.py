"""The time of one step on one and on two ranks: processes of one thread each.

    python -m bench.ranks

A diffusion transformer (SD3's class, 4 blocks of width 512) with 1,024 image tokens, or those of
another latent (`--side`). Batches: one dense member; an edit of 11 % of the sites (`--share`); two
such edits, as the branches of guidance are, which need no exchange. Per batch and number of ranks:
seconds of a step, with the messages to the ranks; seconds that the ranks computed; bytes that each
sent to others, and of cached rows that each read. Edits also run with keys and values gathered, and
with each rank's share of the cached keys. Writes ranks.json to bench/results (ranks-SIDE.json for
another latent). With fewer idle cores than ranks, the ratios mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel

import maskfx
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.report import columns
from maskfx import DenseStep, EditStep
from maskfx.distributed.links import LinkCosts
from maskfx.distributed.rank_group import RankGroup

SIDE, TEXT, SHARE = 64, 77, 0.11
GREATEST = 192  # side of a latent
GATHERED, BY_RANK = LinkCosts(load=0.0), LinkCosts(exchange=0.0)


def model(blocks: int) -> SD3Transformer2DModel:
    torch.manual_seed(0)
    made: SD3Transformer2DModel = SD3Transformer2DModel(
        sample_size=GREATEST,
        patch_size=2,
        in_channels=16,
        num_layers=blocks,
        attention_head_dim=64,
        num_attention_heads=8,
        joint_attention_dim=256,
        caption_projection_dim=512,
        pooled_projection_dim=128,
        out_channels=16,
        pos_embed_max_size=GREATEST // 2,
    )
    return made.eval().requires_grad_(False)


def inputs(seed: int, side: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 16, side, side, generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT, 256, generator=generator),
        "pooled_projections": torch.randn(1, 128, generator=generator),
        "timestep": torch.tensor([500]),
        "return_dict": False,
    }


def centre(side: int, share: float) -> torch.Tensor:
    """A square of the share of all sites, in the middle."""
    inner = 2 * round(side * share**0.5 / 2)
    mask = torch.zeros(side, side, dtype=torch.bool)
    start = (side - inner) // 2
    mask[start : start + inner, start : start + inner] = True
    return mask


def measure(rounds: int, blocks: int, side: int, share: float) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    denoiser = maskfx.compile(model(blocks))
    cache = denoiser.record(**inputs(0, side))[1]
    mask = centre(side, share)
    edits = [EditStep(inputs(seed, side), mask, cache) for seed in (1, 2)]
    batches: dict[str, tuple[list[Any], LinkCosts]] = {
        "dense": ([DenseStep(inputs(1, side))], GATHERED),
        "edit, gathered": (edits[:1], GATHERED),
        "edit, keys by rank": (edits[:1], BY_RANK),
        "two edits": (edits, GATHERED),
    }
    group = RankGroup(denoiser, 2)
    rows = []
    try:
        for name, (steps, costs) in batches.items():
            group.costs = costs
            parts: dict[int, list[Any]] = {1: [], 2: []}

            def run(ranks: int, steps: list[Any] = steps, parts: Any = parts) -> None:
                denoiser.step(steps, group.on(ranks))
                parts[ranks] = [part for part in group.last if part is not None]

            times = alternate({str(n): lambda _, n=n: run(n) for n in (1, 2)}, rounds + 1)
            times = {n: found[1:] for n, found in times.items()}
            row: dict[str, Any] = {"batch": name, "ratio": ratio(times["1"], times["2"])}
            for ranks, found in parts.items():
                row[f"ranks {ranks}"] = {
                    "seconds": figure(times[str(ranks)]),
                    "computing": [part.seconds for part in found],
                    "sent": [part.sent for part in found],
                    "loaded": [part.part.loaded for part in found],
                }
            rows.append(row)
        assert group.computed_here == group.failures == 0, "a step ran in this process"
    finally:
        group.stop()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["batch", "ranks", "ms", "times faster", "KiB sent", "KiB read"]]
    for row in rows:
        for ranks in (1, 2):
            found = row[f"ranks {ranks}"]
            faster = f"{row['ratio']['median']:.2f}" if ranks == 2 else ""
            sent, read = (
                " + ".join(str(round(n / 1024)) for n in found[key]) for key in ("sent", "loaded")
            )
            ms = f"{1000 * found['seconds']['median']:.0f}"
            lines.append([row["batch"], str(ranks), ms, faster, sent, read])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--side", type=int, default=SIDE, help="of the latent, 192 at most")
    parser.add_argument("--share", type=float, default=SHARE, help="of sites that are masked")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = header("bench.ranks", given)
    result["rows"] = measure(options.rounds, options.blocks, options.side, options.share)
    print(table(result["rows"]))
    name = "ranks" if options.side == SIDE else f"ranks-{options.side}"
    write_json(options.out / f"{name}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
