"""The autoencoder between pixels and latents, and its training."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn

from bench.reference.loop import Numbers
from bench.reference.norms import quicken_norms
from bench.reference.paint import paint
from bench.reference.scenes import SIDE, draw_scene

# pixels of one step: four crops of 128 or one whole picture, and more where there is a GPU
CROPS = ((128, 4), (128, 4), (SIDE, 1))


def make_vae(latents: int, channels: tuple[int, ...] = (16, 32, 64, 128)) -> AutoencoderKL:
    """Factor 8; no attention, so that it is quick at every size."""
    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=latents,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=SIDE,
        force_upcast=False,
    )


def as_pictures(pixels: np.ndarray) -> Tensor:
    """(n, side, side, 3) in 0..255 to (n, 3, side, side) in -1..1."""
    values = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2)
    return values.float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)


class VaeTask:
    """Reconstructions: absolute differences of pixels and of their slopes, and a little KL."""

    rate = 1e-3
    average = 0.998

    def __init__(self, latents: int, device: torch.device, scale: int = 1) -> None:
        self.name = f"vae{latents}"
        self.device = device
        self.scale = scale
        self.pull = 1e-4 if latents <= 4 else 5e-4
        self.vae = make_vae(latents).to(device=device, memory_format=torch.channels_last)
        self.module: nn.Module = self.vae
        if device.type == "cpu":
            quicken_norms(self.vae)

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        side, count = CROPS[step % len(CROPS)]
        x = self.crops(step, side, count * self.scale).to(self.device)
        noise = torch.Generator().manual_seed(step)
        with torch.autocast(self.device.type, torch.bfloat16):
            spread = self.vae.encode(x).latent_dist
            chance = torch.randn(spread.mean.shape, generator=noise).to(x)
            y = self.vae.decode(spread.mean + spread.std * chance, return_dict=False)[0]
        y = y.float()
        off = (y - x).abs().mean()
        edges = sum((slopes(y, axis) - slopes(x, axis)).abs().mean() for axis in (2, 3))
        kl = (spread.mean.float() ** 2 + spread.var.float() - 1 - spread.logvar.float()).mean() / 2
        return off + 0.5 * edges + self.pull * kl, {"off": off.item(), "kl": kl.item()}

    def crops(self, step: int, side: int, count: int) -> Tensor:
        rng = np.random.default_rng((1, step))
        crops = []
        while len(crops) < count:
            pixels = paint(draw_scene("train", int(rng.integers(2**40)))).pixels
            for _ in range(2 if side < SIDE else 1):
                top, left = rng.integers(SIDE - side + 1, size=2)
                crops.append(pixels[top : top + side, left : left + side])
        return as_pictures(np.stack(crops[:count]))

    def judge(self, averaged: nn.Module) -> Numbers:
        quality = []
        for seed in range(24):
            x = as_pictures(paint(draw_scene("held-out", seed)).pixels[None]).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16):
                mean = averaged.encode(x).latent_dist.mean
                y = averaged.decode(mean, return_dict=False)[0]
            wrong = F.mse_loss(y.float().clamp(-1, 1), x).item() / 4
            quality.append(-10 * float(np.log10(wrong)))
        return {"psnr": float(np.mean(quality)), "worst": min(quality)}


def slopes(x: Tensor, axis: int) -> Tensor:
    return x.diff(dim=axis)
