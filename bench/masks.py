"""Masks: which share of a picture they cover, and their shape. Knows nothing of models."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import torch
from torch import Tensor

KINDS = ("square", "strokes")
# A log-normal distribution fitted to the masks of a face swap and try-on service: median and
# spread, and the smallest and largest that were seen. Its mean is 0.112.
MEDIAN_RATIO, RATIO_SPREAD, RATIO_BOUNDS = 0.095, 0.577, (0.0157, 0.421)
REAL_RATIOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "mask_ratios.json"


def make(kind: str, height: int, width: int, ratio: float, seed: int = 0) -> Tensor:
    """A boolean (height, width) mask, True = edit."""
    if ratio >= 1.0:
        return torch.ones(height, width, dtype=torch.bool)
    if kind == "square":
        return square(height, width, ratio)
    if kind == "strokes":
        return strokes(height, width, ratio, seed)
    raise ValueError(f"mask kind {kind!r}: choose one of {', '.join(KINDS)}")


def square(height: int, width: int, ratio: float) -> Tensor:
    """A square off the middle, so that its edges don't lie on those of coarser levels."""
    side = max(1, round(math.sqrt(ratio * height * width)))
    high, wide = min(side, height), min(side, width)
    top, left = (height - high) // 3, (width - wide) * 2 // 3
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[top : top + high, left : left + wide] = True
    return mask


def strokes(height: int, width: int, ratio: float, seed: int = 0) -> Tensor:
    """Thick polylines, drawn until exactly the wanted number of sites is covered."""
    draw = random.Random(seed)
    wanted = max(1, round(ratio * height * width))
    radius = max(1.0, min(height, width) / 24)  # a brush of about 45 pixels on a 512 pixel picture
    rows, columns = torch.arange(height)[:, None], torch.arange(width)[None, :]
    mask = torch.zeros(height, width, dtype=torch.bool)
    while True:
        y, x = draw.uniform(0, height - 1), draw.uniform(0, width - 1)
        angle = draw.uniform(0, 2 * math.pi)
        for step in range(draw.randint(min(height, width) // 2, min(height, width))):
            if step % 8 == 7:
                angle += draw.uniform(-1.0, 1.0)
            y, x = y + math.sin(angle), x + math.cos(angle)
            if not (0 <= y <= height - 1 and 0 <= x <= width - 1):
                break
            fresh = ((rows - y) ** 2 + (columns - x) ** 2 <= radius**2) & ~mask
            missing = wanted - int(mask.sum())
            mask.view(-1)[fresh.view(-1).nonzero()[:missing, 0]] = True
            if int(fresh.sum()) >= missing:
                return mask


def production_ratios(path: Path = REAL_RATIOS) -> list[float] | None:
    """The measured ratios of a service, where this machine has them."""
    if not path.exists():
        return None
    ratios: list[float] = json.loads(path.read_text())["production"]
    return ratios


def fitted_ratio(draw: random.Random) -> float:
    """A ratio as that service's masks have them."""
    ratio = MEDIAN_RATIO * math.exp(RATIO_SPREAD * draw.gauss(0.0, 1.0))
    return min(max(ratio, RATIO_BOUNDS[0]), RATIO_BOUNDS[1])
