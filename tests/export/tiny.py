"""A denoiser of a few layers that has one of each kind: windows, group norms, both attentions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, TEXT = 8, 2, 6


class Tiny(nn.Module):
    """A picture denoiser: a window, a norm, attention to itself and to a text, a window."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(4, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.norm, self.time = nn.GroupNorm(2, WIDTH), nn.Linear(1, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.text_key, self.text_value = nn.Linear(TEXT, WIDTH), nn.Linear(TEXT, WIDTH)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        when = self.time(timestep.to(sample.dtype)[:, None] / 1000)
        wide = F.silu(self.norm(self.into(sample) + when[:, :, None, None]))
        rows = wide.flatten(2).transpose(1, 2)
        rows = rows + self.attend(rows, self.key(rows), self.value(rows))
        text = encoder_hidden_states
        rows = rows + self.attend(rows, self.text_key(text), self.text_value(text))
        return self.out(rows.transpose(1, 2).reshape(wide.shape))

    def attend(self, rows: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (self.query(rows), key, value)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def tiny(dtype: torch.dtype = torch.float32) -> Tiny:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tiny().to(dtype).eval().requires_grad_(False)


def arguments(
    batch: int = 1, height: int = 8, width: int = 8, text: int = 5, seed: int = 0
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(batch, 4, height, width, generator=draw),
        "timestep": torch.arange(batch) * 3 + 5,
        "encoder_hidden_states": torch.randn(batch, text, TEXT, generator=draw),
    }
