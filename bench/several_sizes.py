"""Edits of pictures of several sizes in one call: one denoising step against the module, dense.

    OMP_NUM_THREADS=1 python -m bench.several_sizes --threads 1

The denoisers have the widths of real ones and few layers, with random weights. The sides, in turn
in each round:

- `module`: the module's own call, with all pictures.
- `edit`: an edit of the same call, a square masked in each picture.
- `prepacked`: the same with pre-packed weights.

The limit is that of FLOPs: the module's over the edit's. The error is that of the edit, of recorded
inputs, against the module. Writes bench/results/several-sizes.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.transformers import transformer_lumina2 as lumina2
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import maskfx
from bench import harness, masks
from bench.report import columns, milliseconds, times
from bench.shapes import FULL_DEPTH, normal, wake

RATIOS = (0.1, 0.2, 0.35)
SIDES = ((12, 12), (12, 16), (16, 8))  # in tokens: 192x192, 192x256 and 256x128 pixels
COUNTS = [height * width for height, width in SIDES]
TEXT = 32
EDITS = ("edit", "prepacked")

QWEN = next(shape for shape in FULL_DEPTH if shape.name == "qwen").config | {"num_layers": 1}
Z_IMAGE = {"n_layers": 1, "n_refiner_layers": 1}  # the widths are the defaults
DIM, HEADS, KV_HEADS, CAPTION = 2304, 24, 8, 2304  # of Lumina 2
AXES, AXES_LENS = (32, 32, 32), (300, 512, 512)


class PackedNextDiT(nn.Module):
    """Blocks of Lumina 2 over the tokens of several pictures, which attend each to itself.

    Linear layers and norms run over the whole sequence, and attention picture by picture. Each
    picture has the same text, whose tokens are its first keys.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.text = nn.Linear(64, DIM), nn.Linear(CAPTION, DIM)
        self.time = nn.Linear(256, 1024)
        self.layers = nn.ModuleList(
            lumina2.Lumina2TransformerBlock(DIM, HEADS, KV_HEADS, 256, None, 1e-5)
            for _ in range(layers)
        )
        self.rope = lumina2.Lumina2RotaryPosEmbed(10000, list(AXES), list(AXES_LENS))
        self.norm = lumina2.LuminaLayerNormContinuous(
            DIM, 1024, elementwise_affine=False, eps=1e-6, bias=True, out_dim=64
        )

    def forward(
        self, tokens: Tensor, timestep: Tensor, context: Tensor, sizes: Sequence[tuple[int, int]]
    ) -> Tensor:
        emb = nn.functional.silu(self.time(wave(timestep)))
        text, done = self.text(context), []
        for part, (height, width) in zip(
            self.embed(tokens).split([h * w for h, w in sizes], 1), sizes, strict=True
        ):
            x = torch.cat([text, part], 1)
            turns = self.rope._get_freqs_cis(positions(text.shape[1], height, width)[None])
            for layer in self.layers:
                x = layer(x, None, turns, emb)
            done.append(x[:, text.shape[1] :])
        found: Tensor = self.norm(torch.cat(done, 1), emb)
        return found


def wave(timestep: Tensor) -> Tensor:
    angles = timestep[:, None] * torch.exp(-0.07 * torch.arange(128))
    return torch.cat([angles.sin(), angles.cos()], 1)


def positions(text: int, height: int, width: int) -> Tensor:
    """The position of each token: of the text, then of the picture's rows and columns."""
    found = torch.zeros(text + height * width, 3, dtype=torch.int64)
    found[:text, 0] = torch.arange(text)
    found[text:, 0] = text
    found[text:, 1] = torch.arange(height).repeat_interleave(width)
    found[text:, 2] = torch.arange(width).repeat(height)
    return found


def z_image() -> tuple[nn.Module, dict[str, Any]]:
    """Z-Image, 1 of 30 layers and 1 of 2 refiners each: a list of pictures."""
    given = {
        "x": [normal(i, 16, 1, 2 * h, 2 * w) for i, (h, w) in enumerate(SIDES)],
        "t": torch.tensor([0.5] * len(SIDES)),
        "cap_feats": [normal(i, TEXT, 2560) for i in range(len(SIDES))],
        "return_dict": False,
    }
    return diffusers.ZImageTransformer2DModel(**Z_IMAGE), given


