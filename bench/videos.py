"""Edits of videos: one denoising step of a moving mask against the module, dense.

    OMP_NUM_THREADS=2 python -m bench.videos --threads 2

The denoisers have the widths of real ones and few layers, with random weights. A square moves over
the frames, so that its union over all of them is larger than in each. The sides, in turn in each
round:

- `module`: diffusers' own module in full, as it is.
- `compiled`: the same under torch.compile, with `--compiled`.
- `each frame`: an edit that computes the masked sites of each frame.
- `all frames`: an edit with the union in every frame, as one without an axis of frames computes.

The limit is that of FLOPs: the module's over the edit's. The error is that of the edit, of recorded
inputs, against the module. Writes bench/results/videos.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import maskfx
from bench import harness
from bench.report import columns, milliseconds, times
from bench.shapes import FULL_DEPTH, wake

RATIOS = (0.05, 0.11, 0.21, 0.35)
FRAMES, HEIGHT, WIDTH, TEXT = 5, 32, 56, 64  # of latents: 17 frames of 256 x 448 pixels

WAN = next(shape for shape in FULL_DEPTH if shape.name == "wan").config | {"num_layers": 2}
COGVIDEOX = {
    "num_attention_heads": 30,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "text_embed_dim": 4096,
    "num_layers": 2,
    "sample_width": WIDTH,
    "sample_height": HEIGHT,
    "sample_frames": 4 * (FRAMES - 1) + 1,
    "max_text_seq_length": TEXT,
}


def wan() -> tuple[nn.Module, dict[str, Any]]:
    """The widths of Wan 2.1 with 1.3 billion parameters, 2 of its 30 layers."""
    return diffusers.WanTransformer3DModel(**WAN), inputs(4096, (16, FRAMES))


def cogvideox() -> tuple[nn.Module, dict[str, Any]]:
    """The widths of CogVideoX with 2 billion parameters, 2 of its 30 layers."""
    return diffusers.CogVideoXTransformer3DModel(**COGVIDEOX), inputs(4096, (FRAMES, 16))


# the widths of SD1.5 halved, as motion models are built on it; one layer per block
MOTION = {
    "block_out_channels": (160, 320, 640, 640),
    "layers_per_block": 1,
    "cross_attention_dim": 768,
    "num_attention_heads": 8,
    "motion_num_attention_heads": 8,
    "use_motion_mid_block": True,
}
STABLE_VIDEO = {
    "block_out_channels": (160, 320, 640, 640),
    "num_attention_heads": (5, 5, 10, 10),
    "layers_per_block": 1,
    "num_frames": FRAMES,
}


def animatediff() -> tuple[nn.Module, dict[str, Any]]:
    """AnimateDiff's motion model on SD1.5's UNet at half width, with a text for each frame."""
    given = inputs(768, (4, FRAMES), "sample")
    given["encoder_hidden_states"] = given["encoder_hidden_states"].repeat_interleave(FRAMES, 0)
    return diffusers.UNetMotionModel(**MOTION), given


def stable_video() -> tuple[nn.Module, dict[str, Any]]:
    """Stable Video Diffusion's UNet at half width."""
    given = inputs(1024, (FRAMES, 8), "sample", text=1)
    given["added_time_ids"] = torch.tensor([[6.0, 127.0, 0.02]])
    return diffusers.UNetSpatioTemporalConditionModel(**STABLE_VIDEO), given


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "wan": wan,
    "cogvideox": cogvideox,
    "animatediff": animatediff,
    "stable-video": stable_video,
}


def inputs(
    width: int, front: tuple[int, int], video: str = "hidden_states", text: int = TEXT
) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {
        video: torch.randn(1, *front, HEIGHT, WIDTH, generator=draw),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, text, width, generator=draw),
        "return_dict": False,
    }


def moving(ratio: float) -> Tensor:
    """A square of this share of each frame, which moves to the right and down."""
    side = max(round((ratio * HEIGHT * WIDTH) ** 0.5), 1)
    masks = torch.zeros(FRAMES, HEIGHT, WIDTH, dtype=torch.bool)
    for frame, mask in enumerate(masks):
        top, left = ((n - side) * frame // (FRAMES - 1) for n in (HEIGHT, WIDTH))
        mask[top : top + side, left : left + side] = True
    return masks


def measure(name: str, rounds: int, compiled: bool) -> dict[str, Any]:
    made, given = MODELS[name]()
    module = made.eval().requires_grad_(False)
    wake(module)
    denoiser = maskfx.compile(module)
    wanted = module(**given)[0]
    kept = denoiser.record(**given)[1]
    whole = harness.count_flops(lambda: module(**given))["total"]
    fast = torch.compile(module) if compiled else None
    rows = []
    for ratio in RATIOS:
        own = moving(ratio)
        union = own.any(0).expand_as(own)
        steps = {
            side: maskfx.EditStep(given, mask, kept)
            for side, mask in (("each frame", own), ("all frames", union))
        }
        sides: dict[str, Callable[[int], Any]] = {
            "module": lambda _: module(**given),
            **({"compiled": lambda _: fast(**given)} if fast is not None else {}),
            **{side: lambda _, s=step: denoiser.edit([s]) for side, step in steps.items()},  # type: ignore[misc]
        }
        results = {side: run(0) for side, run in sides.items()}  # warm, too
        seconds = harness.alternate(sides, rounds)
        dense = min(("module", "compiled"), key=lambda n: sum(seconds.get(n, [1e9])))
        row: dict[str, Any] = {
            "masked": float(own.float().mean()),
            "union": float(union.float().mean()),
            "seconds": {side: harness.figure(values) for side, values in seconds.items()},
            "best_dense": dense,
        }
        for side, step in steps.items():
            flops = harness.count_flops(lambda s=step: denoiser.edit([s]))["total"]  # type: ignore[misc]
            found = results[side][0][0]
            row[side] = {
                "faster_than_module": harness.ratio(seconds["module"], seconds[side]),
                "faster_than_best": harness.ratio(seconds[dense], seconds[side]),
                "limit": whole / flops,
                "error": float((found - wanted).norm() / wanted.norm()),
            }
        rows.append(row)
        print(table(name, rows[-1:]), flush=True)
    return {"parameters": sum(p.numel() for p in module.parameters()), "masks": rows}


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [["model", "m", "union", "side", "ms", "x module", "x best dense", "limit", "error"]]
    for row in rows:
        head = [name, f"{row['masked']:.3f}", f"{row['union']:.3f}"]
        for side in ("module", "compiled"):
            if side in row["seconds"]:
                lines.append([*head, side, milliseconds(row["seconds"][side]), *"----"])
        for side in ("each frame", "all frames"):
            own = row[side]
            faster = times(own["faster_than_module"]), times(own["faster_than_best"])
            limit = f"{own['limit']:.2f}"
            line = [side, milliseconds(row["seconds"][side]), *faster, limit, f"{own['error']:.0e}"]
            lines.append([*head, *line])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action="store_true", help="torch.compile as a side, too")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/results/videos.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    result = {
        **harness.header("bench.videos", sys.argv[1:] if arguments is None else arguments),
        "latent": [FRAMES, HEIGHT, WIDTH],
        "rounds": options.rounds,
        "models": {n: measure(n, options.rounds, options.compiled) for n in options.models},
    }
    harness.write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
