"""Small denoisers whose operators mix rows in every way that ranks exchange rows for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx


class Tiny(nn.Module):
    """Windows, moments, resampling, patches, attention to sites and text, sums over sites."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.time, self.text = nn.Linear(1, 16), nn.Linear(8, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.leave = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        fine = F.silu(self.norm(self.enter(sample)))
        coarse = self.down(fine) + self.time(timestep.view(-1, 1).float() / 1000)[:, :, None, None]
        b, c, h, w = coarse.shape
        rows = coarse.flatten(2).transpose(1, 2)
        rows = rows + self.out(attend(self.qkv(rows)))
        text = self.text(encoder_hidden_states)
        rows = rows + F.scaled_dot_product_attention(
            self.query(rows)[:, None], self.key(text)[:, None], self.value(text)[:, None]
        ).squeeze(1)
        kv = F.softplus(rows).transpose(1, 2) @ rows  # attention without a softmax
        rows = rows + 0.05 * (F.softplus(rows) @ kv)
        coarse = rows.transpose(1, 2).view(b, c, h, w)
        coarse = coarse * torch.sigmoid(coarse.mean((2, 3), keepdim=True))
        repeated = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        both = torch.cat([fine + self.up(coarse), repeated], 1)
        result: Tensor = self.leave(both)
        return result


class Joint(nn.Module):
    """Text that attends to itself, then twice together with the sites, and changes with time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time = nn.Conv2d(4, 16, 2, stride=2), nn.Linear(1, 16)
        self.text, self.alone = nn.Linear(8, 16), nn.Linear(16, 48)
        self.joint = nn.ModuleList(nn.Linear(16, 48) for _ in range(4))
        self.mlp = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.leave = nn.ConvTranspose2d(16, 4, 2, stride=2)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        coarse = self.enter(sample)
        b, c, h, w = coarse.shape
        rows = coarse.flatten(2).transpose(1, 2)
        time = self.time(timestep.view(-1, 1).float() / 1000)[:, None]
        text = self.text(encoder_hidden_states) + time
        text = text + attend(self.alone(text))
        for i in (0, 2):
            both = attend(torch.cat([self.joint[i](text), self.joint[i + 1](rows)], 1))
            text = text + torch.tanh(self.mlp[i](both[:, : text.shape[1]] * time))
            rows = rows + torch.tanh(self.mlp[i + 1](both[:, text.shape[1] :]))
        result: Tensor = self.leave(rows.transpose(1, 2).reshape(b, c, h, w))
        return result


class Sigmoid(nn.Module):
    """Attention whose scores pass through a sigmoid in place of a softmax, to sites and text."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time = nn.Conv2d(4, 16, 3, padding=1), nn.Linear(1, 16)
        self.qkv, self.query, self.text = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(8, 32)
        self.leave = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        fine = self.enter(sample) + self.time(timestep.view(-1, 1).float() / 1000)[:, :, None, None]
        b, c, h, w = fine.shape
        rows = fine.flatten(2).transpose(1, 2)
        q, k, v = (x.view(b, -1, 2, 8).transpose(1, 2) for x in self.qkv(rows).chunk(3, -1))
        seen = torch.sigmoid(0.3 * (q @ k.transpose(-1, -2))) @ v
        rows = rows + 0.05 * seen.transpose(1, 2).reshape(b, -1, 16)
        key, value = self.text(encoder_hidden_states).chunk(2, -1)
        rows = rows + torch.sigmoid(self.query(rows) @ key.transpose(-1, -2)) @ value
        result: Tensor = self.leave(rows.transpose(1, 2).reshape(b, c, h, w))
        return result


class Resnet(nn.Module):
    """Norms before windows: one scaled and shifted by the request, one whose rows are added."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time = nn.Conv2d(4, 16, 3, padding=1), nn.Linear(1, 32)
        self.text = nn.Linear(8, 32)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(4))
        self.windows = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.leave = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = self.enter(sample)
        given = self.time(timestep.view(-1, 1).float() / 1000)
        given = given + self.text(encoder_hidden_states).mean(1)
        scale, shift = given[:, :, None, None].chunk(2, 1)
        y = self.windows[0](F.silu(self.norms[0](x)))
        y = self.windows[1](F.silu(self.norms[1](y) * (1 + scale) + shift))
        z = F.silu(self.norms[2](x + y))
        y = z + self.windows[2](z)
        result: Tensor = self.leave(self.norms[3](y) + x)  # the sum isn't of the norm alone
        return result


def attend(qkv: Tensor) -> Tensor:
    b, n, _ = qkv.shape
    q, k, v = (x.view(b, n, 2, 8).transpose(1, 2) for x in qkv.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, 16)


def build(kind: Callable[[], nn.Module] = Tiny) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().eval().requires_grad_(False)


def inputs(seed: int, height: int = 8, width: int = 8, batch: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(batch, 4, height, width, generator=generator),
        "timestep": torch.tensor([500] * batch),
        "encoder_hidden_states": torch.randn(batch, 5, 8, generator=generator),
    }


@cache
def compiled(kind: Callable[[], nn.Module] = Tiny) -> maskfx.CompiledDenoiser:
    """One that every test of this process shares; none may change its weights."""
    denoiser = maskfx.compile(build(kind))
    denoiser.record(**inputs(0))
    return denoiser