def next_dit() -> tuple[nn.Module, dict[str, Any]]:
    """The blocks of Lumina 2, 2 of 26, over pictures whose tokens are one sequence."""
    given = {
        "tokens": normal(0, 1, sum(COUNTS), 64),
        "timestep": torch.tensor([500.0]),
        "context": normal(1, 1, TEXT, CAPTION),
        "sizes": list(SIDES),
    }
    return PackedNextDiT(2), given


def qwen_image() -> tuple[nn.Module, dict[str, Any]]:
    """Qwen-Image, 1 of 60 layers: a picture and two references, which see one another."""
    given = {
        "hidden_states": normal(0, 1, sum(COUNTS), 64),
        "encoder_hidden_states": normal(1, 1, TEXT, 3584),
        "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.long),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, h, w) for h, w in SIDES]],
        "return_dict": False,
    }
    return diffusers.QwenImageTransformer2DModel(**QWEN), given


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "z-image": z_image,
    "next-dit": next_dit,
    "qwen-image": qwen_image,
}


def measure(name: str, rounds: int) -> dict[str, Any]:
    made, given = MODELS[name]()
    module = made.eval().requires_grad_(False)
    wake(module)
    denoiser, packed = maskfx.compile(module), maskfx.compile(module, prepack=True)
    wanted = values(module(**given))
    kept = denoiser.record(**given)[1]
    kept_packed = packed.record(**given)[1]
    whole = harness.count_flops(lambda: module(**given))["total"]
    rows = []
    for ratio in RATIOS:
        squares = [masks.square(height, width, ratio) for height, width in SIDES]
        square = torch.cat([one.flatten() for one in squares])
        if denoiser.mask_shape(given) != square.shape:  # in sites of latents, 2x2 of a token
            squares = [one.repeat_interleave(2, 0).repeat_interleave(2, 1) for one in squares]
        mask = torch.cat([one.flatten() for one in squares])
        step = maskfx.EditStep(given, mask, kept)
        step_packed = maskfx.EditStep(given, mask, kept_packed)
        sides: dict[str, Callable[[int], Any]] = {
            "module": lambda _: module(**given),
            "edit": lambda _, s=step: denoiser.edit([s]),  # type: ignore[misc]
            "prepacked": lambda _, s=step_packed: packed.edit([s]),  # type: ignore[misc]
        }
        found = [values(run(0)) for run in sides.values()][1:]  # warm, too
        seconds = harness.alternate(sides, rounds)
        flops = harness.count_flops(lambda s=step: denoiser.edit([s]))["total"]  # type: ignore[misc]
        rows.append(
            {
                "masked": float(square.float().mean()),
                "seconds": {side: harness.figure(own) for side, own in seconds.items()},
                "faster": {side: harness.ratio(seconds["module"], seconds[side]) for side in EDITS},
                "limit": whole / flops,
                "error": max(float((own - wanted).norm() / wanted.norm()) for own in found),
            }
        )
        print(table(name, rows[-1:]), flush=True)
    reasons = [reason for one in denoiser.compilations for reason in one.reasons.values()]
    runs = denoiser.explain() if reasons else "on rows"
    return {"parameters": sum(p.numel() for p in module.parameters()), "runs": runs, "masks": rows}


def values(output: Any) -> Tensor:
    """All numbers of a result, as one row."""
    return torch.cat([v.flatten() for v in pytree.tree_leaves(output) if isinstance(v, Tensor)])


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [["model", "m", "module, ms", *(f"{side}, ms, x module" for side in EDITS)]]
    lines[0] += ["limit", "error"]
    for row in rows:
        own = [
            f"{milliseconds(row['seconds'][side])}, {times(row['faster'][side])}" for side in EDITS
        ]
        first = [name, f"{row['masked']:.3f}", milliseconds(row["seconds"]["module"])]
        lines.append([*first, *own, f"{row['limit']:.2f}", f"{row['error']:.0e}"])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=harness.ROOT / "bench/results/several-sizes.json"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    result = {
        **harness.header("bench.several_sizes", sys.argv[1:] if arguments is None else arguments),
        "sides": [list(pair) for pair in SIDES],
        "rounds": options.rounds,
        "models": {name: measure(name, options.rounds) for name in options.models},
    }
    harness.write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
